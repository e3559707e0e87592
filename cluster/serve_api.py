"""Serve through the dashboard's REST API: deploy a configuration, read what became of it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from cluster.errors import ClusterError, DeployFailed
from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Replica:
    replica_id: str
    state: str
    pid: int | None
    log_file: str | None
    """Relative to Ray's log directory."""


@dataclass(frozen=True, slots=True)
class Deployment:
    name: str
    status: str
    message: str
    target: int
    replicas: tuple[Replica, ...]

    @property
    def running(self) -> int:
        return sum(replica.state == "RUNNING" for replica in self.replicas)


@dataclass(frozen=True, slots=True)
class Application:
    name: str
    status: str
    message: str
    route_prefix: str | None
    deployments: tuple[Deployment, ...]
    last_deployed_s: float = 0.0

    def summary(self) -> str:
        """One line: `RUNNING (Decode 1/1, Prefill 1/1)`."""
        parts = ", ".join(f"{d.name} {d.running}/{d.target}" for d in self.deployments)
        return f"{self.status}{f' ({parts})' if parts else ''}"

    def why(self) -> str:
        """What Serve and the replicas say about a failure: the root of it, not the whole trace."""
        words = [d.message for d in self.deployments if d.message] or [self.message]
        return "\n".join(explain(text) for text in words if text) or "Serve gives no reason"


class ServeApi:
    """One cluster's dashboard. `token` is Ray's, None for a cluster without authentication."""

    def __init__(self, address: str, token: str | None) -> None:
        self.address = address.rstrip("/")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # Not through a proxy from the environment: the dashboard is on this machine or inside.
        self._http = httpx.Client(
            base_url=self.address, headers=headers, timeout=5.0, trust_env=False
        )

    def close(self) -> None:
        self._http.close()

    def is_up(self) -> bool:
        try:
            return self._http.get("/api/ray/version").status_code == 200
        except httpx.HTTPError:
            return False

    def check_reachable(self) -> None:
        """Raises ClusterError if nobody or somebody else answers, or the token is refused."""
        try:
            answer = self._http.get("/api/ray/version")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ClusterError(
                f"{self.address}: no Ray dashboard answers ({error}); give the address of the "
                "head's dashboard, such as http://head:8265"
            ) from error
        if answer.status_code in (401, 403):
            raise ClusterError(
                f"{self.address}: Ray refuses our token ({answer.status_code}); set "
                "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to that cluster's"
            )
        if answer.status_code != 200:
            raise ClusterError(
                f"{self.address}: status {answer.status_code}, not a Ray dashboard; give "
                "the address of the head's dashboard, such as http://head:8265"
            )

    def deploy(self, config: Mapping[str, Any]) -> None:
        """Hand a configuration to Serve, which is started where it does not run yet. Returns when
        Serve has taken it, not when it is in force.

        Raises:
            ConfigError: Serve refuses it.
            ClusterError: Serve does not start, or does not answer.
        """
        try:
            answer = self._http.put("/api/serve/applications/", json=dict(config), timeout=120.0)
        except httpx.HTTPError as error:
            raise ClusterError(
                f"Serve did not take the configuration within 120 s "
                f"({type(error).__name__}: {error}); look at the logs or try again"
            ) from error
        if answer.status_code == 400:
            raise ConfigError(f"Serve refuses the configuration: {explain(answer.text)}")
        if answer.status_code != 200:
            raise ClusterError(
                f"Serve did not start (status {answer.status_code}): {explain(answer.text)}"
            )

    def applications(self) -> list[Application] | None:
        """What runs, by name; None while nobody answers."""
        try:
            answer = self._http.get("/api/serve/applications/")
            if answer.status_code != 200:
                return None
            details = answer.json()
        except (httpx.HTTPError, ValueError):
            return None
        from deployments.settings import ROOT_DEPLOYMENT  # pydantic: 0.1 s that --help can save

        return [
            Application(
                name=app["name"],
                status=app["status"],
                message=app.get("message") or "",
                route_prefix=app.get("route_prefix"),
                last_deployed_s=app.get("last_deployed_time_s") or 0.0,
                deployments=tuple(
                    Deployment(
                        name=deployment["name"],
                        status=deployment["status"],
                        message=deployment.get("message") or "",
                        target=deployment.get("target_num_replicas") or 0,
                        replicas=tuple(
                            Replica(
                                replica["replica_id"],
                                replica["state"],
                                replica.get("pid"),
                                replica.get("log_file_path"),
                            )
                            for replica in deployment.get("replicas", ())
                        ),
                    )
                    for name, deployment in sorted(app.get("deployments", {}).items())
                    if name != ROOT_DEPLOYMENT
                ),
            )
            for _, app in sorted(details.get("applications", {}).items())
        ]

    def http_address(self) -> tuple[str, int] | None:
        """Where Serve listens, None if it does not run."""
        try:
            details = self._http.get("/api/serve/applications/").json()
        except (httpx.HTTPError, ValueError):
            return None
        options = details.get("http_options") or {}
        return (options["host"], options["port"]) if options.get("port") else None

    def has_haproxy(self) -> bool | None:
        """Whether HAProxy is Serve's front; None if that cannot be known."""
        try:
            answer = self._http.get(
                "/api/v0/actors",
                params={
                    "filter_keys": "state",
                    "filter_predicates": "=",
                    "filter_values": "ALIVE",
                    "limit": 1000,
                },
            )
            actors = answer.json()["data"]["result"]["result"]
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return None
        return any(actor.get("class_name") == "HAProxyManager" for actor in actors)


