"""Load a Serve configuration file and refuse what Serve would accept and then not do.

`ServeDeploySchema` ignores unknown keys at every level, so a typo becomes a default in silence.
Here every key is checked against the schema, every problem is named with its line, and all of them
are reported at once.
"""

from __future__ import annotations

import ast
import copy
import difflib
import importlib
import importlib.machinery
import importlib.util
import math
import os
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import yaml

from engine.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

DEFAULT_PATH = Path(__file__).with_name("default.yaml")
"""The packaged file; `config.yaml` at the top of the repository is a link to it."""

MAX_FILE_BYTES = 1 << 20

Location = tuple[str | int, ...]
"""Keys and indices from the top of the file, as pydantic writes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """An application builder of ours: what its arguments and live settings look like."""

    args: str
    """`module:Name` of the pydantic model of `args`."""

    deployments: Mapping[str, str]
    """Deployment name to the `module:Name` of its `user_config`."""

    is_model: bool
    """Whether the application is a model: reached over links, never over HTTP of its own."""


BUILDERS: Mapping[str, Builder] = {
    "deployments.app:gateway": Builder(
        args="deployments.settings:GatewayArgs",
        deployments={"Gateway": "deployments.gateway.config:GatewayConfig"},
        is_model=False,
    ),
    "deployments.app:model": Builder(
        args="deployments.settings:ModelArgs",
        deployments={
            "Prefill": "deployments.settings:PoolSettings",
            "Decode": "deployments.settings:PoolSettings",
        },
        is_model=True,
    ),
}

_NO_INGRESS = ("RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_ENABLE_DIRECT_INGRESS")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """A checked configuration, as it goes to Serve."""

    source: str
    """The file's name, for messages."""

    data: dict[str, Any]
    code_dir: Path | None = None
    """Directory that must be importable on every node: applications that lie beside the file."""

    warnings: tuple[str, ...] = ()

    @property
    def host(self) -> str:
        # Serve's default is every interface; a server without keys listens on this machine only.
        return self.data.get("http_options", {}).get("host", "127.0.0.1")

    @property
    def port(self) -> int:
        return self.data.get("http_options", {}).get("port", 8000)

    @property
    def applications(self) -> list[str]:
        return [application["name"] for application in self.data["applications"]]

    @property
    def models(self) -> set[str]:
        """Names under which the gateways of this file serve models."""
        return {model["name"] for model in self._served}

    @property
    def _served(self) -> list[dict[str, Any]]:
        """What gateways say of the models that they serve."""
        return [
            model
            for application in self.data["applications"]
            for deployment in application.get("deployments") or ()
            if deployment["name"] == "Gateway"
            for model in (deployment.get("user_config") or {}).get("models") or ()
            if isinstance(model, dict) and "name" in model
        ]

    @property
    def telling_pools(self) -> set[tuple[str, str]]:
        """Application and deployment of every pool that may be there, computes a model and tells
        gateways about itself: those that no gateway serves have nobody to tell."""
        served = {model.get("app", model["name"]) for model in self._served}
        return {
            (application["name"], pool)
            for application in self.data["applications"]
            if application.get("import_path") == "deployments.app:model"
            and application["name"] in served
            and (application.get("args") or {}).get("source") != "synthetic"
            for pool in {"Decode", "Prefill"}.difference(
                deployment["name"]
                for deployment in application.get("deployments") or ()
                if (deployment.get("user_config") or {}).get("metrics") is False
            )
        }

    def listening_on(self, host: str, port: int) -> ServeConfig:
        data = copy.deepcopy(self.data)
        data.setdefault("http_options", {}).update(host=host, port=port)
        return replace(self, data=data)

    def needed_cpus(self) -> int:
        """What Ray must be able to hand out: every replica twice, since an update starts the new
        ones before the old ones stop. Deployments the file does not name count as one CPU."""
        total = 0.0
        for application in self.data["applications"]:
            for deployment in application.get("deployments") or [{}]:
                scaling = deployment.get("autoscaling_config") or {}
                replicas = scaling.get("max_replicas") or deployment.get("num_replicas")
                options = deployment.get("ray_actor_options") or {}
                bundles = deployment.get("placement_group_bundles")
                bundles = bundles or _rank_bundles(application, deployment)
                cpus = (
                    sum(bundle.get("CPU", 0) for bundle in bundles)
                    if bundles
                    else options.get("num_cpus", 1)
                )
                total += (replicas if isinstance(replicas, int) else 1) * (
                    1 if cpus is None else cpus
                )
        return max(math.ceil(2 * total), os.cpu_count() or 1)


