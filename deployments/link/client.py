"""The dialling side: one link to an address, one per address, or one kept up to a moving peer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from deployments.link.auth import Handshake, check_secret
from deployments.link.link import Link, LinkDown, LinkHandlers, LinkHooks, LinkSettings
from deployments.link.wire import CloseCode, CloseReason

logger = logging.getLogger(__name__)


def split_address(address: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port`. Raises ValueError."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdecimal():
        raise ValueError(f"{address!r} is not host:port")
    return host.strip("[]"), int(port)


async def dial(
    address: str,
    secret: bytes,
    role: str,
    own_id: str,
    handlers: LinkHandlers,
    *,
    settings: LinkSettings | None = None,
    expect_role: str | None = None,
    expect_id: str | None = None,
) -> Link:
    """Connect, prove both sides, and return the open link (`on_open` has run by then).

    `expect_id` guards against an address that was reused by another replica. Raises `LinkDown` when
    nobody answers in time and `LinkRefused` (`reason.code` says which) when the handshake fails.
    """
    settings = settings or LinkSettings()
    handshake = Handshake(secret, role, own_id, client=True)
    hooks = LinkHooks(expect_role=expect_role, expect_id=expect_id)
    loop = asyncio.get_running_loop()
    made: list[Link] = []

    def make() -> Link:
        made.append(Link(handshake, handlers, settings, hooks))
        return made[-1]

    try:
        host, port = split_address(address)
        _, link = await asyncio.wait_for(
            loop.create_connection(make, host, port), settings.connect_s
        )
    except (OSError, ValueError, asyncio.TimeoutError) as error:
        for attempt in made:
            attempt.abandon()
        why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        reason = CloseReason(CloseCode.CONNECTION_LOST, why)
        raise LinkDown(f"{address} cannot be reached: {why}", reason) from error
    try:
        await asyncio.shield(link.ready)
    except asyncio.CancelledError:
        link.close("gave up dialling")
        raise
    return link


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Waiting times after failures: `first_s`, doubled up to `max_s`, anew after a success."""

    first_s: float = 0.05
    max_s: float = 2.0

    def after(self, failures: int) -> float:
        return min(self.first_s * 2 ** min(failures - 1, 30), self.max_s)


@dataclass(slots=True)
class _Attempts:
    """What is known of one address."""

    link: Link | None = None
    dialling: asyncio.Task[Link] | None = None
    failures: int = 0
    retry_at: float = 0.0
    last: LinkDown | None = None


class Dialer:
    """One link per address, dialled when first asked for and again after it ended.

    After a failure the address rests (see `Backoff`): meanwhile `get` raises the last error at
    once, so that a caller with a choice of peers loses no time on a dead one.
    """

    def __init__(
        self,
        secret: bytes,
        role: str,
        own_id: str,
        handlers: LinkHandlers,
        *,
        settings: LinkSettings | None = None,
        expect_role: str | None = None,
        backoff: Backoff | None = None,
    ) -> None:
        check_secret(secret)
        self._secret = secret
        self._role = role
        self._own_id = own_id
        self._handlers = handlers
        self._settings = settings or LinkSettings()
        self._expect_role = expect_role
        self._backoff = backoff or Backoff()
        self._peers: dict[str, _Attempts] = {}
        self._closed = False

    async def get(self, address: str, *, expect_id: str | None = None) -> Link:
        """The open link to `address`. Concurrent callers share one attempt. Raises `LinkDown`."""
        if self._closed:
            raise LinkDown("the dialer is closed", CloseReason(CloseCode.CLOSED))
        peer = self._peers.setdefault(address, _Attempts())
        link = peer.link
        if link is None or not link.is_open:
            if peer.dialling is None:
                now = asyncio.get_running_loop().time()
                if peer.last is not None and now < peer.retry_at:
                    raise LinkDown(
                        f"{peer.last} (tried again in {peer.retry_at - now:.2f} s)",
                        peer.last.reason,
                    )
                peer.dialling = asyncio.create_task(self._dial(address, peer, expect_id))
                peer.dialling.add_done_callback(_retrieve)
            dialling = peer.dialling
            # One caller's cancellation costs the others no link, nor is it taken for the attempt's.
            await asyncio.wait({dialling})
            if dialling.cancelled():
                reason = CloseReason(CloseCode.CLOSED, "forgotten while dialling")
                raise LinkDown(f"no link to {address}: {reason}", reason)
            link = dialling.result()
        if expect_id is not None and link.peer_id != expect_id:
            reason = CloseReason(CloseCode.UNEXPECTED_PEER, f"{address} is {link.peer_id!r} now")
            raise LinkDown(f"{expect_id!r} is gone: {reason}", reason)
        return link

    def is_open(self, address: str) -> bool:
        """Whether `get` would answer without dialling."""
        peer = self._peers.get(address)
        return peer is not None and peer.link is not None and peer.link.is_open

    def forget(self, address: str, detail: str = "") -> None:
        """Close the link to `address` and what is known of it; for a peer that left the cluster."""
        peer = self._peers.pop(address, None)
        if peer is None:
            return
        if peer.dialling is not None:
            peer.dialling.cancel()
        if peer.link is not None:
            peer.link.close(detail)

    async def close(self) -> None:
        """Close every link and wait until their `on_close` has run."""
        self._closed = True
        links = [peer.link for peer in self._peers.values() if peer.link is not None]
        for address in list(self._peers):
            self.forget(address)
        if links:
            await asyncio.wait([link.closed for link in links])

    async def _dial(self, address: str, peer: _Attempts, expect_id: str | None) -> Link:
        try:
            link = await dial(
                address,
                self._secret,
                self._role,
                self._own_id,
                self._handlers,
                settings=self._settings,
                expect_role=self._expect_role,
                expect_id=expect_id,
            )
        except LinkDown as error:
            peer.failures += 1
            peer.last = error
            pause_s = self._backoff.after(peer.failures)
            peer.retry_at = asyncio.get_running_loop().time() + pause_s
            raise
        finally:
            peer.dialling = None
        peer.link, peer.failures, peer.last = link, 0, None
        return link


