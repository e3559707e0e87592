"""The listening side: one port, one link per peer."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from deployments.link.auth import Handshake, check_secret
from deployments.link.link import Link, LinkHandlers, LinkHooks, LinkSettings
from deployments.link.wire import CloseCode, CloseReason
from engine.errors import ConfigError

logger = logging.getLogger(__name__)

_DRAIN_S = 2.0


class LinkServer:
    """Accepts links and keeps one per peer id: a peer that connects again replaces its old link."""

    def __init__(
        self,
        secret: bytes,
        role: str,
        own_id: str,
        *,
        handlers: LinkHandlers,
        host: str = "127.0.0.1",
        advertise_host: str | None = None,
        ports: Sequence[int] | None = None,
        settings: LinkSettings | None = None,
    ) -> None:
        """`host` is what to bind, `advertise_host` what `address` says (default: `host`). `ports`
        are tried in order; None lets the system choose. Raises ConfigError for a short secret."""
        check_secret(secret)
        self._secret = secret
        self._role = role
        self._own_id = own_id
        self._handlers = handlers
        self._host = host
        self._advertise_host = advertise_host or host
        self._ports = ports
        self._settings = settings or LinkSettings()
        self._hooks = LinkHooks(opened=self._opened, ended=self._ended)
        self._server: asyncio.Server | None = None
        self._address: str | None = None
        self._links: dict[str, Link] = {}
        self._unproven: dict[Link, None] = {}  # in order of arrival

    @property
    def address(self) -> str:
        """`host:port` for others to dial."""
        assert self._address is not None, "the server is not started"
        return self._address

    @property
    def links(self) -> Mapping[str, Link]:
        """Open links by peer id."""
        return MappingProxyType(self._links)

    async def start(self) -> None:
        """Bind. Raises ConfigError naming host and range when nothing can be bound."""
        if _is_any(self._advertise_host):
            raise ConfigError(
                f"advertise_host={self._advertise_host!r}: others cannot dial it; name the address "
                "of this node beside host"
            )
        self._server = await self._bind()
        port = self._server.sockets[0].getsockname()[1]
        host = f"[{self._advertise_host}]" if ":" in self._advertise_host else self._advertise_host
        self._address = f"{host}:{port}"

    async def close(self, detail: str = "") -> None:
        """End every link and stop listening."""
        if self._server is None:
            return
        self._server.close()
        links = [*self._links.values(), *self._unproven]
        for link in links:
            link.close(detail)
        if links:
            await asyncio.wait([link.closed for link in links], timeout=_DRAIN_S)
        await self._server.wait_closed()
        self._server = None

    async def _bind(self) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        last: OSError | None = None
        for port in self._ports if self._ports is not None else (0,):
            try:
                return await loop.create_server(self._make_link, self._host, port)
            except OSError as error:
                last = error
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    break
        ports = self._ports
        span = "any port" if ports is None else "an empty range of ports"
        if ports:
            span = f"ports {min(ports)} to {max(ports)}"
        raise ConfigError(
            f"the link server of {self._role} {self._own_id!r} cannot listen on {self._host} with "
            f"{span}: {last or 'no port to try'}. Widen the range or free a port in it; each "
            "replica on a node needs one, and each model's two queues"
        ) from last

    def _make_link(self) -> Link:
        link = Link(
            Handshake(self._secret, self._role, self._own_id, client=False),
            self._handlers,
            self._settings,
            self._hooks,
        )
        if len(self._unproven) >= self._settings.max_unauthenticated:
            # The oldest goes: a real peer proves itself within milliseconds, so it is a stranger's.
            oldest = next(iter(self._unproven))
            del self._unproven[oldest]
            oldest.end(
                CloseReason(
                    CloseCode.BUSY,
                    f"at most {self._settings.max_unauthenticated} unproven connections are held",
                )
            )
        self._unproven[link] = None
        return link

    def _opened(self, link: Link) -> None:
        self._unproven.pop(link, None)
        old = self._links.get(link.peer_id)
        if old is not None:
            old.supersede(CloseReason(CloseCode.REPLACED, f"{link.peer_id!r} connected again"))
        self._links[link.peer_id] = link

    def _ended(self, link: Link) -> None:
        self._unproven.pop(link, None)
        if link.peer is not None and self._links.get(link.peer_id) is link:
            del self._links[link.peer_id]


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == ""
