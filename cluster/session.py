"""Bring a session up, change it, take it down, say how it is."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import httpx

from cluster import head, processes, queues, replica_memory
from cluster.config import ServeConfig
from cluster.errors import ClusterError, NotRunning
from cluster.ports import check_free
from cluster.queues import Queues
from cluster.serve_api import (
    Application,
    ServeApi,
    direct_replicas_are_up,
    foreign_token,
    raise_if_failed,
    wait_until,
)
from cluster.state import Record, StateDir
from engine.errors import ConfigError, EngineError
from engine.memory import MemoryPlan

Say = Callable[[str], None]

HEAD_TIMEOUT_S = 90.0
MODELS_TIMEOUT_S = 30.0
MEMORY_TIMEOUT_S = 30.0
"""Replicas tell gateways about themselves every second."""

DEPLOY_TIMEOUT_S = 900.0
"""Weights may come from a slow disk; failures are seen long before."""

PYTHON_PROXY = (
    "Serve's Python proxy is in front, not HAProxy: expect three to five times the time to the "
    "first token at 64 streams; start Ray with RAY_SERVE_ENABLE_HA_PROXY=1 on every node"
)


@dataclass(frozen=True, slots=True)
class Up:
    """A session that answers."""

    record: Record | None
    """None on a cluster that is not ours."""

    url: str
    models: tuple[str, ...]
    haproxy: bool | None
    ready_s: float
    updated: bool
    """Whether a running session took a new configuration, rather than a new one starting."""

    child: subprocess.Popen[bytes] | None = None
    """The head's process, where we started it."""


def running(state: StateDir) -> Record | None:
    """The live session of this state directory."""
    record = state.load()
    if record is None or not processes.is_alive(record.head_pid, record.head_started):
        return None
    return record


def bring_up(state: StateDir, config: ServeConfig, *, port: int | None, say: Say) -> Up:
    """Start a session with this configuration, or apply it to the one that runs.

    A session that does not come up is taken down again; its logs are kept.

    Raises:
        ConfigError, PortBusy, DeployFailed, ClusterError.
    """
    began = time.monotonic()
    with state.starting():
        if record := running(state):
            return _update(state, record, config, port, say, began)
        if state.load() is not None:
            say("the recorded session died; removing what is left of it")
            head.stop(state, state.load())
        config = config.listening_on(config.host, port or config.port)
        check_free(
            config.host,
            config.port,
            setting="http_options.port",
            way_out="end it, or choose another port: tailrace up --port N",
        )
        say(f"starting Ray ({config.source})")
        started = head.start(
            state,
            host=config.host,
            port=config.port,
            num_cpus=config.needed_cpus(),
            config=config.source,
            code_dir=config.code_dir,
        )
        record = started.record
        try:
            api = _api(state, record)

            def alive() -> bool:
                return started.child.poll() is None

            _await_head(api, record, alive)
            say(f"Ray is up, starting Serve ({time.monotonic() - began:.1f} s)")
            _deploy(api, config, alive, say, began)
            routed = [a.name for a in api.applications() or [] if a.route_prefix is not None]
            if record.stats_port:
                wait_until(lambda: direct_replicas_are_up(record.stats_port, routed), within_s=10.0)
            models = _await_models(record.url, config, say)
            api.close()
        except BaseException as error:
            # Ctrl-C included: half a cluster is of no use to anybody.
            keep = isinstance(error, EngineError)
            head.stop(state, record, keep_logs=keep)
            if keep:
                error.args = (f"{error}\nlogs: {state.logs(record.session)}",)
            raise
    return Up(
        record=record,
        url=record.url,
        models=models,
        haproxy=bool(record.stats_port),
        ready_s=time.monotonic() - began,
        updated=False,
        child=started.child,
    )


def deploy_to(address: str, config: ServeConfig, *, port: int | None, say: Say) -> Up:
    """Deploy onto a Ray cluster that somebody else started; `address` is its dashboard."""
    began = time.monotonic()
    api = _api_at(address)
    api.check_reachable()
    config = config.listening_on(config.host, port or config.port)
    existing = api.http_address()
    if existing and existing[1] != config.port:
        raise ConfigError(
            f"http_options.port={config.port}: Serve already listens on {existing[1]} there and "
            f"keeps it; say --port {existing[1]}"
        )
    _deploy(api, config, lambda: True, say, began)
    haproxy = api.has_haproxy()
    host = httpx.URL(api.address).host
    url = f"http://{host}:{config.port}"
    models = _await_models(url, config, say)
    return Up(None, url, models, haproxy, time.monotonic() - began, existing is not None)