def _rank_bundles(
    application: Mapping[str, Any], deployment: Mapping[str, Any]
) -> list[dict[str, float]]:
    """The placement group that the builder gives a pool whose replicas have ranks."""
    from deployments.settings import rank_bundles

    ranks = _parallel(application, deployment, "tensor") * _parallel(
        application, deployment, "pipeline"
    )
    return rank_bundles(ranks, (application.get("args") or {}).get("accelerator", "cpu"))


def _parallel(
    application: Mapping[str, Any],
    deployment: Mapping[str, Any],
    what: Literal["tensor", "pipeline"],
) -> int:
    """`tensor_parallel` or `pipeline_parallel` of this pool."""
    args = application.get("args") or {}
    name = f"{what}_parallel"
    own = args.get(f"prefill_{name}") if deployment.get("name") == "Prefill" else None
    size = own or args.get(name, 1)
    return size if isinstance(size, int) else 1  # which is told where args are checked


def _overlaps(deployment: Mapping[str, Any]) -> bool:
    from deployments.settings import PoolSettings

    try:
        return PoolSettings.parse(deployment.get("user_config")).overlap
    except ConfigError:  # which is told where user_config is checked
        return False


def load(path: Path | None = None) -> ServeConfig:
    """Read and check a file; the packaged one if `path` is None.

    Raises:
        ConfigError: it cannot be read, is not YAML, or cannot work. One line a problem, each with
            the place in the file.
    """
    file = DEFAULT_PATH if path is None else path
    document = parse(_read(file), source=str(file))
    return check(document, beside=file.resolve().parent)


# What was read


@dataclass(frozen=True, slots=True)
class Document:
    """Parsed YAML, and where in the text each value's key stands."""

    source: str
    data: Any
    places: Mapping[Location, tuple[int, int]]
    """Line and column, from 1."""

    def at(self, location: Location) -> str:
        for end in range(len(location), -1, -1):
            if place := self.places.get(location[:end]):
                return f"{self.source}:{place[0]}:{place[1]}"
        return self.source


