"""A real browser without a window: Debian's Chromium, driven through its own driver."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from programs import program
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--proxy-server=direct://"),
)


class Browser:
    """One window. Methods block: call them from a thread where a loop runs."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def open(self, url: str, *, width: int = 1280, height: int = 900, **media: str) -> None:
        """A page in a window of this size, under these media features (`color_scheme="dark"`)."""
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500},
        )
        features = [
            {"name": f"prefers-{name.replace('_', '-')}", "value": value}
            for name, value in media.items()
        ]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        self.driver.get(url)

    def text(self, selector: str) -> str:
        """Of the first element, as a person sees it; empty where there is none."""
        found = self.driver.find_elements(By.CSS_SELECTOR, selector)
        return found[0].text if found else ""

    def count(self, selector: str) -> int:
        return len(self.driver.find_elements(By.CSS_SELECTOR, selector))

    def until(self, met: Callable[[], Any], what: str) -> Any:
        limit = time.monotonic() + 120
        while not (value := met()):
            if time.monotonic() > limit:
                raise AssertionError(f"never: {what}\n{self.text('body')}")
            time.sleep(0.02)
        return value

    def shows(self, text: str, selector: str = "body") -> None:
        """Wait until an element holds this text."""
        self.until(lambda: text in self.text(selector), f"{text!r} in {selector}")

    def press(self, *keys: str) -> str:
        """Press keys. Returns what has the focus then: its id, else its tag."""
        for key in keys:
            webdriver.ActionChains(self.driver).send_keys(getattr(Keys, key)).perform()
        return self.focused()

    def write(self, text: str) -> None:
        webdriver.ActionChains(self.driver).send_keys(text).perform()

    def focused(self) -> str:
        return self.run(
            "const e = document.activeElement;return e.id || e.className || e.tagName.toLowerCase()"
        )

    def errors(self) -> list[str]:
        """What the console complained of since the last time."""
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if entry["level"] in ("SEVERE", "WARNING")
        ]


@contextmanager
def chromium(folder: str) -> Iterator[Browser]:
    """`folder` is empty and becomes the browser's profile."""
    options = webdriver.ChromeOptions()
    options.binary_location = program("chromium", "chromium")
    for flag in (*_FLAGS, f"--user-data-dir={folder}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = Service(program("chromedriver", "chromium-driver"))
    driver = webdriver.Chrome(options=options, service=service)
    try:
        yield Browser(driver)
    finally:
        driver.quit()
