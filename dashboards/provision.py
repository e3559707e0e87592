"""Put everything into a running Grafana: folder, data source, dashboards, alert rules.

Running it again changes what differs and nothing else. What it finds in its folder under its own
uids is replaced, what others put there stays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

from dashboards.alerts import alerts
from dashboards.errors import (
    ExtraMissing,
    GrafanaDenied,
    GrafanaError,
    GrafanaRejected,
    GrafanaUnreachable,
)
from dashboards.everything import FOLDER_TITLE, FOLDER_UID, checked
from dashboards.grafana_alerts import rule_group, rule_uid
from dashboards.rules import RUNBOOK

DATASOURCE_UID = "tailrace-prometheus"
DATASOURCE_NAME = "Tailrace Prometheus"
TIMEOUT_S = 10.0

_T = TypeVar("_T")


@dataclass(slots=True)
class Changes:
    """What a push did. Each item as `kind name`."""

    created: list[str] = field(default_factory=list[str])
    updated: list[str] = field(default_factory=list[str])
    unchanged: list[str] = field(default_factory=list[str])
    removed: list[str] = field(default_factory=list[str])

    def note(self, before: Any, after: Any, item: str) -> bool:
        """Sort `item` in; True when there is something to write."""
        if before is None:
            self.created.append(item)
        elif before == after:
            self.unchanged.append(item)
        else:
            self.updated.append(item)
        return before != after


class Grafana:
    """One Grafana, through grafana-client. Every method raises GrafanaError.

    Holds connections: use it in `with`, or `close` it.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        password: tuple[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`token` is a service account's; `password` a user and password instead. Raises
        GrafanaDenied when both are missing, ExtraMissing without grafana-client."""
        try:
            from grafana_client import client
            from grafana_client.api import GrafanaApi
        except ImportError:
            raise ExtraMissing("grafana-client") from None
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise GrafanaError(f"Grafana's URL {url!r}: must be like https://grafana.example.org")
        if not token and password is None:
            raise GrafanaDenied(
                "no token for Grafana: make a service account with the role Editor (Admin, if it "
                "is to add the data source) and put its token into GRAFANA_TOKEN"
            )
        self.url = url
        self._errors = client
        self._api = GrafanaApi(
            auth=token or password,
            host=parts.hostname if ":" not in parts.hostname else f"[{parts.hostname}]",
            port=parts.port,
            url_path_prefix=f"{parts.path.strip('/')}/".lstrip("/"),
            protocol=parts.scheme,
            timeout=timeout_s,
        )

    def __enter__(self) -> Grafana:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End its connections."""
        self._api.client.s.close()

    def push(
        self,
        *,
        prometheus_url: str | None = None,
        datasource_uid: str = DATASOURCE_UID,
        folder_uid: str = FOLDER_UID,
        runbook: str = RUNBOOK,
    ) -> Changes:
        """Make everything as it is in the code.

        `prometheus_url` is Prometheus as Grafana reaches it; None uses the data source that has
        `datasource_uid` already. Raises CheckFailed before anything is written.
        """
        values = checked()
        changes = Changes()
        self.check_access()
        self._datasource(changes, prometheus_url, datasource_uid)
        self._folder(changes, folder_uid)
        for value in values:
            self._dashboard(changes, value, folder_uid, datasource_uid)
        self._alert_rules(changes, folder_uid, datasource_uid, runbook)
        return changes

    def check_access(self) -> None:
        """Ask for what needs a valid token."""
        self._call("its settings", self._api.health.check)

    def _datasource(self, changes: Changes, url: str | None, uid: str) -> None:
        before = self._find(
            f"data source {uid}", lambda: self._api.datasource.get_datasource_by_uid(uid)
        )
        if url is None:
            if before is None:
                raise GrafanaRejected(
                    f"Grafana has no data source {uid!r}: give the URL of Prometheus to add one, "
                    "or the uid of the one to use",
                    404,
                )
            return
        wanted: dict[str, Any] = {
            "uid": uid,
            "name": DATASOURCE_NAME if uid == DATASOURCE_UID else uid,
            "type": "prometheus",
            "access": "proxy",
            "url": url,
            "jsonData": {"httpMethod": "POST", "timeInterval": "15s"},
        }
        known = before and {key: before.get(key) for key in wanted}
        if changes.note(known, wanted, f"data source {uid}"):
            api = self._api.datasource
            if before is None:
                self._call(f"data source {uid}", lambda: api.create_datasource(wanted))
            else:
                self._call(
                    f"data source {uid}",
                    lambda: api.update_datasource_by_uid(uid, {**before, **wanted}),
                )

    def _folder(self, changes: Changes, uid: str) -> None:
        api, item = self._api.folder, f"folder {uid}"
        before = self._find(item, lambda: api.get_folder(uid))
        if changes.note(before and before.get("title"), FOLDER_TITLE, item):
            if before is None:
                self._call(item, lambda: api.create_folder(FOLDER_TITLE, uid))
            else:
                self._call(item, lambda: api.update_folder(uid, FOLDER_TITLE, overwrite=True))

    def _dashboard(
        self, changes: Changes, value: dict[str, Any], folder_uid: str, datasource_uid: str
    ) -> None:
        uid = value["uid"]
        item, api = f"dashboard {uid}", self._api.dashboard
        value = _with_datasource(value, datasource_uid)
        found = self._find(item, lambda: api.get_dashboard(uid))
        before = None
        if found is not None:
            # Grafana numbers what it stores; the rest comes back as it was sent.
            stored = {k: v for k, v in found["dashboard"].items() if k not in ("id", "version")}
            before = (found.get("meta", {}).get("folderUid"), stored)
        if changes.note(before, (folder_uid, value), item):
            body = {
                "dashboard": {**value, "id": None},
                "folderUid": folder_uid,
                "overwrite": True,
                "message": "tailrace dashboards push",
            }
            self._call(item, lambda: api.update_dashboard(body))

    def _alert_rules(
        self, changes: Changes, folder_uid: str, datasource_uid: str, runbook: str
    ) -> None:
        api = self._api.alertingprovisioning
        rules = self._call("alert rules", api.get_alertrules_all)
        ours = {rule["uid"]: rule for rule in rules if rule.get("folderUID") == folder_uid}
        wanted_uids: set[str] = set()
        for group in alerts():
            wanted = rule_group(
                group, folder_uid=folder_uid, datasource_uid=datasource_uid, runbook=runbook
            )
            item = f"alert rules {group.name}"
            uids = [rule_uid(alert) for alert in group.alerts]
            wanted_uids.update(uids)
            name = group.name
            found = self._find(item, lambda name=name: api.get_rule_group(folder_uid, name))
            if changes.note(found and _as_sent(found, wanted), wanted, item):
                self._call(
                    item,
                    lambda name=name, wanted=wanted: api.update_rule_group(
                        folder_uid, name, wanted, disable_provenance=True
                    ),
                )
        groups = {group.name for group in alerts()}
        for uid, rule in ours.items():
            # A rule of ours that was renamed or dropped. What others keep here has other groups.
            if uid.startswith("tailrace") and uid not in wanted_uids:
                if rule.get("ruleGroup") not in groups:  # else the group's own update removed it
                    self._call(f"alert rule {uid}", lambda uid=uid: api.delete_alertrule(uid))
                changes.removed.append(f"alert rule {uid}")

    def _find(self, what: str, ask: Callable[[], _T]) -> _T | None:
        """None for what is not there."""
        try:
            return self._call(what, ask)
        except GrafanaRejected as error:
            if error.status == 404:
                return None
            raise

    def _call(self, what: str, ask: Callable[[], _T]) -> _T:
        errors = self._errors
        try:
            return ask()
        except errors.GrafanaTimeoutError:
            raise GrafanaUnreachable(
                f"Grafana at {self.url} did not answer in time ({what}): try again"
            ) from None
        except errors.GrafanaException as error:
            status, said = error.status_code, error.message
            if status == 401:
                raise GrafanaDenied(
                    f"Grafana at {self.url} does not know this token ({what}): it may have "
                    "expired; make a new one and put it into GRAFANA_TOKEN"
                ) from None
            if status == 403:
                raise GrafanaDenied(
                    f"Grafana at {self.url} does not allow this token to touch {what}: give its "
                    f"service account the role Editor, or Admin for data sources ({said})"
                ) from None
            raise GrafanaRejected(
                f"Grafana at {self.url} did not take {what}: {said}", status
            ) from None
        except OSError as error:  # niquests' own errors are OSErrors
            raise GrafanaUnreachable(
                f"nothing answers at {self.url} ({what}): start Grafana or correct the URL "
                f"({error})"
            ) from None
        except ValueError as error:
            raise GrafanaRejected(
                f"what answers at {self.url} is not Grafana ({what}: no JSON): correct the URL, "
                "with the path if it is served below one",
                200,
            ) from error


def _with_datasource(value: dict[str, Any], uid: str) -> dict[str, Any]:
    """The dashboard with `uid` chosen; without it Grafana takes the first of its kind."""
    variables = [
        {**variable, "current": {"selected": True, "text": uid, "value": uid}}
        if variable["name"] == "datasource"
        else variable
        for variable in value["templating"]["list"]
    ]
    return {**value, "templating": {**value["templating"], "list": variables}}


def _as_sent(stored: Any, sent: Any) -> Any:
    """What was stored without what Grafana adds to it, so that it equals `sent` if it says the
    same. Labels and annotations are compared whole: Grafana adds none."""
    if isinstance(stored, dict) and isinstance(sent, dict):
        return {
            key: stored[key] if key in ("annotations", "labels") else _as_sent(stored[key], value)
            for key, value in sent.items()
            if key in stored
        }
    if isinstance(stored, list) and isinstance(sent, list) and len(stored) == len(sent):
        return [_as_sent(a, b) for a, b in zip(stored, sent, strict=True)]
    return stored
