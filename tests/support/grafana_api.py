"""An HTTP server that keeps the part of Grafana 11's API contract which provisioning uses.

Tokens with roles, folders, data sources, dashboards with versions, alert rules with the checks that
Grafana makes before it stores one, and what it adds when it gives one back. Kept in memory.
"""

from __future__ import annotations

import copy
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ADMIN, EDITOR, VIEWER = "token-of-an-admin", "token-of-an-editor", "token-of-a-viewer"
_ROLES = {ADMIN: "Admin", EDITOR: "Editor", VIEWER: "Viewer"}
_UID = re.compile(r"[a-zA-Z0-9_-]{1,40}")
_DURATION = re.compile(r"([0-9]+(ms|[smhdwy]))+")
SCHEDULER_S = 10
"""Grafana evaluates rules at multiples of this."""


class Refused(Exception):
    """An answer other than success."""

    def __init__(self, status: int, message: str, **more: Any) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"message": message, **more}


class FakeGrafana:
    """The state, and one method a route."""

    def __init__(self) -> None:
        self.url = ""
        self.folders: dict[str, dict[str, Any]] = {}
        self.datasources: dict[str, dict[str, Any]] = {}
        self.dashboards: dict[str, dict[str, Any]] = {}
        self.rules: dict[str, dict[str, Any]] = {}
        self.intervals: dict[tuple[str, str], int] = {}
        self.log: list[tuple[str, str]] = []
        """`(method, path)` of every request that was let in."""

        self.fail_with: int | None = None
        """Answer everything with this status from now on."""

        self._ids = 0

    @property
    def writes(self) -> list[tuple[str, str]]:
        return [(method, path) for method, path in self.log if method != "GET"]

    def answer(self, method: str, path: str, headers: Any, body: Any) -> tuple[int, Any]:
        """Status and JSON of one request. `body` is None without one."""
        if self.fail_with is not None:
            raise Refused(self.fail_with, "something is wrong inside")
        role = self._role(headers)
        self.log.append((method, path))
        for pattern, methods in _ROUTES:
            match = re.fullmatch(pattern, path)
            if match is None:
                continue
            if method not in methods:
                raise Refused(405, "Method not allowed")
            handler, needed = methods[method]
            if (needed == "Admin" and role != "Admin") or (needed == "Editor" and role == "Viewer"):
                raise Refused(
                    403,
                    "You'll need additional permissions to perform this action.",
                    title="Access denied",
                )
            return handler(self, *match.groups(), **_arguments(method, body, headers))
        raise Refused(404, "Not found")

    def _role(self, headers: Any) -> str:
        kind, _, token = headers.get("Authorization", "").partition(" ")
        if not token:
            raise Refused(401, "Unauthorized")
        if kind != "Bearer" or token not in _ROLES:
            raise Refused(401, "Invalid API key")
        return _ROLES[token]

    def _next_id(self) -> int:
        self._ids += 1
        return self._ids

    def settings(self) -> tuple[int, Any]:
        return 200, {"buildInfo": {"version": "11.6.0", "commit": "abc", "edition": "Open Source"}}

    # Folders

    def get_folder(self, uid: str) -> tuple[int, Any]:
        return 200, _found(self.folders, uid, "folder not found")

    def create_folder(self, body: dict[str, Any]) -> tuple[int, Any]:
        title, uid = body.get("title"), body.get("uid") or f"made-{self._next_id()}"
        if not title:
            raise Refused(400, "folder title cannot be empty")
        _check_uid(uid)
        if uid in self.folders:
            raise Refused(409, "a folder already exists with this uid", status="name-exists")
        self.folders[uid] = {
            "id": self._next_id(),
            "uid": uid,
            "title": title,
            "url": f"/dashboards/f/{uid}/",
            "version": 1,
        }
        return 200, self.folders[uid]

    def update_folder(self, uid: str, body: dict[str, Any]) -> tuple[int, Any]:
        folder = _found(self.folders, uid, "folder not found")
        if not body.get("overwrite") and body.get("version") != folder["version"]:
            raise Refused(
                412, "the folder has been changed by someone else", status="version-mismatch"
            )
        folder["title"] = body.get("title") or folder["title"]
        folder["version"] += 1
        return 200, folder

    # Data sources

    def get_datasource(self, uid: str) -> tuple[int, Any]:
        return 200, _found(self.datasources, uid, "Data source not found")

    def create_datasource(self, body: dict[str, Any]) -> tuple[int, Any]:
        for key in ("name", "type", "access"):
            if not body.get(key):
                raise Refused(400, "bad request data")
        uid = body.get("uid") or f"made-{self._next_id()}"
        _check_uid(uid)
        names = {source["name"] for source in self.datasources.values()}
        if uid in self.datasources or body["name"] in names:
            raise Refused(409, "data source with the same name already exists")
        self.datasources[uid] = self._datasource({**body, "uid": uid}, self._next_id(), 1)
        source = self.datasources[uid]
        return 200, {
            "datasource": source,
            "id": source["id"],
            "message": "Datasource added",
            "name": source["name"],
        }

    def update_datasource(self, uid: str, body: dict[str, Any]) -> tuple[int, Any]:
        before = _found(self.datasources, uid, "Data source not found")
        if before["readOnly"]:
            raise Refused(403, "Cannot update read-only data source")
        if "version" in body and body["version"] != before["version"]:
            raise Refused(409, "Datasource has already been updated by someone else")
        updated = self._datasource({**body, "uid": uid}, before["id"], before["version"] + 1)
        self.datasources[uid] = updated
        return 200, {"datasource": updated, "id": updated["id"], "message": "Datasource updated"}

    def _datasource(self, body: dict[str, Any], number: int, version: int) -> dict[str, Any]:
        return {
            "orgId": 1,
            "typeLogoUrl": "public/app/plugins/datasource/prometheus/img/logo.svg",
            "user": "",
            "basicAuth": False,
            "isDefault": False,
            "readOnly": False,
            "jsonData": {},
            "secureJsonFields": {},
            **body,
            "id": number,
            "version": version,
        }

    # Dashboards

    def get_dashboard(self, uid: str) -> tuple[int, Any]:
        kept = _found(self.dashboards, uid, "Dashboard not found")
        meta = {
            "type": "db",
            "slug": uid,
            "url": f"/d/{uid}/{uid}",
            "version": kept["dashboard"]["version"],
            "folderUid": kept["folderUid"],
            "provisioned": False,
        }
        return 200, {"meta": meta, "dashboard": kept["dashboard"]}

    def save_dashboard(self, body: dict[str, Any]) -> tuple[int, Any]:
        dashboard = body.get("dashboard")
        if not isinstance(dashboard, dict):
            raise Refused(400, "bad request data")
        if not dashboard.get("title"):
            raise Refused(400, "Dashboard title cannot be empty", status="empty-name")
        uid = dashboard.get("uid") or f"made-{self._next_id()}"
        _check_uid(uid)
        folder = body.get("folderUid", "")
        if folder and folder not in self.folders:
            raise Refused(400, "folder not found")
        before = self.dashboards.get(uid)
        if dashboard.get("id") is not None and (
            before is None or before["dashboard"]["id"] != dashboard["id"]
        ):
            raise Refused(404, "Dashboard not found", status="not-found")
        version = 1
        if before is not None:
            version = before["dashboard"]["version"] + 1
            if not body.get("overwrite") and dashboard.get("version") != version - 1:
                raise Refused(
                    412,
                    "The dashboard has been changed by someone else",
                    status="version-mismatch",
                )
        number = before["dashboard"]["id"] if before else self._next_id()
        stored = {**copy.deepcopy(dashboard), "id": number, "uid": uid, "version": version}
        self.dashboards[uid] = {"dashboard": stored, "folderUid": folder}
        return 200, {
            "id": number,
            "uid": uid,
            "url": f"/d/{uid}/{uid}",
            "status": "success",
            "version": version,
            "slug": uid,
            "folderUid": folder,
        }

    # Alert rules

    def get_rules(self) -> tuple[int, Any]:
        return 200, list(self.rules.values())

    def delete_rule(self, uid: str) -> tuple[int, Any]:
        self.rules.pop(uid, None)
        return 204, None

    def get_group(self, folder: str, group: str) -> tuple[int, Any]:
        rules = [
            r for r in self.rules.values() if (r["folderUID"], r["ruleGroup"]) == (folder, group)
        ]
        if not rules:
            raise Refused(404, "rule group not found")
        interval = self.intervals[folder, group]
        return 200, {"title": group, "folderUid": folder, "interval": interval, "rules": rules}

    def put_group(
        self, folder: str, group: str, body: dict[str, Any], provenance: str
    ) -> tuple[int, Any]:
        if folder not in self.folders:
            raise Refused(400, "invalid alert rule: folder does not exist")
        interval = body.get("interval", 0)
        if interval <= 0 or interval % SCHEDULER_S:
            raise Refused(
                400,
                f"invalid alert rule: interval ({interval}s) should be non-zero and divided "
                f"exactly by scheduler interval: {SCHEDULER_S}",
            )
        stored: dict[str, dict[str, Any]] = {}
        for rule in body["rules"]:
            rule = {**rule, "folderUID": folder, "ruleGroup": group}
            stored[rule["uid"]] = self._rule(rule, provenance)
        titles = [rule["title"] for rule in stored.values()]
        others = [
            rule["title"]
            for uid, rule in self.rules.items()
            if rule["folderUID"] == folder and uid not in stored and rule["ruleGroup"] != group
        ]
        if len(set(titles)) < len(titles) or set(titles) & set(others):
            raise Refused(400, "a conflicting alert rule is found: title must be unique in folder")
        for uid, rule in list(self.rules.items()):
            if (rule["folderUID"], rule["ruleGroup"]) == (folder, group) or uid in stored:
                del self.rules[uid]  # a group keeps the order it was given in
        self.rules.update(stored)
        self.intervals[folder, group] = interval
        return 200, body

    def _rule(self, rule: dict[str, Any], provenance: str) -> dict[str, Any]:
        """Checked, and with what Grafana adds."""

        def wrong(why: str) -> Refused:
            return Refused(400, f"invalid alert rule: {why}")

        unknown = set(rule) - {
            *("id", "uid", "orgID", "folderUID", "ruleGroup", "title", "condition", "data"),
            *("updated", "noDataState", "execErrState", "for", "annotations", "labels"),
            *("provenance", "isPaused", "notification_settings", "record", "keep_firing_for"),
        }
        if unknown:
            raise wrong(f"unknown fields {sorted(unknown)}")
        _check_uid(rule["uid"])
        if not 0 < len(rule["title"]) <= 190 or not 0 < len(rule["ruleGroup"]) <= 190:
            raise wrong("title or group is empty or too long")
        if rule["noDataState"] not in ("Alerting", "NoData", "OK", "KeepLast"):
            raise wrong(f"unknown no data state {rule['noDataState']}")
        if rule["execErrState"] not in ("Alerting", "Error", "OK", "KeepLast"):
            raise wrong(f"unknown error state {rule['execErrState']}")
        if not _DURATION.fullmatch(rule["for"]):
            raise wrong(f"not a valid duration string: {rule['for']!r}")
        for kind in ("annotations", "labels"):
            if not all(isinstance(v, str) for v in rule.get(kind, {}).values()):
                raise wrong(f"{kind} must be strings")
        refs = [query["refId"] for query in rule["data"]]
        if not refs or len(set(refs)) < len(refs):
            raise wrong("no queries, or two with one refID")
        if rule["condition"] not in refs:
            raise wrong(f"condition {rule['condition']} does not exist, must be one of {refs}")
        for query in rule["data"]:
            source, span = query["datasourceUid"], query["relativeTimeRange"]
            if source != "__expr__" and source not in self.datasources:
                raise wrong(f"data source {source} not found")
            if source != "__expr__" and not span["from"] > span["to"] >= 0:
                raise wrong("the time range is empty")
            if query["model"].get("refId") != query["refId"]:
                raise wrong("refId of the model differs")
        before = self.rules.get(rule["uid"])
        data = [
            {
                "queryType": "",
                **query,
                "model": {"intervalMs": 1000, "maxDataPoints": 43200, **query["model"]},
            }
            for query in rule["data"]
        ]
        return {
            **copy.deepcopy(rule),
            "data": data,
            "id": before["id"] if before else self._next_id(),
            "updated": "2025-01-01T00:00:00Z",
            "provenance": provenance,
            "notification_settings": None,
            "record": None,
        }


