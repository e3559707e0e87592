"""`tailrace gpus`: the GPUs of this machine, or of a whole cluster, and who owns them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import click
import httpx

from cluster.cli import emit, json_option, say
from cluster.errors import ClusterError
from cluster.state import StateDir
from deployments.gpu.reader import GpuReader, NoGpu
from deployments.gpu.reading import HARMLESS_REASONS, Device, Reading

_SERIES = re.compile(r"tailrace_gpu_(\w+)\{(.*)\} (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")

_FIELDS: dict[tuple[str, str], str] = {
    ("memory_used_bytes", ""): "memory_used_bytes",
    ("memory_total_bytes", ""): "memory_total_bytes",
    ("utilization_ratio", "compute"): "busy_ratio",
    ("utilization_ratio", "memory"): "memory_busy_ratio",
    ("power_watts", ""): "power_w",
    ("power_limit_watts", ""): "power_limit_w",
    ("energy_joules_total", ""): "energy_j",
    ("temperature_celsius", ""): "temperature_c",
    ("clock_hertz", "sm"): "sm_clock_hz",
    ("clock_hertz", "memory"): "memory_clock_hz",
    ("ecc_errors_total", "corrected"): "ecc_corrected",
    ("ecc_errors_total", "uncorrected"): "ecc_uncorrected",
    ("pcie_bytes_per_second", "sent"): "pcie_sent_bytes_per_s",
    ("pcie_bytes_per_second", "received"): "pcie_received_bytes_per_s",
    ("nvlink_bytes_total", "sent"): "nvlink_sent_bytes",
    ("nvlink_bytes_total", "received"): "nvlink_received_bytes",
}
"""The field of a reading that a series is, by name and its one label besides owner and device."""

_COLUMNS = (
    *("GPU", "NAME", "MEMORY GiB", "BUSY", "POWER W", "°C", "SM MHz", "HELD BACK BY"),
    *("ERRORS", "OWNER"),
)

_WHOLE = {"memory_used_bytes", "memory_total_bytes", "ecc_corrected", "ecc_uncorrected"}
_WHOLE |= {"nvlink_sent_bytes", "nvlink_received_bytes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """A device and the replica that reports it."""

    reading: Reading
    replica: str | None = None
    model: str | None = None
    role: str | None = None


def from_metrics(text: str) -> list[Owned]:
    """Every device in a gateway's `/metrics`, in order of replica and index."""
    found: dict[tuple[str, str, str], Owned] = {}
    for name, labels, value in _series(text):
        key = (labels.get("replica", ""), labels["gpu"], labels["uuid"])
        owned = found.get(key) or Owned(
            reading=Reading(device=Device(gpu=labels["gpu"], uuid=labels["uuid"], name="")),
            replica=labels.get("replica"),
            model=labels["model"],
            role=labels["role"],
        )
        found[key] = replace(owned, reading=_with(owned.reading, name, labels, value))
    return [found[key] for key in sorted(found)]


