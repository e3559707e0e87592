"""A real Prometheus on loopback, and promtool."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from programs import program

PACKAGE = "prometheus"


def promtool(*args: str) -> subprocess.CompletedProcess[str]:
    """Run promtool; output and errors together in `stdout`."""
    return subprocess.run(
        [program("promtool", PACKAGE), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )


class Prometheus:
    """Asks a running one."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=120, trust_env=False)

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Series of an instant query: `metric` and `value`. Raises ValueError for a bad one."""
        answer = self._http.post("/api/v1/query", data={"query": expr}).json()
        if answer["status"] != "success":
            raise ValueError(f"{expr}: {answer['error']}")
        result = answer["data"]["result"]
        if answer["data"]["resultType"] == "scalar":
            return [{"metric": {}, "value": result}]
        return result

    def values(self, expr: str) -> list[float]:
        """Values of an instant query that are numbers."""
        values = [float(series["value"][1]) for series in self.query(expr)]
        return [value for value in values if value == value]

    def label_values(self, selector: str, label: str) -> set[str]:
        """What a dashboard's variable would offer."""
        found = self._http.get(f"/api/v1/label/{label}/values", params={"match[]": selector})
        return set(found.raise_for_status().json()["data"])

    def rules(self) -> list[dict[str, Any]]:
        """Every loaded rule with its health and, of alerts, its state."""
        groups = self._http.get("/api/v1/rules").raise_for_status().json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def targets(self) -> list[str]:
        """What is scraped, and what went wrong at the last time."""
        active = self._http.get("/api/v1/targets").raise_for_status().json()["data"]
        return [f"{t['scrapeUrl']} {t['health']} {t['lastError']}" for t in active["activeTargets"]]

    def wait_for(self, expr: str, *, within_s: float) -> None:
        """Until `expr` has a value."""
        deadline = time.monotonic() + within_s
        while not self.values(expr):
            if time.monotonic() > deadline:
                pytest.fail(f"{expr}: no value within {within_s:g} s; targets {self.targets()}")
            time.sleep(0.1)

    def close(self) -> None:
        self._http.close()


@contextmanager
def prometheus(directory: Path, config: dict[str, Any]) -> Iterator[Prometheus]:
    """One with this configuration, its data in `directory`. Stopped at the end."""
    file = directory / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    log = directory / "prometheus.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                program("prometheus", PACKAGE),
                f"--config.file={file}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address={address}",
                "--log.level=warn",
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    client = Prometheus(f"http://{address}")
    try:
        deadline = time.monotonic() + 240
        while True:
            try:
                if client._http.get("/-/ready").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"Prometheus does not start: {log.read_text()[-2000:]}")
            time.sleep(0.05)
        yield client
    finally:
        client.close()
        process.terminate()
        process.wait(240)
