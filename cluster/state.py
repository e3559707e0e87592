"""What outlives one command: the state directory, its secrets and the record of the session.

```
TAILRACE_HOME (0700)
├── link.secret     0600   proves to each end of a link that the other belongs to this cluster
├── ray.token       0600   the same for Ray's own ports
├── session.json    0600   the session that runs, if one does
├── up.lock                held by the `tailrace up` that is starting a session
└── logs/SESSION/          kept when a start fails
```
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cluster.errors import ClusterError

HOME_VARIABLE = "TAILRACE_HOME"
SESSION_VARIABLE = "TAILRACE_SESSION"
SECRET_VARIABLE = "TAILRACE_LINK_SECRET_FILE"

_RECORD_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One session: where it listens, which process leads it, where its files are."""

    session: str
    """Marks every process of the session through its environment."""

    head_pid: int
    head_started: float
    """Creation time of the head process, Unix seconds: tells it from a later owner of its pid."""

    host: str
    port: int
    """Where clients connect."""

    dashboard_port: int
    gcs_port: int
    stats_port: int
    """HAProxy's own statistics. 0 where Serve's Python proxy is in front."""

    metrics_port: int
    """Ray's metrics in Prometheus text, for this node."""

    temp_dir: str
    """Ray's and HAProxy's files. Removed when the session ends."""

    config: str
    """The file that was served first."""

    code_dir: str | None
    """Directory beside that file from which its applications are imported."""

    started_at: float
    """Unix seconds."""

    version: int = field(default=_RECORD_VERSION)

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.host in ("", "0.0.0.0", "::", "localhost") else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def dashboard_url(self) -> str:
        return f"http://127.0.0.1:{self.dashboard_port}"

    @property
    def ray_address(self) -> str:
        return f"127.0.0.1:{self.gcs_port}"

    @property
    def head_log(self) -> str:
        return os.path.join(self.temp_dir, "head.log")

    @property
    def log_dir(self) -> str:
        return os.path.join(self.temp_dir, "ray", "session_latest", "logs")


class StateDir:
    """The state directory, created on first use.

    Raises:
        ClusterError: it cannot be created, or others may read it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            mode = path.stat().st_mode & 0o777
            if mode & 0o077:
                path.chmod(0o700)
        except OSError as error:
            raise ClusterError(
                f"state directory {path}: {error.strerror or error}; "
                f"set {HOME_VARIABLE} to a directory of yours"
            ) from error

    @classmethod
    def from_environment(cls) -> StateDir:
        """`TAILRACE_HOME`, else the platform's state directory for this user."""
        if home := os.environ.get(HOME_VARIABLE):
            return cls(Path(home).expanduser().absolute())
        import platformdirs

        return cls(Path(platformdirs.user_state_dir("tailrace", appauthor=False)))

    def link_secret(self) -> Path:
        """The file with the links' secret (64 hexadecimal digits), created once."""
        return self._secret("link.secret")

    def ray_token(self) -> Path:
        """The file with Ray's authentication token, created once."""
        return self._secret("ray.token")

    def logs(self, session: str) -> Path:
        return self.path / "logs" / session

    def load(self) -> Record | None:
        """The recorded session, or None.

        Raises:
            ClusterError: a record is there and cannot be read.
        """
        path = self.path / "session.json"
        try:
            values = json.loads(path.read_text())
            if values.get("version") != _RECORD_VERSION:
                raise ValueError(f"version {values.get('version')!r}, want {_RECORD_VERSION}")
            return Record(**values)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ClusterError(
                f"{path}: not a session record ({error}); "
                "`tailrace down` ends what is left of the session and removes it"
            ) from error

    def save(self, record: Record) -> None:
        self._write("session.json", json.dumps(dataclasses.asdict(record), indent=1) + "\n")

    def forget(self) -> None:
        (self.path / "session.json").unlink(missing_ok=True)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Held while a session starts or changes.

        Raises:
            ClusterError: another `tailrace up` of this state directory holds it.
        """
        path = self.path / "up.lock"
        with open(path, "a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                lock.seek(0)
                raise ClusterError(
                    f"another `tailrace up` (pid {lock.read().strip() or 'unknown'}) is at work "
                    f"in {self.path}; wait for it, or end it with `tailrace down`"
                ) from error
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            yield

    def _secret(self, name: str) -> Path:
        path = self.path / name
        if not path.exists():
            # Linked into place: of two commands that start at once, both read the one that won.
            written = self._temporary(secrets.token_hex(32))
            try:
                os.link(written, path)
            except FileExistsError:
                pass
            finally:
                os.unlink(written)
        if path.stat().st_mode & 0o077:
            path.chmod(0o600)
        return path

    def _write(self, name: str, text: str) -> None:
        os.replace(self._temporary(text), self.path / name)

    def _temporary(self, text: str) -> str:
        handle, written = tempfile.mkstemp(dir=self.path, prefix=".new-")  # mode 0600
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        return written