def _series(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for line in text.splitlines():
        match = _SERIES.fullmatch(line)
        if match is not None:
            name, labels, value = match.groups()
            yield (
                name,
                {key: _plain(quoted) for key, quoted in _LABEL.findall(labels)},
                float(value),
            )


def _plain(quoted: str) -> str:
    return _ESCAPED.sub(lambda match: "\n" if match[1] == "n" else match[1], quoted)


def _with(reading: Reading, name: str, labels: dict[str, str], value: float) -> Reading:
    if name == "up":
        return replace(reading, lost=value == 0)
    if name == "info":
        return replace(reading, device=replace(reading.device, name=labels["product"]))
    if name == "throttled":
        holding = reading.throttle_reasons or frozenset()
        return replace(reading, throttle_reasons=holding | ({labels["reason"]} if value else set()))
    if name == "xid_errors_total":
        return replace(reading, xids=reading.xids + (int(labels["xid"]),) * int(value))
    part = next((labels[k] for k in ("part", "clock", "kind", "direction") if k in labels), "")
    field = _FIELDS.get((name, part))
    if field is None:
        return reading  # of a newer gateway
    return replace(reading, **{field: int(value) if field in _WHOLE else value})


@click.command()
@click.option("--url", help="Ask this gateway about every machine, rather than this one's driver.")
@click.option("--api-key", envvar="TAILRACE_API_KEY", help="Or TAILRACE_API_KEY.")
@json_option
def gpus(url: str | None, api_key: str | None, as_json: bool) -> None:
    """Show GPUs: memory, load, power, clocks, errors, and the replica that owns each.

    Without --url, all that this machine's driver lists, with their owners in the running session.
    """
    driver: str | None = None
    reason: str | None = None
    if url is not None:
        devices = from_metrics(_metrics(url, api_key))
        if not devices:
            reason = f"no replica behind {url} reports a GPU"
    else:
        try:
            reader = GpuReader()
        except NoGpu as error:
            devices, reason = [], str(error)
        else:
            driver, readings = reader.driver, reader.read().readings
            reader.close()
            devices = _with_owners(readings, _session_metrics(api_key))
            if not devices:
                reason = "the driver lists no GPU"
    if as_json:
        emit({"driver": driver, "reason": reason, "devices": [_json(owned) for owned in devices]})
    elif devices:
        click.echo(table(devices))
    else:
        say(reason or "no GPU")


def _metrics(url: str, api_key: str | None) -> str:
    """Raises ClusterError."""
    base = url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with httpx.Client(trust_env=False, timeout=5.0, headers=headers) as client:
            answer = client.get(f"{base}/metrics")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ClusterError(f"{base}: no gateway answers ({error}); is it running?") from error
    if answer.status_code != 200:
        raise ClusterError(
            f"{base}/metrics: status {answer.status_code}, expected 200; give a gateway's address, "
            "and a key if it asks for one"
        )
    return answer.text


def _session_metrics(api_key: str | None) -> str:
    """Empty where no session runs or its gateway does not say."""
    from cluster.session import running

    record = running(StateDir.from_environment())
    if record is None:
        return ""
    try:
        return _metrics(record.url, api_key)
    except ClusterError:
        return ""


def _with_owners(readings: Sequence[Reading], metrics: str) -> list[Owned]:
    owners = {owned.reading.device.uuid: owned for owned in from_metrics(metrics)}
    return [
        replace(owners.get(reading.device.uuid, Owned(reading=reading)), reading=reading)
        for reading in readings
    ]


def _json(owned: Owned) -> dict[str, Any]:
    value = asdict(owned)
    reading = value.pop("reading")
    device = reading.pop("device")
    reasons = reading.pop("throttle_reasons")
    throttle = None if reasons is None else sorted(reasons)
    return {**device, **value, **reading, "throttle_reasons": throttle}


def table(devices: Sequence[Owned]) -> str:
    """For people: one line a device, columns as wide as they need to be."""
    rows = [_COLUMNS, *(_row(owned) for owned in devices)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _row(owned: Owned) -> tuple[str, ...]:
    r = owned.reading
    owner = " ".join(part for part in (owned.model, owned.role, owned.replica) if part) or "-"
    if r.lost:
        return (
            r.device.gpu,
            r.device.name or r.device.uuid,
            "LOST",
            *("-",) * 5,
            _errors(r),
            owner,
        )
    reasons = None if r.throttle_reasons is None else sorted(r.throttle_reasons - HARMLESS_REASONS)
    return (
        r.device.gpu,
        r.device.name or r.device.uuid,
        _of(_times(r.memory_used_bytes, 2**-30, 1), _times(r.memory_total_bytes, 2**-30, 1)),
        "-" if r.busy_ratio is None else f"{r.busy_ratio:.0%}",
        _of(_times(r.power_w, 1), _times(r.power_limit_w, 1)),
        _times(r.temperature_c, 1) or "-",
        _times(r.sm_clock_hz, 1e-6) or "-",
        "-" if reasons is None else ", ".join(reasons) or "nothing",
        _errors(r),
        owner,
    )


def _errors(r: Reading) -> str:
    parts = [f"{r.ecc_uncorrected} ECC"] if r.ecc_uncorrected else []
    parts += [f"XID {xid}" for xid in sorted(set(r.xids))]
    return ", ".join(parts) or "none"


def _times(value: float | None, factor: float, digits: int = 0) -> str | None:
    return None if value is None else f"{value * factor:.{digits}f}"


def _of(part: str | None, whole: str | None) -> str:
    if part is None:
        return "-"
    return part if whole is None else f"{part} / {whole}"
