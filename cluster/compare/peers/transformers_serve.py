"""transformers behind plain Ray Serve, as a side."""

from __future__ import annotations

from dataclasses import replace

import yaml

from cluster import config as configuration
from cluster.compare.peers import PeerOptions
from cluster.compare.peers.model import dtype_of, hugging_face_directory, model_of
from cluster.compare.ready import Variant
from cluster.compare.sides import ConfigSide
from cluster.config import ServeConfig


def transformers_side(config: ServeConfig, options: PeerOptions) -> ConfigSide:
    """One replica that has all threads. Raises ConfigError."""
    model = model_of(config)
    data = {
        "http_options": {"host": "127.0.0.1", "port": config.port},
        "applications": [
            {
                "name": "plain",
                "import_path": "cluster.compare.peers.plain:build",
                "route_prefix": "/",
                "args": {
                    "name": model.name,
                    "directory": str(hugging_face_directory(model, options)),
                    "dtype": dtype_of(model),
                    "threads": model.threads,
                },
                "deployments": [
                    {
                        "name": "Plain",
                        "num_replicas": 1,
                        "max_ongoing_requests": 1000,
                        "ray_actor_options": {"num_cpus": 1},
                    }
                ],
            }
        ],
    }
    document = configuration.parse(yaml.safe_dump(data), source="transformers behind Ray Serve")
    checked = configuration.check(document, beside=configuration.DEFAULT_PATH.parent)
    return ConfigSide(
        Variant(
            name="transformers",
            config=replace(checked, code_dir=None),
            changes=(f"{model.threads} threads, {dtype_of(model)}, the same weights",),
        )
    )
