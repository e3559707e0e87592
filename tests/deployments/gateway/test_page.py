"""The page at `/dashboard`: what is served, and what a real browser makes of it."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from importlib.resources import files
from itertools import pairwise
from typing import Any, TypeVar

import pytest
import uvicorn
from browser import Browser, chromium
from fake_nvml import Driver, Gpu, installed
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse
from starlette.testclient import TestClient

from deployments.gateway import live
from deployments.gateway.page import POLICY, add_page
from deployments.gpu.reader import GpuReader
from deployments.gpu.series import GpuSeries
from deployments.metrics import Registry
from deployments.process_figures import ProcessFigures
from engine.errors import RequestError

FILES = {"": "text/html", "/page.css": "text/css", "/page.js": "text/javascript"}
OF = {"model": "tiny", "tier": "default"}
_T = TypeVar("_T")


# What is served


async def test_the_files_are_served_under_a_strict_policy_and_kept_by_browsers(gateway: Any):
    for path, kind in (FILES | {"/icon.svg": "image/svg+xml"}).items():
        reply = await gateway.raw("GET", f"/dashboard{path}")
        assert (reply.status, reply.headers["content-type"].split(";")[0]) == (200, kind)
        assert reply.headers["content-security-policy"] == POLICY
        assert reply.headers["x-content-type-options"] == "nosniff"
        again = await gateway.raw(
            "GET", f"/dashboard{path}", headers={"if-none-match": reply.headers["etag"]}
        )
        assert (again.status, again.body) == (304, b"")
    assert "unsafe" not in POLICY
    assert (await gateway.raw("GET", "/dashboard/page.html")).status == 404
    assert (await gateway.raw("GET", "/dashboard/..%2f..%2fpage.py")).status == 404


def test_the_page_is_small_and_asks_nobody_else_for_anything():
    folder = files("deployments.gateway").joinpath("page")
    bodies = {entry.name: entry.read_text() for entry in folder.iterdir()}
    assert sum(map(len, bodies.values())) < 60_000
    for name, body in bodies.items():
        assert (
            re.findall(r"(?:https?:)?//[\w.]+\.\w+", body.replace("http://www.w3.org/2000/svg", ""))
            == []
        ), name
    assert "innerHTML" not in bodies["page.js"]
    assert not re.search(r"<script(?! type=\"module\" src)|\son\w+=|style=", bodies["page.html"])


async def test_the_figures_are_json_that_nobody_stores(gateway: Any):
    reply = await gateway.raw("GET", "/tailrace/live")
    assert (reply.status, reply.headers["cache-control"]) == (200, "no-store")
    assert reply.json()["models"] == ["tiny"]
    await gateway.post("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 3})
    gateway.state.live._body_at_s = float("-inf")
    (tier,) = (await gateway.raw("GET", "/tailrace/live")).json()["tiers"]
    assert (tier["model"], tier["requests"], tier["ttft"]["count"]) == ("tiny", 1, 1)


def guarded(get_state: Callable[[], Any]) -> FastAPI:
    """An application whose figures want the key `open`."""
    app = FastAPI()

    async def check(request: Request) -> None:
        if request.headers.get("authorization") != "Bearer open":
            raise RequestError("no such key here", status=401)

    @app.exception_handler(RequestError)
    async def refused(request: Request, error: RequestError) -> JSONResponse:
        return JSONResponse({"error": {"message": str(error)}}, error.status)

    @app.get("/tailrace/requests")
    async def requests() -> Any:
        return {"object": "list", "gateways": 1, "data": []}

    add_page(app, get_state, {}, check)
    return app


def test_a_check_guards_the_figures_and_not_the_page(gateway: Any):
    with TestClient(guarded(lambda: gateway.state)) as client:
        assert client.get("/dashboard").status_code == 200
        assert client.get("/tailrace/live").status_code == 401
        key = {"authorization": "Bearer open"}
        assert client.get("/tailrace/live", headers=key).status_code == 200


# What a browser makes of it


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(str(tmp_path_factory.mktemp("profile"))) as opened:
        yield opened


@pytest.fixture
async def browser(window: Browser) -> AsyncIterator[Browser]:
    """The window, which must not have complained when the test ends."""
    window.errors()
    yield window
    complaints = await asyncio.to_thread(window.errors)
    await asyncio.to_thread(window.open, "about:blank")
    assert complaints == []


@pytest.fixture(autouse=True)
def always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "FRESH_S", 0.0)


async def elsewhere(work: Callable[..., _T], *arguments: Any, **named: Any) -> _T:
    """Off the loop, on which the gateway answers."""
    return await asyncio.to_thread(work, *arguments, **named)


def look_again(browser: Browser) -> None:
    """As when the window comes to the front: no waiting for the next time."""
    browser.run("document.dispatchEvent(new Event('visibilitychange'))")


def traffic(registry: Registry, requests: int, ttft_s: float = 0.08, **of: str) -> None:
    of = OF | of
    registry.counter("tailrace_requests_total", code="200", **of).inc(requests)
    for name, seconds in (
        ("request_ttft_seconds", ttft_s),
        ("request_itl_seconds", 0.02),
        ("request_duration_seconds", 1.5),
    ):
        labels = of | ({"streaming": "true"} if "ttft" in name else {})
        registry.histogram(f"tailrace_{name}", **labels).observe(seconds, requests)
    for phase, seconds in (("queue", 0.5), ("decode", 1.0)):
        registry.histogram("tailrace_request_phase_seconds", phase=phase, **of).observe(
            seconds, requests
        )


def cluster(registry: Registry, *gpus: Gpu, model: str = "tiny", replica: str = "decode-1") -> None:
    """A decode replica and a queue report."""
    decode, queue = Registry(), Registry()
    ProcessFigures(decode, "decode")
    decode.gauge("vllm:num_requests_running", model_name=model).set(3)
    decode.gauge("vllm:kv_cache_usage_perc", model_name=model).set(0.375)
    decode.counter("vllm:generation_tokens_total", model_name=model)
    if gpus:
        with installed(Driver(*gpus)):
            reader = GpuReader()
            GpuSeries(decode, model, "decode").show(reader.read())
            reader.close()
    queue.gauge("tailrace_queue_size", model=model, tier="default").set(2)
    registry.merge(replica, decode.snapshot())
    registry.merge("queue-1", queue.snapshot())
    registry.gauge("tailrace_replicas_up", model=model, role="decode").set(1)


@pytest.mark.browser
async def test_what_happens_in_the_cluster_appears_without_a_reload(gateway: Any, browser: Browser):
    cluster(gateway.metrics, Gpu("GPU-a", throttle=0x40))
    gateway.metrics.gauge("tailrace_config_revision").set(7)
    gateway.state.live.checkpoint(time.monotonic() - 10)
    traffic(gateway.metrics, 50)

    def seen() -> None:
        browser.open(f"http://127.0.0.1:{gateway.port}/dashboard")
        browser.shows("configuration revision 7", "#about")
        browser.shows("All replicas answer.", "#health")
        browser.shows("tiny · default", "#tiers")
        assert "70 ms / 79 ms / 80 ms" in browser.text("#tiers")
        assert "queue 33 %" in browser.text("#time")
        assert "decode 67 %" in browser.text("#time")
        assert "decode-1" in browser.text("#pools")
        assert "38 %" in browser.text("#pools")
        assert "0 NVIDIA H200" in browser.text("#pools")
        assert "hardware thermal" in browser.text("#pools .bad")
        assert browser.run("return document.querySelector('#queues tbody td').innerText") == "2"
        gateway.metrics.gauge("tailrace_requests_inflight", model="tiny").set(4321)
        browser.shows("4,321", "#tiles")  # by itself, at the next look

    await elsewhere(seen)


@pytest.mark.browser
async def test_what_is_wrong_is_said_in_words(gateway: Any, browser: Browser):
    registry = gateway.metrics
    cluster(registry, Gpu("GPU-a", lost=15))
    registry.gauge("tailrace_queue_connected", model="tiny").set(0)
    registry.gauge("tailrace_stale_endpoints", model="tiny", role="decode").set(2)
    registry.gauge("tailrace_slo_target_seconds", tier="default", slo="ttft").set(0.05)
    registry.gauge("tailrace_slo_objective_ratio", tier="default").set(0.99)
    gateway.state.live.checkpoint(time.monotonic() - 10)
    traffic(registry, 10)
    for met, times in (("true", 9), ("false", 1)):
        registry.counter("tailrace_slo_requests_total", slo="ttft", met=met, **OF).inc(times)

    def seen() -> None:
        browser.open(f"http://127.0.0.1:{gateway.port}/dashboard")
        for words in (
            "The queue of tiny cannot be reached.",
            "Silent decode replicas of tiny: 2.",
            "GPU 0 of decode-1 is lost.",
            "tiny · default misses its ttft target.",
        ):
            browser.shows(words, "#health")
        # Not by colour alone: words for those who hear it, a sign for those who see it.
        cell = "#tiers td:nth-child(3) .bad"
        assert "(above the target of 50 ms)" in browser.run(
            "return document.querySelector(arguments[0]).textContent", cell
        )
        sign = browser.run(
            "return getComputedStyle(document.querySelector(arguments[0]), '::before').content",
            cell,
        )
        assert "▲" in sign
        assert "90 % ttft" in browser.text("#tiers")

    await elsewhere(seen)


NASTY = "<script>window.hurt = 1</script><img src=x onerror='window.hurt = 1'>\"'&amp;\\"


@pytest.mark.browser
async def test_a_name_is_text_whatever_it_spells(gateway: Any, browser: Browser):
    gateway.backend.infos.clear()
    gateway.backend.serve(NASTY)
    cluster(gateway.metrics, Gpu("GPU-a", name=NASTY), model=NASTY, replica=NASTY)
    gateway.metrics.gauge("tailrace_replicas_up", model=NASTY, role="decode").set(0)
    gateway.state.live.checkpoint(time.monotonic() - 10)
    traffic(gateway.metrics, 5, model=NASTY, tier=NASTY)

    def seen() -> None:
        browser.open(f"http://127.0.0.1:{gateway.port}/dashboard")
        browser.shows(f"No decode replica of {NASTY} is up.", "#health")
        for part in ("#tiers", "#queues", "#pools", "#time"):
            assert NASTY in browser.text(part), part
        assert browser.count("main script, main img, header img") == 0
        assert browser.run("return window.hurt === undefined")

    await elsewhere(seen)


@pytest.mark.browser
@pytest.mark.parametrize("width", [360, 390, 768, 1400])
async def test_nothing_is_wider_than_the_window(gateway: Any, browser: Browser, width: int):
    long = "an-extraordinarily-long-name-of-a-model-with-no-space-in-it-" * 3
    cluster(gateway.metrics, Gpu("GPU-a"), Gpu("GPU-b"), model=long, replica=f"{long}#decode#1")
    gateway.state.live.checkpoint(time.monotonic() - 10)
    traffic(gateway.metrics, 5, model=long, ttft_s=123.0)

    def seen() -> None:
        browser.open(f"http://127.0.0.1:{gateway.port}/dashboard", width=width, height=700)
        browser.shows("NVIDIA H200", "#pools")
        assert browser.run("return document.documentElement.scrollWidth - innerWidth") <= 0
        spilled = browser.run(
            "return [...document.querySelectorAll('main *')]"
            ".filter(e => e.getBoundingClientRect().right > innerWidth + 1)"
            ".filter(e => !e.closest('.out-of-sight')).map(e => e.outerHTML.slice(0, 80))"
        )
        assert spilled == []
        if width < 1000:
            # Each value stands beside its name, which the header row no longer gives.
            label = browser.run(
                "return getComputedStyle(document.querySelector('#tiers td'), '::before').content"
            )
            assert label == '"Requests/s"'

    await elsewhere(seen)


@pytest.mark.browser
async def test_the_page_is_walked_with_the_keyboard_alone(gateway: Any, browser: Browser):
    cluster(gateway.metrics)

    def seen() -> None:
        browser.open(f"http://127.0.0.1:{gateway.port}/dashboard")
        browser.shows("decode-1", "#pools")
        assert browser.press("TAB") == "skip"
        left = browser.run("return document.activeElement.getBoundingClientRect().left")
        assert left >= 0, "the skip link is seen once it has the focus"
        assert browser.press("ENTER") == "main"
        assert browser.press("SHIFT") == "main"
        browser.run("document.activeElement.blur(); document.querySelector('.skip').focus()")
        assert browser.press("TAB") == "pause"
        outline = browser.run(
            "const s = getComputedStyle(document.activeElement);"
            "return [s.outlineStyle, parseFloat(s.outlineWidth)]"
        )
        assert outline[0] == "solid"
        assert outline[1] >= 2
        browser.press("SPACE")
        assert browser.run("return document.activeElement.ariaPressed") == "true"
        gateway.metrics.gauge("tailrace_requests_inflight", model="tiny").set(777)
        look_again(browser)
        time.sleep(0.3)
        assert "777" not in browser.text("#tiles"), "paused"
        browser.press("SPACE")
        browser.shows("777", "#tiles")
        assert browser.focused() == "pause", "an update takes the focus from nobody"

    await elsewhere(seen)


@pytest.mark.browser
async def test_the_slowest_requests_open_into_their_waterfalls(gateway: Any, browser: Browser):
    cluster(gateway.metrics)
    gateway.backend.before_open = lambda: asyncio.sleep(0.05)
    for name in ("slow/1+2=3@x", "slow:2"):
        body = {"model": "tiny", "prompt": "a", "max_tokens": 4}
        await gateway.post("/v1/completions", body, {"x-request-id": name})
    await gateway.settle()
    asked: list[str] = []

    def count_asked() -> int:
        entries: list[str] = browser.run(
            "return performance.getEntriesByType('resource').map(e => e.name)"
        )
        asked[:] = [name for name in entries if "/tailrace/explain/" in name]
        return len(asked)

    def seen() -> None:
        browser.open(f"http://127.0.0.1:{gateway.port}/dashboard")
        browser.until(lambda: browser.count("#slow details") == 2, "two requests")
        for words in ("tiny · default", "finished", "just now", "1 + 4 tokens"):
            assert words in browser.text("#slow summary")
        assert count_asked() == 0, "replicas are asked about what somebody opens"
        browser.press("TAB", "TAB")
        assert browser.focused() == "pause"
        assert browser.press("TAB") == "summary"
        browser.press("ENTER")
        browser.shows("tokenize", "#slow .waterfall")
        lanes = browser.run(
            "return [...document.querySelectorAll('#slow details[open] .lane span')].map(e => "
            "[parseFloat(e.style.left), parseFloat(e.style.left) + parseFloat(e.style.width)])"
        )
        assert lanes[0][0] == pytest.approx(0.0, abs=0.01)
        assert lanes[-1][1] == pytest.approx(100.0, abs=0.01)
        for (_, end), (begin, _) in pairwise(lanes):
            assert begin == pytest.approx(end, abs=0.01), "one line without gap or overlap"
        # It stays open, and in focus, over the next looks.
        for inflight in (21, 22):
            gateway.metrics.gauge("tailrace_requests_inflight", model="tiny").set(inflight)
            look_again(browser)
            browser.shows(str(inflight), "#tiles")
        assert browser.count("#slow details[open]") == 1
        assert browser.focused() == "summary"
        browser.press("ENTER")
        browser.until(lambda: browser.count("#slow details[open]") == 0, "closed")
        browser.press("ENTER")
        browser.until(lambda: browser.count("#slow details[open]") == 1, "open again")
        assert count_asked() == 1, "what was told once is not asked for again"

    await elsewhere(seen)


@pytest.mark.browser
async def test_updates_are_not_read_out_unless_something_is_wrong(gateway: Any, browser: Browser):
    cluster(gateway.metrics)

    def seen() -> None:
        browser.open(f"http://127.0.0.1:{gateway.port}/dashboard")
        browser.shows("All replicas answer.", "#health")
        browser.run(
            "window.said = 0; window.pools = document.querySelector('#pools tr td');"
            "new MutationObserver(l => window.said += l.length).observe("
            "document.querySelector('#health'),"
            "{childList: true, subtree: true, characterData: true})"
        )
        for inflight in (11, 12, 13):
            gateway.metrics.gauge("tailrace_requests_inflight", model="tiny").set(inflight)
            look_again(browser)
            browser.shows(str(inflight), "#tiles")
        assert browser.run("return window.said") == 0
        assert browser.run("return window.pools === document.querySelector('#pools tr td')")
        assert browser.run(
            "return [...document.querySelectorAll('[aria-live], [role=status], [role=alert]')]"
            ".map(e => e.id)"
        ) == ["health", "refused"]
        gateway.metrics.gauge("tailrace_replicas_up", model="tiny", role="decode").set(0)
        look_again(browser)
        browser.shows("No decode replica of tiny is up.", "#health")
        assert browser.run("return window.said") > 0

    await elsewhere(seen)


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_text_can_be_read_in_both_schemes_and_nothing_moves_for_those_who_mind(
    gateway: Any, browser: Browser, scheme: str
):
    cluster(gateway.metrics, Gpu("GPU-a", lost=15))

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def seen() -> None:
        browser.open(
            f"http://127.0.0.1:{gateway.port}/dashboard",
            color_scheme=scheme,
            reduced_motion="reduce",
        )
        browser.shows("lost", "#pools")
        pairs: list[list[str]] = browser.run(
            """
            const ground = (e) => {
              for (; e; e = e.parentElement) {
                const c = getComputedStyle(e).backgroundColor;
                if (c !== 'rgba(0, 0, 0, 0)') return c;
              }
            };
            return [...document.querySelectorAll('body *')]
              .filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()))
              .filter(e => e.getClientRects().length > 0)
              .map(e => [getComputedStyle(e).color, ground(e), e.outerHTML.slice(0, 60)]);
            """
        )
        assert len(pairs) > 20
        for ink, paper, what in pairs:
            low, high = sorted((luminance(ink), luminance(paper)))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (what, ink, paper)
        dark = (
            luminance(browser.run("return getComputedStyle(document.body).backgroundColor")) < 0.2
        )
        assert dark == (scheme == "dark")
        assert (
            browser.run(
                "return getComputedStyle(document.querySelector('.bar span')).transitionDuration"
            )
            == "0s"
        )

    await elsewhere(seen)


@pytest.mark.browser
async def test_a_gateway_that_fails_is_said_to_and_the_page_recovers(gateway: Any, window: Browser):
    cluster(gateway.metrics)
    body = gateway.state.live.body
    broken = False

    def sometimes(*arguments: Any) -> bytes:
        if broken:
            raise RuntimeError("out of order")
        return body(*arguments)

    gateway.state.live.body = sometimes

    def seen() -> None:
        nonlocal broken
        window.open(f"http://127.0.0.1:{gateway.port}/dashboard")
        window.shows("All replicas answer.", "#health")
        broken = True
        look_again(window)
        window.shows("The gateway has not answered since", "#health")
        assert "decode-1" in window.text("#pools"), "the last figures stay, greyed"
        assert window.run("return document.querySelector('main').className") == "old"
        broken = False
        look_again(window)
        window.shows("All replicas answer.", "#health")
        assert window.run("return document.querySelector('main').className") == ""

    await elsewhere(seen)


@pytest.mark.browser
async def test_a_gateway_with_keys_asks_for_one_and_remembers_it_in_this_tab_only(
    gateway: Any, window: Browser
):
    cluster(gateway.metrics)
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{sock.getsockname()[1]}/dashboard"
    server = uvicorn.Server(
        uvicorn.Config(guarded(lambda: gateway.state), lifespan="off", log_level="critical")
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})

    def seen() -> None:
        window.open(url)
        window.shows("A key is needed.", "#health")
        assert window.focused() == "key"
        window.write("wrong")
        window.press("ENTER")
        window.shows("no such key here", "#refused")
        assert window.text("#pools") == ""
        window.write("open")
        window.press("ENTER")
        window.shows("decode-1", "#pools")
        assert window.count("#ask:not([hidden])") == 0
        window.open(url)
        window.shows("decode-1", "#pools")
        assert window.run("return JSON.stringify(localStorage) + document.cookie") == "{}"

    thread.start()
    try:
        await elsewhere(seen)
        await elsewhere(window.open, "about:blank")
    finally:
        server.should_exit = True
        await elsewhere(thread.join)
        sock.close()
