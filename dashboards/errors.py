"""What goes wrong with dashboards.

EngineError
└── DashboardError           base of these
    ├── CheckFailed          a board or rule names what does not exist, or is no valid JSON
    ├── ExtraMissing         the packages that this needs are not installed
    └── GrafanaError         provisioning stopped
        ├── GrafanaUnreachable   nobody answers there, or too late
        ├── GrafanaDenied        no token, a wrong one, or one that may not do this
        └── GrafanaRejected      it answered with anything else than success
"""

from __future__ import annotations

from engine.errors import EngineError


class DashboardError(EngineError):
    """Base."""


class CheckFailed(DashboardError):
    """A dashboard or rule is wrong. `findings` has one line each."""

    def __init__(self, findings: list[str]) -> None:
        super().__init__("\n".join(findings))
        self.findings = findings


class ExtraMissing(DashboardError):
    """A package of the extra `dashboards` is not there."""

    def __init__(self, package: str) -> None:
        super().__init__(
            f"{package} is not installed: pip install 'tailrace[dashboards]' (see "
            "dashboards/README.md about urllib3)"
        )


class GrafanaError(DashboardError):
    """Grafana did not take something. What came before it is in place; running again goes on."""


class GrafanaUnreachable(GrafanaError):
    """No answer."""


class GrafanaDenied(GrafanaError):
    """401 or 403."""


class GrafanaRejected(GrafanaError):
    """An answer that is no success. `status` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