def foreign_token() -> str | None:
    """The Ray token in this environment, as Ray's own clients find it."""
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token.strip()
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        return path.read_text().strip() or None
    except OSError:
        return None


def direct_replicas_are_up(stats_port: int, routed: list[str]) -> bool:
    """Whether HAProxy sends to a replica of each application in `routed`, and not by way of
    Serve's Python proxy, which stands in until it has seen the replicas healthy."""
    try:
        answer = httpx.get(f"http://127.0.0.1:{stats_port}/stats;csv", timeout=2.0, trust_env=False)
    except httpx.HTTPError:
        return False
    header, *rows = answer.text.splitlines() or [""]
    names = header.lstrip("# ").split(",")
    if "status" not in names:
        return False
    column = names.index("status")
    up: set[str] = set()
    for row in rows:
        cells = row.split(",")
        if len(cells) > column and cells[column].startswith("UP"):
            backend, server = cells[0], cells[1]
            if server.startswith("SERVE_REPLICA"):
                up.add(backend.removeprefix("http-"))
    return up.issuperset(routed)


def explain(message: str) -> str:
    """The sentence that matters in what Ray and Serve wrap an exception in.

    A replica's failure arrives as a paragraph with one traceback inside another. The last line
    that names an exception is the replica's own; what Serve says around it comes first.
    """
    lines = [line.rstrip() for line in message.strip().splitlines() if line.strip()]
    if "Traceback" not in message and not any(line.startswith("  ") for line in lines):
        return "\n".join(lines)
    cause = ""
    for index, line in enumerate(lines):
        head, _, rest = line.partition(":")
        name = head.strip().rpartition(".")[2]
        if line[:1].isspace() or not name.isidentifier() or not rest:
            continue
        if name.endswith(("Error", "Exception", "Overloaded", "Exit", "Interrupt")):
            # An exception's text may go on over the lines below it.
            more = [rest.strip()]
            for after in lines[index + 1 :]:
                if after[:1].isspace() or after.startswith(("The above", "During", "Traceback")):
                    break
                more.append(after)
            cause = f"{name}: {' '.join(more)}"
    first = "" if lines[0].startswith(("Traceback", "\x1b")) else lines[0]
    return "\n".join(part for part in (first, cause) if part) or lines[-1]


def wait_until(condition: Any, *, within_s: float, every_s: float = 0.1) -> bool:
    """Poll `condition()`; False if it did not hold in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True


def raise_if_failed(applications: list[Application], *, since_s: float) -> None:
    """Raises DeployFailed for an application that Serve gave up on after `since_s` (Unix)."""
    for application in applications:
        if application.status in ("DEPLOY_FAILED", "UNHEALTHY") and (
            application.last_deployed_s >= since_s
        ):
            raise DeployFailed(
                f"application {application.name!r} is {application.status}: {application.why()}"
            )
