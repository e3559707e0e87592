"""The cluster that is measured: one of our own for the time of it, or one that runs already."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from cluster import config as configuration
from cluster import head, processes, session
from cluster.errors import ClusterError, NotRunning
from cluster.ports import free_ports
from cluster.state import Record, StateDir
from deployments.settings import ModelArgs, PoolSettings

Say = Callable[[str], None]

SYNTHETIC = "synthetic"
GATEWAY_BUILDER = "deployments.app:gateway"
MODEL_BUILDER = "deployments.app:model"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One model application as it is deployed."""

    name: str
    """What clients call it."""

    app: str
    args: ModelArgs
    settings: PoolSettings
    """Of its decode pool."""


class Stack:
    """A running cluster: where clients connect, and what only its own session can tell."""

    def __init__(self, url: str, state: StateDir | None, record: Record | None) -> None:
        self.url = url
        self._state = state
        self._record = record
        self._connected = False

    @classmethod
    def running(cls, url: str | None) -> Stack:
        """The session of this state directory, or whatever answers at `url`.

        Raises:
            NotRunning: no session is there and no `url` was given.
        """
        state = StateDir.from_environment()
        record = session.running(state)
        if url is None:
            if record is None:
                raise NotRunning(f"no session in {state.path}; start one: tailrace up")
            return cls(record.url, state, record)
        url = url.rstrip("/").removesuffix("/v1")
        if record is not None and url in (record.url, f"http://localhost:{record.port}"):
            return cls(record.url, state, record)
        return cls(url, None, None)

    @property
    def is_ours(self) -> bool:
        """Whether its processes and replicas can be looked into."""
        return self._record is not None

    def models(self) -> list[ServedModel]:
        """What is deployed. Raises ClusterError for a cluster that is not ours."""
        return models_in(self.configs())

    def gateway(self) -> str:
        """Name of the application that clients talk to. Raises ClusterError if there is none."""
        for config in self.configs():
            if config.get("import_path") == GATEWAY_BUILDER:
                return config["name"]
        raise ClusterError(f"{self.url}: no application there is built by {GATEWAY_BUILDER}")

    def configs(self) -> list[dict[str, Any]]:
        """Configurations of all applications, as Serve holds them."""
        state, record = self._ours()
        token = state.ray_token().read_text().strip()
        try:
            answer = httpx.get(
                f"{record.dashboard_url}/api/serve/applications/",
                headers={"Authorization": f"Bearer {token}"},
                timeout=10.0,
                trust_env=False,
            )
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise ClusterError(f"{record.dashboard_url}: Serve does not answer: {error}") from error
        return [
            application.get("deployed_app_config") or {}
            for application in answer.json()["applications"].values()
        ]

    def pids(self) -> dict[tuple[str, str], list[int]]:
        """Replicas' processes by application and deployment."""
        state, _ = self._ours()
        return {
            (application.name, deployment.name): [
                replica.pid for replica in deployment.replicas if replica.pid is not None
            ]
            for application in session.status(state).applications
            for deployment in application.deployments
        }

    def processes(self) -> list[psutil.Process]:
        """All of the session's, whoever started them."""
        _, record = self._ours()
        return processes.of_session(record.session)

    def ask_replicas(
        self, app: str, deployment: str, method: str, call: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Call a method of every running replica. Empty where the application has no such pool.

        Raises:
            ClusterError: a replica does not answer.
        """
        state, record = self._ours()
        if not self._connected:
            head.connect(state, record)
            self._connected = True
        import logging

        from ray import serve
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        ids = [
            replica.replica_id
            for application in session.status(state).applications
            if application.name == app
            for each in application.deployments
            if each.name == deployment
            for replica in each.replicas
            if replica.state == "RUNNING"
        ]
        if not ids:
            return []
        # Serve tells of every handle it opens.
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        handle = serve.get_deployment_handle(deployment, app)
        try:
            asked = [getattr(handle, method).remote({**call, "target": target}) for target in ids]
            return [response.result(timeout_s=60) for response in asked]
        except (RayError, RayServeException, TimeoutError) as error:
            raise ClusterError(
                f"{app}/{deployment}.{method}: {type(error).__name__}: {error}"
            ) from error

    def reconfigure(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Deploy what `change` makes of the Serve configuration in force, and wait for it.

        Raises:
            ConfigError, DeployFailed, ClusterError.
        """
        state, record = self._ours()
        document = configuration.parse(
            yaml.safe_dump(change({"applications": self.configs()})), source="the benchmark"
        )
        config = configuration.check(document, beside=Path.cwd())
        session.bring_up(state, config, port=record.port, say=lambda _: None)

    def close(self) -> None:
        if self._connected:
            import ray

            ray.shutdown()
            self._connected = False

    def _ours(self) -> tuple[StateDir, Record]:
        if self._state is None or self._record is None:
            raise ClusterError(
                f"{self.url} is not the session of this state directory: its processes and "
                "replicas cannot be looked into; run this where it was started"
            )
        return self._state, self._record


def models_in(configs: Sequence[Mapping[str, Any]]) -> list[ServedModel]:
    """Model applications of deployed configurations, under the names the gateway gives them."""
    names: dict[str, str] = {}
    for config in configs:
        if config.get("import_path") == GATEWAY_BUILDER:
            for route in (_user_config(config, "Gateway") or {}).get("models", ()):
                names.setdefault(route["app"], route["name"])
    return [
        ServedModel(
            name=names[config["name"]],
            app=config["name"],
            args=ModelArgs.model_validate(config.get("args") or {}),
            settings=PoolSettings.parse(_user_config(config, "Decode")),
        )
        for config in configs
        if config.get("import_path") == MODEL_BUILDER and config["name"] in names
    ]


@contextmanager
def own_stack(path: Path | None, say: Say) -> Iterator[Stack]:
    """A cluster of the configuration at `path` (the packaged one) and a synthetic model.

    Raises:
        ConfigError, DeployFailed, ClusterError.
    """
    with _home() as state, _started(state, with_synthetic(configuration.load(path)), say) as stack:
        yield stack


@contextmanager
def synthetic_stack(
    say: Say, *, gateway: Mapping[str, Any], slots: int, waiting: int = 1024
) -> Iterator[Stack]:
    """A cluster of nothing but the synthetic model on one replica with so many slots. `gateway` is
    the gateway's `user_config` without its models.

    Raises:
        ConfigError, DeployFailed, ClusterError.
    """
    pool = {"max_running_requests": slots, "max_waiting_requests": waiting}
    with _home() as state, _started(state, synthetic_only(gateway, pool), say) as stack:
        yield stack


@contextmanager
def own_stack_of(
    say: Say, *, gateway: Mapping[str, Any], pool: Mapping[str, Any]
) -> Iterator[Stack]:
    """A cluster of the packaged configuration, with these added to the `user_config` of its gateway
    and of its decode pool.

    Raises:
        ConfigError, DeployFailed, ClusterError.
    """
    with _home() as state:
        config = with_settings(configuration.load(None), {"Gateway": gateway, "Decode": pool})
        with _started(state, config, say) as stack:
            yield stack


def with_settings(
    config: configuration.ServeConfig, settings: Mapping[str, Mapping[str, Any]]
) -> configuration.ServeConfig:
    """The same configuration, checked again, with more `user_config` by deployment."""
    data = copy.deepcopy(config.data)
    for application in data["applications"]:
        for deployment in application["deployments"]:
            if deployment["name"] in settings:
                deployment.setdefault("user_config", {}).update(settings[deployment["name"]])
    document = configuration.parse(yaml.safe_dump(data), source=f"{config.source}, for a bench")
    checked = configuration.check(document, beside=config.code_dir or Path.cwd())
    return replace(checked, code_dir=config.code_dir)


@contextmanager
def _home() -> Iterator[StateDir]:
    """A state directory that is gone afterwards."""
    home = Path(tempfile.mkdtemp(prefix="tailrace-bench-"))
    state = StateDir(home)
    # Reading a configuration imports ray, which reads these once.
    os.environ.update(head.client_environment(state))
    try:
        yield state
    finally:
        shutil.rmtree(home, ignore_errors=True)


@contextmanager
def _started(state: StateDir, config: configuration.ServeConfig, say: Say) -> Iterator[Stack]:
    """It has ports of its own and is gone afterwards, whatever happens."""
    stack: Stack | None = None
    try:
        up = session.bring_up(state, config, port=free_ports(1)[0], say=say)
        stack = Stack(up.url, state, up.record)
        yield stack
    finally:
        if stack is not None:
            stack.close()
        session.take_down(state)


def synthetic_only(
    gateway: Mapping[str, Any], pool: Mapping[str, Any]
) -> configuration.ServeConfig:
    """The packaged configuration, checked, with the synthetic model instead of its own."""
    config = configuration.load(None)
    data = copy.deepcopy(config.data)
    data["applications"] = [
        a for a in data["applications"] if a.get("import_path") == GATEWAY_BUILDER
    ]
    for deployment in data["applications"][0]["deployments"]:
        if deployment["name"] == "Gateway":
            deployment["user_config"] = {"revision": 1, **gateway}
    return with_synthetic(replace(config, data=data), pool)


def with_synthetic(
    config: configuration.ServeConfig, pool: Mapping[str, Any] | None = None
) -> configuration.ServeConfig:
    """The same configuration, checked again, with one more model: the synthetic engine.
    `pool` is its `user_config`."""
    data = copy.deepcopy(config.data)
    applications = data["applications"]
    gateways = [a for a in applications if a.get("import_path") == GATEWAY_BUILDER]
    if not gateways:
        raise ClusterError(
            f"{config.source}: no application is built by {GATEWAY_BUILDER}, so there is nothing "
            "to measure; serve models with it"
        )
    route = {"name": SYNTHETIC, "app": SYNTHETIC}
    for deployment in gateways[0]["deployments"]:
        if deployment["name"] == "Gateway":
            deployment.setdefault("user_config", {}).setdefault("models", []).append(route)
    link = next(
        (
            application["args"]["link"]
            for application in applications
            if application.get("import_path") == MODEL_BUILDER
            and "link" in (application.get("args") or {})
        ),
        None,
    )
    args: dict[str, Any] = {"name": SYNTHETIC, "source": "synthetic", "prefill": False}
    if link is not None:
        args["link"] = link
    applications.append(
        {
            "name": SYNTHETIC,
            "import_path": MODEL_BUILDER,
            "route_prefix": None,
            "runtime_env": {
                "env_vars": {
                    "RAY_SERVE_ENABLE_HA_PROXY": "0",
                    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
                }
            },
            "args": args,
            "deployments": [
                {
                    "name": "Decode",
                    "num_replicas": 1,
                    "max_ongoing_requests": 1000,
                    "ray_actor_options": {"num_cpus": 0.5},
                    "user_config": dict(pool or {}),
                }
            ],
        }
    )
    document = configuration.parse(
        yaml.safe_dump(data), source=f"{config.source} with a synthetic model"
    )
    checked = configuration.check(document, beside=config.code_dir or Path.cwd())
    return replace(checked, code_dir=config.code_dir)


def _user_config(config: Mapping[str, Any], deployment: str) -> dict[str, Any] | None:
    for each in config.get("deployments", ()):
        if each["name"] == deployment:
            return each.get("user_config")
    return None
