"""The command `tailrace`.

Every command takes `--json`: progress goes to standard error, and standard output carries exactly
one JSON object. Expected errors are one `error: ...` on standard error and exit code 1 (2 for wrong
usage, 3 where there is nothing running).
"""

from __future__ import annotations

import importlib
import json
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from engine.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cluster.session import PoolMemory, Up
    from cluster.state import StateDir
    from engine.memory import MemoryPlan

_LAZY = {
    "bench": "cluster.bench.command:bench",
    "chat": "cluster.chat:chat",
    "compare": "cluster.compare.command:compare",
    "dashboards": "dashboards.command:dashboards",
    "explain": "cluster.explain:explain",
    "gpus": "cluster.gpus:gpus",
    "keys": "cluster.keys:keys",
    "quantize": "cluster.quantize.command:quantize",
    "replay": "cluster.replay.command:replay",
    "report": "cluster.report.command:report",
    "verify": "cluster.verify:verify",
}
"""Commands in modules of their own, imported when they are called: `module:attribute`."""


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_LAZY])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _LAZY:
            module, _, attribute = _LAZY[cmd_name].partition(":")
            return getattr(importlib.import_module(module), attribute)
        return super().get_command(ctx, cmd_name)


json_option = click.option(
    "as_json", "--json", is_flag=True, help="One JSON object on standard output."
)

context_option = click.option(
    "--context",
    type=click.IntRange(min=1),
    default=1024,
    show_default=True,
    help="Tokens of a request, to say how many of them fit into each replica's KV at once.",
)


def say(line: str) -> None:
    """Progress, for people: standard error."""
    click.echo(line, err=True)


def emit(value: dict[str, Any]) -> None:
    """The result of a `--json` command."""
    click.echo(json.dumps(value))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tailrace")
def commands() -> None:
    """Serve large language models on a Ray cluster, on a laptop or on many machines."""


@commands.command()
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.option("--detach", "-d", is_flag=True, help="Return when it is ready; it keeps running.")
@click.option("--port", type=click.IntRange(1, 65535), help="Instead of http_options.port.")
@click.option(
    "--address",
    metavar="URL",
    help="Deploy onto the Ray cluster with this dashboard (http://head:8265) instead of starting "
    "one here. Its token: RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH.",
)
@context_option
@json_option
def up(
    config: Path | None,
    detach: bool,
    port: int | None,
    address: str | None,
    context: int,
    as_json: bool,
) -> None:
    """Serve CONFIG (a Ray Serve file), or the packaged laptop configuration.

    Where a session runs already, the configuration is applied to it in place. Otherwise one starts
    and, without --detach, lives until Ctrl-C.
    """
    from cluster import config as configuration
    from cluster import session
    from cluster.state import StateDir

    # Before anything starts, so that a signal during the start takes it down again.
    interrupt_on_signals()
    checked = configuration.load(config)
    for warning in checked.warnings:
        say(f"warning: {warning}")
    state = StateDir.from_environment()
    if address is not None:
        ready = session.deploy_to(address, checked, port=port, say=say)
    else:
        ready = session.bring_up(state, checked, port=port, say=say)
    if ready.haproxy is False:
        say(f"warning: {session.PYTHON_PROXY}")
    foreground = not detach and ready.record is not None and not ready.updated
    try:
        memory = session.memory_of_pools(ready, checked, state, address)
        _announce(ready, memory, context, foreground=foreground, as_json=as_json)
        if foreground and ready.record is not None:
            _stay(state, ready)
    except BaseException:
        if foreground:
            session.take_down(state)
        raise


def _announce(
    ready: Up, memory: PoolMemory, context: int, *, foreground: bool, as_json: bool
) -> None:
    record = ready.record
    if as_json:
        from cluster.replica_memory import to_json

        told: dict[str, dict[str, list[dict[str, int]]]] = {}
        for (application, pool), plans in memory.items():
            told.setdefault(application, {})[pool] = [to_json(plan, context) for plan in plans]
        emit(
            {
                "url": ready.url,
                "models": list(ready.models),
                "memory": told,
                "ready_s": round(ready.ready_s, 2),
                "updated": ready.updated,
                "haproxy": ready.haproxy,
                "session": record.session if record else None,
                "dashboard_url": record.dashboard_url if record else None,
                "ray_address": record.ray_address if record else None,
                "metrics_url": (
                    f"http://127.0.0.1:{record.metrics_port}/metrics" if record else None
                ),
                "log_dir": record.log_dir if record else None,
            }
        )
        sys.stdout.flush()
        return
    say(f"{'updated' if ready.updated else 'ready'} in {ready.ready_s:.1f} s")
    click.echo(f"\n  URL     {ready.url}/v1" if ready.models else f"\n  URL     {ready.url}")
    if ready.models:
        click.echo(f"  page    {ready.url}/dashboard")
        click.echo(f"  models  {', '.join(ready.models)}")
        body = json.dumps(
            {"model": ready.models[0], "messages": [{"role": "user", "content": "Hello!"}]}
        )
        click.echo(
            f"  try     curl {ready.url}/v1/chat/completions "
            f"-H 'content-type: application/json' -d '{body}'\n"
            "          tailrace chat"
        )
    for line in _memory_lines(memory, context):
        click.echo(f"  memory  {line}")
    if record:
        click.echo(f"  logs    {record.log_dir}")
        click.echo(f"  stop    {'Ctrl-C' if foreground else 'tailrace down'}")
    click.echo()
    sys.stdout.flush()