def take_down(state: StateDir) -> list[int]:
    """End the session and remove its files; the pids that were ended. Idempotent.

    Raises:
        ClusterError: a process cannot be ended.
    """
    try:
        record = state.load()
    except ClusterError:
        record = None  # An unreadable record: the marks on the processes are enough.
    ended = head.stop(state, record)
    if record is not None:
        # Sessions that lost their record to a crash in the middle of a start.
        ended += head.stop(state, None)
    return ended


@dataclass(frozen=True, slots=True)
class Status:
    record: Record
    healthy: bool
    applications: tuple[Application, ...]
    pids: tuple[int, ...]
    memory: Mapping[str, MemoryPlan]
    """Of each replica of a model, by its id; those that have not told yet are missing."""

    queues: Mapping[str, Queues]
    """Of each model, by its name; likewise."""


def status(state: StateDir) -> Status:
    """How the running session is.

    Raises:
        NotRunning: there is none, or it died.
    """
    recorded = state.load()
    record = running(state)
    if record is None:
        died = f" (session {recorded.session[:8]} died)" if recorded else ""
        raise NotRunning(f"no session in {state.path}{died}; start one: tailrace up")
    api = _api(state, record)
    applications = api.applications()
    api.close()
    told = _metrics(record.url)
    return Status(
        record=record,
        healthy=bool(applications)
        and all(a.status == "RUNNING" for a in applications or ())
        and _answers(record.url),
        applications=tuple(applications or ()),
        pids=tuple(sorted(p.pid for p in processes.of_session(record.session))),
        memory=replica_memory.from_metrics(told),
        queues=queues.from_metrics(told),
    )


PoolMemory = Mapping[tuple[str, str], tuple[MemoryPlan, ...]]
"""By application and deployment: of each of its replicas."""


def memory_of_pools(
    up: Up, config: ServeConfig, state: StateDir, address: str | None
) -> PoolMemory:
    """What the memory of the pools that are up is used for; `address` as for `deploy_to`.

    Waits a moment until every replica has told a gateway; what has not by then is missing.
    """
    pools = config.telling_pools
    if not pools or not config.models:
        return {}
    if up.record is not None:
        api = _api(state, up.record)
    else:
        assert address is not None, "a cluster without a record is one that has an address"
        api = _api_at(address)
    found: dict[tuple[str, str], tuple[MemoryPlan, ...]] = {}

    def all_told() -> bool:
        applications = api.applications()
        if applications is None:
            return False
        there = replica_memory.by_pool(applications, pools, _metrics(up.url))
        found.update({pool: tuple(filter(None, plans)) for pool, plans in there.items()})
        return all(plan is not None for plans in there.values() for plan in plans)

    wait_until(all_told, within_s=MEMORY_TIMEOUT_S, every_s=0.3)
    api.close()
    return {pool: plans for pool, plans in found.items() if plans}


def _metrics(url: str) -> str:
    """Of a gateway. Empty where it does not answer, or is another kind of application."""
    try:
        answer = httpx.get(f"{url}/metrics", timeout=5.0, trust_env=False)
    except httpx.HTTPError:
        return ""
    return answer.text if answer.status_code == 200 else ""


def _update(
    state: StateDir,
    record: Record,
    config: ServeConfig,
    port: int | None,
    say: Say,
    began: float,
) -> Up:
    if port is not None and port != record.port:
        raise ConfigError(
            f"--port {port}: the running session listens on {record.port} and Serve cannot move; "
            "run `tailrace down` first"
        )
    if config.host != record.host:
        raise ConfigError(
            f"http_options.host={config.host!r}: the running session listens on {record.host} and "
            "Serve cannot move; run `tailrace down` first"
        )
    if config.code_dir and str(config.code_dir) != record.code_dir:
        raise ConfigError(
            f"{config.source}: its applications lie in {config.code_dir}, which the running "
            "session does not import from; install them, or run `tailrace down` first"
        )
    if config.port != record.port:
        say(f"keeping port {record.port} of the running session")
    say(f"updating the running session ({config.source})")
    api = _api(state, record)
    config = config.listening_on(record.host, record.port)

    def alive() -> bool:
        return processes.is_alive(record.head_pid, record.head_started)

    _await_head(api, record, alive)
    _deploy(api, config, alive, say, began)
    api.close()
    return Up(
        record=record,
        url=record.url,
        models=_await_models(record.url, config, say),
        haproxy=bool(record.stats_port),
        ready_s=time.monotonic() - began,
        updated=True,
    )