def parse(text: str, *, source: str) -> Document:
    """YAML with the place of every key.

    Raises:
        ConfigError: malformed, empty, not a mapping, or a key written twice.
    """
    loader = None
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            raise ConfigError(f"{source}: the file is empty; it needs at least `applications:`")
        places: dict[Location, tuple[int, int]] = {}
        _find_places(node, (), places, source, set())
        data = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        context = f" ({error.context})" if error.context else ""
        raise ConfigError(f"{source}{place}: not YAML: {error.problem}{context}") from error
    except yaml.reader.ReaderError as error:
        before = text[: error.position] if isinstance(error.position, int) else ""
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        raise ConfigError(
            f"{source}:{line}:{column}: not text: character #x{ord(str(error.character)):04x}; "
            "a configuration is YAML in UTF-8"
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{source}: nested too deep to be a configuration") from error
    except ValueError as error:  # a scalar such as 2024-13-45 that YAML takes for a date
        raise ConfigError(f"{source}: not YAML: {error}; put the value in quotes") from error
    finally:
        if loader is not None:
            loader.dispose()
    if not isinstance(data, dict):
        raise ConfigError(
            f"{source}:1:1: a {type(data).__name__}, not a mapping; "
            "it needs at least `applications:`"
        )
    return Document(source, data, places)


def _read(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ConfigError(
                f"{path}: {size} bytes; a configuration has at most {MAX_FILE_BYTES}. "
                "Is it a model file?"
            )
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot read it ({error.strerror or error}); give the path of a Serve "
            "configuration, or none for the packaged one"
        ) from error
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        raise ConfigError(
            f"{path}:{line}:{column}: not text: byte 0x{raw[error.start]:02x}; "
            "a configuration is YAML in UTF-8"
        ) from error


def _find_places(
    node: yaml.Node,
    location: Location,
    places: dict[Location, tuple[int, int]],
    source: str,
    seen: set[int],
) -> None:
    if id(node) in seen:  # an alias: walking it again could take for ever
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        own: dict[str, int] = {}
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                _find_places(value, location, places, source, seen)
                continue
            name = key.value if isinstance(key, yaml.ScalarNode) else str(key.value)
            mark = key.start_mark
            if name in own:
                raise ConfigError(
                    f"{source}:{mark.line + 1}:{mark.column + 1}: {_dotted((*location, name))} is "
                    f"set twice (first on line {own[name]}); keep one"
                )
            own[name] = mark.line + 1
            places[(*location, name)] = (mark.line + 1, mark.column + 1)
            _find_places(value, (*location, name), places, source, seen)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            mark = item.start_mark
            places[(*location, index)] = (mark.line + 1, mark.column + 1)
            _find_places(item, (*location, index), places, source, seen)


# What it says


def check(document: Document, *, beside: Path) -> ServeConfig:
    """Check a parsed file against Serve's schema and ours. `beside` is the file's directory.

    Raises:
        ConfigError: with one line a problem.
    """
    return _Lint(document, beside).run()


class _Lint:
    def __init__(self, document: Document, beside: Path) -> None:
        self.document = document
        self.data = copy.deepcopy(document.data)
        self.beside = beside
        self.code_dir: Path | None = None
        self.problems: dict[Location, str] = {}
        self.warnings: list[str] = []

    def run(self) -> ServeConfig:
        # Imported late: a second and a half that `tailrace --help` has no use for.
        from ray.serve.schema import ServeDeploySchema

        self._unknown_keys(self.data, ServeDeploySchema, ())
        self._validate(ServeDeploySchema, self.data, ())
        if not self.problems:
            # The shape is right, so what follows may rely on it.
            self._http_options()
            for index, application in enumerate(self.data["applications"]):
                self._application(application, ("applications", index))
            self._routes_of_gateways()
        if self.problems:
            lines = [
                f"{self.document.at(location)}: {message}"
                for location, message in sorted(self.problems.items(), key=self._in_file_order)
            ]
            raise ConfigError("\n".join(lines))
        config = ServeConfig(
            source=self.document.source,
            data=self.data,
            code_dir=self.code_dir,
            warnings=tuple(self.warnings),
        )
        return config.listening_on(config.host, config.port)

    def _in_file_order(self, item: tuple[Location, str]) -> tuple[int, int]:
        location = item[0]
        while location and location not in self.document.places:
            location = location[:-1]
        return self.document.places.get(location, (0, 0))

    def _say(self, location: Location, message: str) -> None:
        self.problems.setdefault(location, f"{_dotted(location)}: {message}")

    # keys

    def _unknown_keys(self, value: Any, annotation: Any, location: Location) -> None:
        """Report keys that no field takes, and drop them so that each is reported once."""
        if isinstance(value, dict):
            for model in _models(annotation):
                fields = _field_annotations(model)
                for key in list(value):
                    if key not in fields:
                        self._say((*location, key), _unknown(key, list(fields)))
                        del value[key]
                    else:
                        self._unknown_keys(value[key], fields[key], (*location, key))
                return
            for inner in _mapping_values(annotation):
                for key, item in value.items():
                    self._unknown_keys(item, inner, (*location, key))
        elif isinstance(value, list):
            for inner in _items(annotation):
                for index, item in enumerate(value):
                    self._unknown_keys(item, inner, (*location, index))
                return

    def _validate(self, model: type[BaseModel], value: Any, location: Location) -> Any:
        from pydantic import ValidationError

        try:
            return model.model_validate(copy.deepcopy(value))
        except ValidationError as error:
            self._report(error, value, location)
        except (TypeError, AttributeError) as error:
            # Serve's own validators take a well-formed value for granted.
            self._say(location, f"cannot be read: {error}")
        return None

    def _report(self, error: ValidationError, value: Any, location: Location) -> None:
        for detail in error.errors():
            # pydantic adds the names of union members; keep what exists in the file, and the
            # last key of a missing field.
            path: Location = ()
            current = value
            for part in detail["loc"]:
                inside, child = _child(current, part)
                if inside:
                    current = child
                elif detail["type"] != "missing":
                    break
                path = (*path, part)
            message = detail["msg"].removeprefix("Value error, ")
            if detail["type"] == "missing":
                message = "missing; it is required"
            elif isinstance(current, dict | list):
                message = message[:1].lower() + message[1:]
            else:
                message = f"{current!r}: {message[:1].lower()}{message[1:]}"
            self._say((*location, *path), message)

    def _model(self, reference: str, value: Any, location: Location) -> None:
        """Check `value` against one of our own models."""
        module, _, name = reference.partition(":")
        model = getattr(importlib.import_module(module), name)
        self._unknown_keys(value, model, location)
        self._validate(model, value, location)

    # meaning

    def _http_options(self) -> None:
        options = self.data.get("http_options") or {}
        port = options.get("port", 8000)
        if not 1 <= port <= 65535:
            self._say(("http_options", "port"), f"{port}: a port is between 1 and 65535")

    def _application(self, application: dict[str, Any], at: Location) -> None:
        from ray.serve.config import AutoscalingPolicy

        application.setdefault("name", "default")
        self._runtime_env(application.get("runtime_env") or {}, (*at, "runtime_env"))
        remote = _has_own_code(application.get("runtime_env") or {})
        if not remote:
            self._import_path(application["import_path"], (*at, "import_path"))
        if (route := application.get("route_prefix")) is not None:
            self._route_prefix(route, (*at, "route_prefix"))
        if policy := application.get("autoscaling_policy"):
            self._unknown_keys(policy, AutoscalingPolicy, (*at, "autoscaling_policy"))
            self._policy(policy, (*at, "autoscaling_policy"), remote)
        seen: dict[str, int] = {}
        for index, deployment in enumerate(application.get("deployments") or []):
            here = (*at, "deployments", index)
            if deployment["name"] in seen:
                self._say(
                    (*here, "name"),
                    f"{deployment['name']!r} is configured twice in application "
                    f"{application['name']!r}; keep one",
                )
            seen[deployment["name"]] = index
            self._deployment(deployment, here, remote)
        module, attribute = _split(application["import_path"])
        if builder := BUILDERS.get(f"{module}:{attribute}"):
            self._built_by(builder, application, at)

    def _deployment(self, deployment: dict[str, Any], at: Location, remote: bool) -> None:
        from ray.serve.config import (
            AutoscalingConfig,
            DeploymentActorConfig,
            GangSchedulingConfig,
            RequestRouterConfig,
        )

        options = deployment.get("ray_actor_options") or {}
        self._runtime_env(
            options.get("runtime_env") or {}, (*at, "ray_actor_options", "runtime_env")
        )
        remote = remote or _has_own_code(options.get("runtime_env") or {})
        if (scaling := deployment.get("autoscaling_config")) is not None:
            here = (*at, "autoscaling_config")
            low = scaling.get("min_replicas", 1)
            high = scaling.get("max_replicas", 1)
            first = scaling.get("initial_replicas")
            if isinstance(low, int) and isinstance(high, int) and low > high:
                self._say(
                    (*here, "min_replicas" if "min_replicas" in scaling else "max_replicas"),
                    f"min_replicas={low} is above max_replicas={high}; raise max_replicas or "
                    "lower min_replicas",
                )
            elif isinstance(first, int) and not low <= first <= high:
                self._say(
                    (*here, "initial_replicas"),
                    f"{first}: must be between min_replicas={low} and max_replicas={high}",
                )
            else:
                # Serve's schema takes any mapping here and fails when it deploys.
                self._validate(AutoscalingConfig, scaling, here)
            if policy := scaling.get("policy"):
                self._policy(policy, (*here, "policy"), remote)
        for key, model, reference in (
            ("request_router_config", RequestRouterConfig, "request_router_class"),
            ("gang_scheduling_config", GangSchedulingConfig, None),
        ):
            if (value := deployment.get(key)) is not None:
                if reference and isinstance(path := value.get(reference), str) and not remote:
                    self._import_path(path, (*at, key, reference))
                if (*at, key, reference) not in self.problems and not remote:
                    self._validate(model, value, (*at, key))
        for index, actor in enumerate(deployment.get("deployment_actors") or []):
            here = (*at, "deployment_actors", index)
            path = actor.get("actor_class")
            if isinstance(path, str) and not remote:
                self._import_path(path, (*here, "actor_class"))
            if (*here, "actor_class") not in self.problems and not remote:
                self._validate(DeploymentActorConfig, actor, here)

    def _policy(self, policy: dict[str, Any], at: Location, remote: bool) -> None:
        path = policy.get("policy_function")
        if isinstance(path, str) and not remote:
            self._import_path(path, (*at, "policy_function"))

    def _route_prefix(self, route: str, at: Location) -> None:
        if not route.startswith("/"):
            self._say(at, f"{route!r}: must start with '/'; write {'/' + route!r}, or null")
        elif route != "/" and route.endswith("/"):
            self._say(at, f"{route!r}: must not end with '/'; write {route.rstrip('/') or '/'!r}")
        elif "{" in route or "}" in route:
            self._say(at, f"{route!r}: wildcards are not possible in a route prefix")

    def _runtime_env(self, runtime_env: dict[str, Any], at: Location) -> None:
        from ray.runtime_env import RuntimeEnv

        known = sorted(RuntimeEnv.known_fields)
        for key in runtime_env:
            if key not in known:
                self._say((*at, key), _unknown(key, known))
        variables = runtime_env.get("env_vars")
        if variables is None:
            return
        if not isinstance(variables, dict):
            self._say((*at, "env_vars"), f"{variables!r}: must map names to strings")
            return
        for name, value in variables.items():
            if not isinstance(value, str):
                text = str(value).lower() if isinstance(value, bool) else str(value)
                self._say(
                    (*at, "env_vars", name),
                    f'{value!r}: environment variables are strings; write "{text}" in quotes',
                )

    def _import_path(self, path: str, at: Location) -> None:
        module, attribute = _split(path)
        if not module or not attribute:
            self._say(at, f"{path!r}: must be module:attribute, such as deployments.app:gateway")
            return
        spec, beside = self._find(module)
        if spec is None:
            self._say(
                at,
                f"{path!r}: no module named {module!r}; it must be installed, or lie in "
                f"{self.beside}{_nearest_module(module)}",
            )
            return
        names = _names_in(spec)
        name = attribute.partition(".")[0]
        if names is not None and name not in names:
            public = [n for n in names if not n.startswith("_")]
            self._say(at, f"{path!r}: {module} has no {name!r}{_did_you_mean(name, public)}")
        elif beside:
            self.code_dir = self.beside

    def _find(self, module: str) -> tuple[importlib.machinery.ModuleSpec | None, bool]:
        """The module's spec, without running it, and whether it lies beside the file."""
        top, *rest = module.split(".")
        try:
            spec = importlib.util.find_spec(top)
        except (ImportError, ValueError):
            spec = None
        beside = spec is None
        if beside:
            spec = importlib.machinery.PathFinder.find_spec(top, [str(self.beside)])
        name = top
        for part in rest:
            if spec is None or spec.submodule_search_locations is None:
                return None, beside
            name += "." + part
            spec = importlib.machinery.PathFinder.find_spec(
                name, list(spec.submodule_search_locations)
            )
        return spec, beside

    # our own applications

    def _built_by(self, builder: Builder, application: dict[str, Any], at: Location) -> None:
        args = application.setdefault("args", {})
        self._model(builder.args, args, (*at, "args"))
        for index, deployment in enumerate(application.get("deployments") or []):
            here = (*at, "deployments", index)
            name = deployment["name"]
            if name not in builder.deployments:
                self._say(
                    (*here, "name"),
                    f"{name!r}: {application['import_path']} has no such deployment"
                    f"{_did_you_mean(name, list(builder.deployments))}",
                )
                continue
            if (settings := deployment.get("user_config")) is not None:
                self._model(builder.deployments[name], settings, (*here, "user_config"))
            self._replica_with_ranks(application, deployment, here)
            if builder.is_model:
                self._replica_on_gpu(application, deployment, here)
            if deployment.get("num_replicas", 1) == 1 and not deployment.get("max_surge_percent"):
                self.warnings.append(
                    f"{self.document.at(here)}: {application['name']}/{name} has one replica and "
                    "no max_surge_percent: an update stops it before its successor is there; "
                    "set max_surge_percent: 100"
                )
        if builder.is_model:
            self._model_application(application, at)

    def _replica_on_gpu(
        self, application: dict[str, Any], deployment: dict[str, Any], at: Location
    ) -> None:
        on_gpu = application["args"].get("accelerator") == "gpu"
        gpus = (deployment.get("ray_actor_options") or {}).get("num_gpus") or 0
        here = (*at, "ray_actor_options", "num_gpus")
        if _rank_bundles(application, deployment):
            if gpus:
                self._say(
                    here,
                    f"{gpus}: the ranks of a replica have the GPUs, in its placement group; leave "
                    "it out",
                )
        elif on_gpu and not gpus:
            self._say(
                here,
                "missing; a replica with accelerator: gpu sees no device without it: write "
                "num_gpus: 1",
            )
        elif gpus and not on_gpu:
            self._say(
                here,
                f"{gpus}: the model is computed on the CPU and would keep the device from others; "
                "set accelerator: gpu in args, or leave it out",
            )

    def _replica_with_ranks(
        self, application: dict[str, Any], deployment: dict[str, Any], at: Location
    ) -> None:
        """A replica with ranks runs in a placement group that the builder makes."""
        if not _rank_bundles(application, deployment):
            return
        from deployments.settings import REPLICA_CPUS

        tensor = _parallel(application, deployment, "tensor")
        if _parallel(application, deployment, "pipeline") == 1 and _overlaps(deployment):
            self._say(
                (*at, "user_config", "overlap"),
                f"true: {tensor} ranks of one stage (tensor_parallel: {tensor}, pipeline_parallel: "
                "1) plan each step after the last one; leave it out, or let the replica be one "
                "rank, or set pipeline_parallel: 2 or more, whose stages have a plan each under "
                "way without it",
            )
        for name in ("placement_group_bundles", "placement_group_strategy"):
            if deployment.get(name) is not None:
                self._say(
                    (*at, name),
                    f"a replica with tensor_parallel or pipeline_parallel gets its own {name}; "
                    "leave it out",
                )
        options = deployment.get("ray_actor_options") or {}
        if memory := options.get("memory"):
            self._say(
                (*at, "ray_actor_options", "memory"),
                f"{memory}: a replica with ranks runs in a placement group whose first bundle has "
                "CPUs alone, so this one would never start; the ranks hold the model: leave it "
                "out, and limit KV by kv_memory_bytes in args",
            )
        cpus = options.get("num_cpus") or 0
        if isinstance(cpus, (int, float)) and cpus > REPLICA_CPUS:
            self._say(
                (*at, "ray_actor_options", "num_cpus"),
                f"{cpus}: of a replica with ranks, itself, which computes nothing: at most "
                f"{REPLICA_CPUS:g}; ranks have theirs beside it",
            )

    def _model_application(self, application: dict[str, Any], at: Location) -> None:
        if application.get("route_prefix", "/") is not None:
            self._say(
                (*at, "route_prefix"),
                f"{application.get('route_prefix', '/')!r}: a model has no HTTP of its own, the "
                "gateway talks to it; write route_prefix: null",
            )
        variables = (application.get("runtime_env") or {}).get("env_vars") or {}
        for name in _NO_INGRESS:
            if variables.get(name) != "0":
                self._say(
                    (*at, "runtime_env", "env_vars", name),
                    f'{variables.get(name)!r}: must be "0" for a model, or its root deployment '
                    "opens a port of its own on every interface",
                )
        source = application["args"].get("source")
        if isinstance(source, str) and ":" not in source:
            # Replicas run elsewhere: a path is meant relative to the file that names it.
            path = self.beside / Path(source).expanduser()
            if path.exists():
                application["args"]["source"] = str(path.absolute())

    def _routes_of_gateways(self) -> None:
        names = [application["name"] for application in self.data["applications"]]
        for index, application in enumerate(self.data["applications"]):
            for number, deployment in enumerate(application.get("deployments") or []):
                if deployment["name"] != "Gateway":
                    continue
                models = (deployment.get("user_config") or {}).get("models")
                for i, model in enumerate(models if isinstance(models, list) else []):
                    app = model.get("app") if isinstance(model, dict) else None
                    if isinstance(app, str) and app not in names:
                        at = ("applications", index, "deployments", number, "user_config")
                        self._say(
                            (*at, "models", i, "app"),
                            f"{app!r}: no application of that name in this file"
                            f"{_did_you_mean(app, names)}",
                        )


# Words


def _split(path: str) -> tuple[str, str]:
    """Module and attribute of an import path, which may be written with a colon or a dot."""
    module, colon, attribute = path.partition(":")
    if not colon:
        module, _, attribute = path.rpartition(".")
    return module, attribute


def _dotted(location: Location) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text or "the file"


def _unknown(key: Any, known: Sequence[str]) -> str:
    return f"unknown key{_did_you_mean(str(key), known)}"


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    lowered = {candidate.lower(): candidate for candidate in known}
    if near := difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.5):
        return f"; did you mean {lowered[near[0]]!r}?"
    return f"; there are {', '.join(sorted(known))}" if known else ""