def _retrieve(task: asyncio.Task[Link]) -> None:
    """A failure that nobody waits for any more is no event of the loop's."""
    if not task.cancelled():
        task.exception()


class KeptLink:
    """A link to a peer whose address may change: found, dialled, and found again when it ends.

    `find_address` is asked before every attempt; it may create the peer. Whatever it raises counts
    as a failed attempt.
    """

    def __init__(
        self,
        find_address: Callable[[], Awaitable[str]],
        secret: bytes,
        role: str,
        own_id: str,
        handlers: LinkHandlers,
        *,
        settings: LinkSettings | None = None,
        expect_role: str | None = None,
        backoff: Backoff | None = None,
    ) -> None:
        check_secret(secret)
        self._find_address = find_address
        self._secret = secret
        self._role = role
        self._own_id = own_id
        self._on_open = handlers.on_open
        self._handlers = replace(handlers, on_open=self._opened)
        self._settings = settings or LinkSettings()
        self._expect_role = expect_role
        self._backoff = backoff or Backoff()
        self._link: Link | None = None
        self._task: asyncio.Task[None] | None = None
        self._up = asyncio.Event()

    @property
    def link(self) -> Link | None:
        """The open link, or None while there is none."""
        link = self._link
        return link if link is not None and link.is_open else None

    def start(self) -> None:
        """Begin keeping. Call once, on the loop that will use the link."""
        if self._task is None:
            self._task = asyncio.create_task(self._keep())

    async def wait_up(self) -> Link:
        """Wait for an open link, for as long as it takes."""
        while True:
            link = self.link
            if link is not None:
                return link
            self._up.clear()
            await self._up.wait()

    async def close(self) -> None:
        """Stop keeping and close the link; `on_close` has run on return."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        if self._link is not None:
            self._link.close()
            await asyncio.wait([self._link.closed])

    def _opened(self, link: Link) -> None:
        self._link = link
        self._up.set()
        self._on_open(link)

    async def _keep(self) -> None:
        failures = 0
        loop = asyncio.get_running_loop()
        while True:
            try:
                address = await self._find_address()
                link = await dial(
                    address,
                    self._secret,
                    self._role,
                    self._own_id,
                    self._handlers,
                    settings=self._settings,
                    expect_role=self._expect_role,
                )
            except Exception as error:  # find_address is the caller's: any failure means "later"
                failures += 1
                log = logger.warning if failures in (1, 10, 100) else logger.debug
                log("no link to %s (attempt %d): %s", self._expect_role, failures, error)
                await asyncio.sleep(self._backoff.after(failures))
                continue
            opened_at = loop.time()
            await asyncio.shield(link.closed)
            # A link that dies as soon as it lives (a peer that chokes on what it is told) must not
            # be dialled in a tight loop.
            failures = failures + 1 if loop.time() - opened_at < self._backoff.max_s else 0
            if failures:
                await asyncio.sleep(self._backoff.after(failures))
