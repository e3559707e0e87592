"""What the command line raises on purpose. `main` prints each as one `error: ...` line.

EngineError
├── ConfigError     the file cannot work
└── ClusterError    the machine or the running system is at fault
    ├── PortBusy    somebody else listens where we must
    ├── DeployFailed    an application does not come up; carries the replica's own words
    └── NotRunning      there is nothing to talk to                               (exit code 3)
"""

from __future__ import annotations

from engine.errors import EngineError


class ClusterError(EngineError):
    """The machine or the running system is at fault, not the configuration."""

    exit_code = 1


class PortBusy(ClusterError):
    """A port we must listen on is taken."""


class DeployFailed(ClusterError):
    """Serve gave up on an application, or a replica reports why it cannot start."""


class NotRunning(ClusterError):
    """No session of ours is running."""

    exit_code = 3