def _nearest_module(module: str) -> str:
    ours = {path.partition(":")[0] for path in BUILDERS}
    near = difflib.get_close_matches(module, ours, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


# Types


def _child(value: Any, part: str | int) -> tuple[bool, Any]:
    """Whether there is such a key or index in `value`, and what is there."""
    if isinstance(value, dict):
        return (True, value[part]) if part in value else (False, None)
    if isinstance(value, list) and isinstance(part, int) and part < len(value):
        return True, value[part]
    return False, None


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The pydantic models a mapping under this annotation may be."""
    from pydantic import BaseModel

    found = [m for m in _members(annotation) if isinstance(m, type) and issubclass(m, BaseModel)]
    return found[:1]


def _field_annotations(model: type[BaseModel]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        if field.alias:
            fields[field.alias] = field.annotation
        if not field.alias or model.model_config.get("populate_by_name"):
            fields[name] = field.annotation
    return fields


def _items(annotation: Any) -> Iterator[Any]:
    for member in _members(annotation):
        if get_origin(member) in (list, tuple, set, frozenset, Sequence):
            yield from (inner for inner in get_args(member)[:1])


def _mapping_values(annotation: Any) -> Iterator[Any]:
    for member in _members(annotation):
        if get_origin(member) in (dict, Mapping) and len(get_args(member)) == 2:
            yield get_args(member)[1]


def _members(annotation: Any) -> Iterator[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _members(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    else:
        yield annotation


def _has_own_code(runtime_env: Mapping[str, Any]) -> bool:
    """Whether the code comes with the runtime environment, so that we cannot look into it."""
    return any(runtime_env.get(k) for k in ("working_dir", "py_modules", "pip", "uv", "conda"))


def _names_in(spec: importlib.machinery.ModuleSpec) -> set[str] | None:
    """Names bound at the top of a module, read from its source; None if that cannot be known.

    Reading, not importing: an application's module may load a model when it is imported.
    """
    if not spec.origin or not spec.origin.endswith(".py"):
        return None
    try:
        tree = ast.parse(Path(spec.origin).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None  # Serve will say what is wrong with the code itself.
    names: set[str] = set()
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue  # What is bound inside is not the module's.
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            if node.name == "*":
                return None
            names.add((node.asname or node.name).partition(".")[0])
        waiting.extend(ast.iter_child_nodes(node))
    return None if "__getattr__" in names else names