def _await_head(api: ServeApi, record: Record, alive: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HEAD_TIMEOUT_S
    while not api.is_up():
        if not alive():
            raise ClusterError(f"Ray ended while it started:\n{head.head_log_tail(record)}")
        if time.monotonic() > deadline:
            raise ClusterError(
                f"Ray is not up after {HEAD_TIMEOUT_S:g} s:\n{head.head_log_tail(record)}"
            )
        time.sleep(0.1)


def _deploy(
    api: ServeApi, config: ServeConfig, alive: Callable[[], bool], say: Say, began: float
) -> None:
    """Hand the configuration over and follow it until every application in it runs."""
    asked_at = time.time() - 1.0  # Serve keeps its own time stamps; allow for rounding.
    refusals: list[Exception] = []

    def put() -> None:
        try:
            api.deploy(config.data)
        except EngineError as error:
            refusals.append(error)

    # In a thread of its own: the call returns once Serve is there, which is the longer part, and
    # meanwhile somebody must notice a head that died. A daemon, so that Ctrl-C need not wait.
    taking = threading.Thread(target=put, daemon=True)
    taking.start()
    names = set(config.applications)
    shown: dict[str, str] = {}
    deadline = time.monotonic() + DEPLOY_TIMEOUT_S
    while True:
        if not alive():
            raise ClusterError("Ray died while the applications started")
        taken = not taking.is_alive()
        if refusals:
            raise refusals[0]
        applications = [a for a in (api.applications() or []) if a.name in names] if taken else []
        for application in applications:
            line = application.summary()
            trouble = next((d for d in application.deployments if _in_trouble(d.message)), None)
            if trouble and application.status == "DEPLOYING":
                line += f", {trouble.name}: {_last_line(application.why())}"
            if shown.get(application.name) != line:
                shown[application.name] = line
                say(f"{application.name}: {line} ({time.monotonic() - began:.1f} s)")
        raise_if_failed(applications, since_s=asked_at)
        if (
            taken
            and {a.name for a in applications} == names
            and all(a.status == "RUNNING" and a.last_deployed_s >= asked_at for a in applications)
        ):
            return
        if time.monotonic() > deadline:
            waiting = ", ".join(f"{name}: {line}" for name, line in shown.items())
            raise ClusterError(
                f"not running after {DEPLOY_TIMEOUT_S:g} s ({waiting or 'Serve does not answer'}); "
                "look at the logs, or give it more CPUs or memory"
            )
        time.sleep(0.2)


def _in_trouble(message: str) -> bool:
    return "Traceback" in message or "failed to start" in message


def _last_line(text: str) -> str:
    return text.splitlines()[-1]


def _api(state: StateDir, record: Record) -> ServeApi:
    return ServeApi(record.dashboard_url, state.ray_token().read_text().strip())


def _api_at(address: str) -> ServeApi:
    return ServeApi(address if "://" in address else f"http://{address}", foreign_token())


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/healthz", timeout=5.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _await_models(url: str, config: ServeConfig, say: Say) -> tuple[str, ...]:
    """What `/v1/models` lists, once the gateway has found every model of the configuration:
    it meets their replicas a moment after Serve calls them running."""
    if not config.models:
        return ()
    if not wait_until(
        lambda: config.models.issubset(_models(url)), within_s=MODELS_TIMEOUT_S, every_s=0.2
    ):
        missing = ", ".join(sorted(config.models.difference(_models(url))))
        say(f"warning: {url}/v1/models does not list {missing} yet; look at the gateway's log")
    return _models(url)


def _models(url: str) -> tuple[str, ...]:
    """What `/v1/models` lists; nothing where another kind of application is served."""
    try:
        answer = httpx.get(f"{url}/v1/models", timeout=10.0, trust_env=False)
        return tuple(model["id"] for model in answer.json()["data"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return ()