def _memory_lines(memory: PoolMemory, context: int) -> Iterator[str]:
    """One for each pool: of its only replica, or of the one with the least room."""
    for (application, pool), plans in sorted(memory.items()):
        least = min(plans, key=lambda plan: plan.kv_tokens)
        which = "" if len(plans) == 1 else f" ({len(plans)} replicas, the smallest)"
        yield f"{application} {pool}{which}: {least.told(context)}"


def interrupt_on_signals() -> None:
    """Turn SIGTERM and SIGHUP into the KeyboardInterrupt that Ctrl-C is, once."""
    asked = threading.Event()

    def handle(number: int, frame: Any) -> None:
        if not asked.is_set():  # A second one does not interrupt taking things down.
            asked.set()
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handle)


def _stay(state: StateDir, ready: Up) -> None:
    """Until a signal, `tailrace down` from elsewhere, or the session's death."""
    from cluster import head, session
    from cluster.errors import ClusterError

    record, child = ready.record, ready.child
    assert record is not None, "a session of somebody else's is not stayed with"
    assert child is not None, "nor is one that an earlier command started"
    try:
        while child.poll() is None:
            time.sleep(0.5)
    except KeyboardInterrupt:
        say("stopping")
        began = time.monotonic()
        session.take_down(state)
        child.wait()
        say(f"stopped in {time.monotonic() - began:.1f} s")
        return
    now = state.load()
    if now is None or now.session != record.session:
        say("the session was taken down")
        return
    tail = head.head_log_tail(record)
    head.stop(state, record, keep_logs=True)
    raise ClusterError(f"Ray died:\n{tail}\nlogs: {state.logs(record.session)}")


@commands.command()
@json_option
def down(as_json: bool) -> None:
    """End the running session: its processes, no others. Doing it twice does no harm."""
    from cluster import session
    from cluster.state import StateDir

    state = StateDir.from_environment()
    began = time.monotonic()
    ended = session.take_down(state)
    took = time.monotonic() - began
    if as_json:
        emit({"stopped": bool(ended), "num_processes": len(ended), "took_s": round(took, 2)})
    elif ended:
        say(f"stopped {len(ended)} processes in {took:.1f} s")
    else:
        say("nothing was running")


@commands.command()
@context_option
@json_option
def status(context: int, as_json: bool) -> None:
    """Say what runs and how it is. Exit code 3 when nothing does."""
    from cluster import session
    from cluster.errors import NotRunning
    from cluster.state import StateDir

    try:
        now = session.status(StateDir.from_environment())
    except NotRunning as error:
        if as_json:
            emit({"running": False, "reason": str(error)})
        raise
    record = now.record
    if as_json:
        emit(
            {
                "running": True,
                "healthy": now.healthy,
                "url": record.url,
                "session": record.session,
                "uptime_s": round(time.time() - record.started_at, 1),
                "config": record.config,
                "dashboard_url": record.dashboard_url,
                "ray_address": record.ray_address,
                "metrics_url": f"http://127.0.0.1:{record.metrics_port}/metrics",
                "log_dir": record.log_dir,
                "head_pid": record.head_pid,
                "pids": list(now.pids),
                "queues": {
                    model: {
                        "leading": list(each.leading),
                        "standing_by": list(each.standing_by),
                    }
                    for model, each in now.queues.items()
                },
                "applications": {
                    application.name: {
                        "status": application.status,
                        "message": application.message,
                        "route_prefix": application.route_prefix,
                        "deployments": {
                            deployment.name: {
                                "status": deployment.status,
                                "message": deployment.message,
                                "target_replicas": deployment.target,
                                "replicas": [
                                    {
                                        "id": replica.replica_id,
                                        "state": replica.state,
                                        "pid": replica.pid,
                                        "memory": _memory(now.memory, replica.replica_id, context),
                                    }
                                    for replica in deployment.replicas
                                ],
                            }
                            for deployment in application.deployments
                        },
                    }
                    for application in now.applications
                },
            }
        )
        return
    click.echo(f"{'healthy' if now.healthy else 'NOT HEALTHY'}  {record.url}")
    click.echo(
        f"session {record.session[:8]}, up {time.time() - record.started_at:.0f} s, "
        f"{len(now.pids)} processes, head pid {record.head_pid}, {record.config}"
    )
    for application in now.applications:
        click.echo(f"{application.name}  {application.status}")
        for deployment in application.deployments:
            pids = ", ".join(
                f"{replica.state} pid {replica.pid}" for replica in deployment.replicas
            )
            click.echo(
                f"  {deployment.name}  {deployment.status}  "
                f"{deployment.running}/{deployment.target}  {pids}"
            )
            for replica in deployment.replicas:
                if replica.replica_id in now.memory:
                    click.echo(f"    {now.memory[replica.replica_id].told(context)}")
            if deployment.message:
                click.echo(f"    {deployment.message.splitlines()[-1]}")
    for model, each in now.queues.items():
        click.echo(f"queue of {model}  {each}")
    click.echo(f"logs {record.log_dir}\ndashboard {record.dashboard_url}")


def _memory(
    memory: Mapping[str, MemoryPlan], replica_id: str, context: int
) -> dict[str, int] | None:
    from cluster.replica_memory import to_json

    return to_json(memory[replica_id], context) if replica_id in memory else None


def main() -> None:
    """Entry point of the console script."""
    try:
        _run()
    except (click.Abort, KeyboardInterrupt):
        # Also while another error was being told.
        click.echo("interrupted", err=True)
        sys.exit(130)


def _run() -> None:
    try:
        commands.main(standalone_mode=False)
    except EngineError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(getattr(error, "exit_code", 1))
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(141)


if __name__ == "__main__":
    main()
