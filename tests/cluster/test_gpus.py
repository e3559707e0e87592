from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pynvml
import pytest
from click.testing import CliRunner, Result
from fake_nvml import NOT_SUPPORTED, Driver, Gpu, Instance, installed

from cluster.gpus import Owned, from_metrics, gpus, table
from deployments.gpu.reader import GpuReader
from deployments.gpu.reading import Device, Reading
from deployments.gpu.series import GpuSeries
from deployments.metrics import Registry


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILRACE_HOME", str(tmp_path))


def two_gpus() -> Driver:
    return Driver(
        Gpu("GPU-a", throttle=0x44, ecc_uncorrected=2),
        Gpu("GPU-b", name="Tesla T4", memory=(1 << 30, 15 << 30), power_mw=NOT_SUPPORTED),
    )


def metrics_of(driver: Driver, replica: str = "r1", role: str = "decode") -> str:
    """What a gateway shows of a replica that owns every device of this driver."""
    registry, shown = Registry(), Registry()
    with installed(driver):
        reader = GpuReader()
        GpuSeries(registry, "smollm2", role).show(reader.read())
        reader.close()
    shown.merge(replica, registry.snapshot())
    return shown.render().decode()


def run(*args: str) -> Result:
    return CliRunner().invoke(gpus, args, catch_exceptions=False)


@pytest.fixture
def serve() -> Iterator[tuple[str, list[bytes]]]:
    """A server whose one page is the last of the list."""
    pages: list[bytes] = []

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if pages else 503)
            self.end_headers()
            self.wfile.write(pages[-1] if pages else b"")

        def log_message(self, format: str, *args: object) -> None:
            """Nobody reads it."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}", pages
        listening.shutdown()
        thread.join()


def test_the_table_shows_each_device_of_this_machine():
    with installed(two_gpus()) as driver:
        done = run()
        assert driver.initialised == 0
    assert done.exit_code == 0
    assert done.stdout == (
        "GPU  NAME         MEMORY GiB    BUSY  POWER W    °C  SM MHz  HELD BACK BY             "
        "    ERRORS  OWNER\n"
        "0    NVIDIA H200  40.0 / 140.0  87%   512 / 700  61  1785    hardware_thermal, power_cap"
        "  2 ECC   -\n"
        "1    Tesla T4     1.0 / 15.0    87%   -          61  1785    power_cap                "
        "    none    -\n"
    )


def test_json_has_every_field_of_every_device_and_mig_instance():
    split = Driver(Gpu("GPU-a", instances={0: Instance("MIG-x")}))
    with installed(split):
        value = json.loads(run("--json").stdout)
    assert (value["driver"], value["reason"]) == ("570.86.15", None)
    assert [(d["gpu"], d["uuid"], d["memory_used_bytes"]) for d in value["devices"]] == [
        ("0:0", "MIG-x", 1 << 30),
        ("0", "GPU-a", None),
    ]
    whole = value["devices"][1]
    assert (whole["power_w"], whole["throttle_reasons"]) == (512.3, ["power_cap"])
    assert (whole["replica"], whole["lost"], whole["xids"]) == (None, False, [])


def test_without_a_gpu_it_says_why_and_that_is_no_failure():
    done = run()
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == "no GPU can be read here: NVML Shared Library Not Found\n"
    value = json.loads(run("--json").stdout)
    assert value["devices"] == []
    assert "NVML Shared Library Not Found" in value["reason"]


def test_a_lost_device_is_shown_as_lost():
    with installed(Driver(Gpu("GPU-a", lost=pynvml.NVML_ERROR_GPU_IS_LOST), Gpu("GPU-b"))):
        lines = run().stdout.splitlines()
    assert lines[1].split()[:2] == ["0", "LOST"]
    assert lines[2].startswith("1    NVIDIA H200")


def test_what_a_replica_reports_is_read_back_from_the_metrics_as_it_was():
    driver = two_gpus()
    with installed(driver):
        reader = GpuReader()
        readings = reader.read().readings
        reader.close()
    owned = from_metrics(metrics_of(driver))
    assert [o.reading for o in owned] == list(readings)
    assert {(o.replica, o.model, o.role) for o in owned} == {("r1", "smollm2", "decode")}


def test_names_with_quotes_and_backslashes_survive_the_text_format():
    odd = replace(Device(gpu="0", uuid="GPU-a", name=""), name='a "b" \\n\nc')
    registry = Registry()
    series = GpuSeries(registry, "m", "decode")
    with installed(Driver(Gpu("GPU-a"))):
        sample = GpuReader().read()
    series.show(replace(sample, readings=(Reading(device=odd, xids=(31, 31, 48)),)))
    (owned,) = from_metrics(registry.render().decode())
    assert owned.reading == Reading(device=odd, xids=(31, 31, 48))


def test_a_gateway_is_asked_about_every_machine(serve: tuple[str, list[bytes]]):
    url, pages = serve
    pages.append((metrics_of(two_gpus()) + metrics_of(Driver(Gpu("GPU-c")), "r2")).encode())
    value = json.loads(run("--url", f"{url}/v1", "--json").stdout)
    assert [(d["replica"], d["gpu"], d["uuid"]) for d in value["devices"]] == [
        ("r1", "0", "GPU-a"),
        ("r1", "1", "GPU-b"),
        ("r2", "0", "GPU-c"),
    ]
    pages.append(b"")
    assert run("--url", url).stderr == f"no replica behind {url} reports a GPU\n"


def test_a_gateway_that_does_not_answer_is_an_error(serve: tuple[str, list[bytes]]):
    from cluster.errors import ClusterError

    with pytest.raises(ClusterError, match="status 503, expected 200"):
        run("--url", serve[0])
    with pytest.raises(ClusterError, match="no gateway answers"):
        run("--url", "http://127.0.0.1:1")


def test_devices_of_this_machine_are_shown_with_their_owner_in_the_session(
    serve: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch
):
    driver = two_gpus()
    serve[1].append(metrics_of(Driver(driver.gpus[0])).encode())

    class Record:
        url = serve[0]

    monkeypatch.setattr("cluster.session.running", lambda state: Record)
    with installed(driver):
        first, second = json.loads(run("--json").stdout)["devices"]
    assert (first["uuid"], first["replica"], first["role"]) == ("GPU-a", "r1", "decode")
    assert (second["uuid"], second["replica"]) == ("GPU-b", None)


def test_columns_that_a_device_does_not_fill_hold_a_dash():
    line = table([Owned(reading=Reading(device=Device(gpu="0", uuid="GPU-a", name="")))])
    assert line.splitlines()[1].split() == ["0", "GPU-a", *"-" * 6, "none", "-"]