def _found(where: dict[str, Any], uid: str, message: str) -> Any:
    if uid not in where:
        raise Refused(404, message)
    return where[uid]


def _check_uid(uid: str) -> None:
    if not _UID.fullmatch(uid):
        raise Refused(400, f"uid {uid!r} contains illegal characters or is too long")


def _arguments(method: str, body: Any, headers: Any) -> dict[str, Any]:
    if method not in ("POST", "PUT"):
        return {}
    if not isinstance(body, dict):
        raise Refused(400, "bad request data")
    provenance = "" if "X-Disable-Provenance" in headers else "api"
    return {"body": body, "provenance": provenance} if "rules" in body else {"body": body}


_GRAFANA = FakeGrafana
_ROUTES: list[tuple[str, dict[str, tuple[Any, str]]]] = [
    ("/api/frontend/settings", {"GET": (_GRAFANA.settings, "Viewer")}),
    ("/api/folders", {"POST": (_GRAFANA.create_folder, "Editor")}),
    (
        "/api/folders/([^/]+)",
        {"GET": (_GRAFANA.get_folder, "Viewer"), "PUT": (_GRAFANA.update_folder, "Editor")},
    ),
    ("/api/datasources", {"POST": (_GRAFANA.create_datasource, "Admin")}),
    (
        "/api/datasources/uid/([^/]+)",
        {"GET": (_GRAFANA.get_datasource, "Editor"), "PUT": (_GRAFANA.update_datasource, "Admin")},
    ),
    ("/api/dashboards/db", {"POST": (_GRAFANA.save_dashboard, "Editor")}),
    ("/api/dashboards/uid/([^/]+)", {"GET": (_GRAFANA.get_dashboard, "Viewer")}),
    ("/api/v1/provisioning/alert-rules", {"GET": (_GRAFANA.get_rules, "Editor")}),
    ("/api/v1/provisioning/alert-rules/([^/]+)", {"DELETE": (_GRAFANA.delete_rule, "Editor")}),
    (
        "/api/v1/provisioning/folder/([^/]+)/rule-groups/([^/]+)",
        {"GET": (_GRAFANA.get_group, "Editor"), "PUT": (_GRAFANA.put_group, "Editor")},
    ),
]


@contextmanager
def grafana(prefix: str = "") -> Iterator[FakeGrafana]:
    """A server on a free port, below the path `prefix`."""
    state = FakeGrafana()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body in one write

        def _serve(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            raw = self.rfile.read(length)
            try:
                if not self.path.startswith(f"{prefix}/"):
                    raise Refused(404, "Not found")
                body = json.loads(raw) if raw else None
                status, value = state.answer(
                    self.command, self.path.removeprefix(prefix), self.headers, body
                )
            except Refused as refused:
                status, value = refused.status, refused.body
            text = b"" if status == 204 else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json; charset=UTF-8")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PUT = do_DELETE = _serve

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}{prefix}"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
