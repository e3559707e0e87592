"""Where the applications find the running set and the router that keeps it (see `router`)."""

from __future__ import annotations

from deployments.routing.directory import Directory, Replicas
from deployments.routing.router import DirectoryRouter, ReplicaGone

__all__ = ["Directory", "DirectoryRouter", "ReplicaGone", "Replicas"]
