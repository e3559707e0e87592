"""The devices behind the replicas."""

from __future__ import annotations

from dashboards.panels import Board, Panel, Query, Row
from dashboards.queries import POOL

_BY = "replica, gpu"
_NAME = "{{replica}} GPU {{gpu}}"
_EMPTY = "there are figures of devices only where a replica owns one"


def _gpu(
    title: str,
    unit: str,
    description: str,
    *queries: tuple[str, str],
    maximum: float | None = None,
    red_above: float | None = None,
) -> Panel:
    return Panel(
        title=title,
        unit=unit,
        description=description,
        maximum=maximum,
        red_above=red_above,
        empty=_EMPTY,
        queries=tuple(Query(expr, legend) for expr, legend in queries),
    )


def _max(name: str, by: str = _BY, more: str = "") -> str:
    return f"max by ({by}) ({name}{{{POOL}{more}}})"


def _rate(name: str, by: str, more: str = "") -> str:
    return f"sum by ({by}) (rate({name}{{{POOL}{more}}}[$window]))"


_WORK = Row(
    "Work",
    (
        _gpu(
            *("Utilisation", "percentunit"),
            "Share of time in which a kernel ran, and in which memory was read or written. Decode "
            "lives on memory; compute at 100 % there means batches are large: fine.",
            (_max("tailrace_gpu_utilization_ratio", f"{_BY}, part"), f"{_NAME} {{{{part}}}}"),
            maximum=1.0,
        ),
        _gpu(
            *("Memory", "bytes"),
            "In use by anyone, and what there is. Free memory while KV is full: raise "
            "kv_memory_bytes.",
            (_max("tailrace_gpu_memory_used_bytes"), f"{_NAME} used"),
            (_max("tailrace_gpu_memory_total_bytes"), f"{_NAME} all"),
        ),
        _gpu(
            *("Clocks", "hertz"),
            "Falling under load means slower steps: the reasons are in the panel beside it.",
            (_max("tailrace_gpu_clock_hertz", f"{_BY}, clock"), f"{_NAME} {{{{clock}}}}"),
        ),
        _gpu(
            *("Held down by", "short"),
            "Reasons that hold the clocks down; idle and application_clocks are no trouble. Power: "
            "see the limit. Thermal: see cooling and neighbours.",
            (
                _max("tailrace_gpu_throttled", f"{_BY}, reason"),
                f"{_NAME} {{{{reason}}}}",
            ),
            maximum=1.0,
        ),
        _gpu(
            *("Power", "watt"),
            "Drawn, and the limit in force. At the limit for long: raise it where cooling allows, "
            "or expect slower steps.",
            (_max("tailrace_gpu_power_watts"), _NAME),
            (_max("tailrace_gpu_power_limit_watts"), f"{_NAME} limit"),
        ),
        _gpu(
            *("Temperature", "celsius"),
            "Near the slow-down temperature of the device: cooling is short; it will throttle.",
            (_max("tailrace_gpu_temperature_celsius"), _NAME),
        ),
    ),
)

_TRAFFIC = Row(
    "Traffic",
    (
        _gpu(
            *("PCIe", "Bps"),
            "Sampled over 20 ms, so single peaks mean little. High all the time on a replica that "
            "moves KV: transfers go through host memory.",
            (
                _max("tailrace_gpu_pcie_bytes_per_second", f"{_BY}, direction"),
                f"{_NAME} {{{{direction}}}}",
            ),
        ),
        _gpu(
            *("NVLink", "Bps"),
            "Payload of all links. 0 with tensor parallelism: ranks talk over something slower; "
            "check the topology.",
            (
                _rate("tailrace_gpu_nvlink_bytes_total", f"{_BY}, direction"),
                f"{_NAME} {{{{direction}}}}",
            ),
        ),
        _gpu(
            *("Energy", "watt"),
            "Mean power by the energy counter: what the bill is made of. Idle devices that draw "
            "much: scale down.",
            (_rate("tailrace_gpu_energy_joules_total", _BY), _NAME),
        ),
    ),
)

_HEALTH = Row(
    "Health",
    (
        _gpu(
            *("Answering", "short"),
            "1 while the device answers. 0: it fell off the bus; drain the node.",
            (_max("tailrace_gpu_up"), _NAME),
            maximum=1.0,
        ),
        _gpu(
            *("Memory errors", "short"),
            "A second. corrected: harmless while rare. uncorrected: results cannot be trusted; "
            "drain the node and reset the device.",
            (_rate("tailrace_gpu_ecc_errors_total", f"{_BY}, kind"), f"{_NAME} {{{{kind}}}}"),
        ),
        _gpu(
            *("Critical errors", "short"),
            "XID errors a second, by NVIDIA's number. 48, 63, 74, 79 and 95 are hardware: drain "
            "the node. 13 and 31 are usually software: report them.",
            (_rate("tailrace_gpu_xid_errors_total", f"{_BY}, xid"), f"{_NAME} XID {{{{xid}}}}"),
        ),
        Panel(
            title="Devices",
            look="table",
            unit="none",
            width=24,
            height=6,
            minimum=None,
            empty=_EMPTY,
            description="Which device belongs to which replica. A replica without one computes on "
            "the processor: check its ray_actor_options.",
            queries=(
                Query(
                    "max by (model, role, replica, gpu, uuid, product) "
                    f"(tailrace_gpu_info{{{POOL}}})"
                ),
            ),
        ),
    ),
)

GPU = Board(
    uid="tailrace-gpu",
    title="Tailrace: GPUs",
    description="The devices behind the replicas: work, power, heat, errors.",
    variables=("job", "model", "replica", "window", "gateway"),
    rows=(_WORK, _TRAFFIC, _HEALTH),
)
