"""The wire between gateway, queue, decode and prefill: one authenticated TCP link per pair."""

from deployments.link.client import Backoff, Dialer, KeptLink, dial
from deployments.link.link import Link, LinkDown, LinkHandlers, LinkRefused, LinkSettings
from deployments.link.server import LinkServer
from deployments.link.wire import CloseCode, CloseReason, WireError

__all__ = [
    "Backoff",
    "CloseCode",
    "CloseReason",
    "Dialer",
    "KeptLink",
    "Link",
    "LinkDown",
    "LinkHandlers",
    "LinkRefused",
    "LinkServer",
    "LinkSettings",
    "WireError",
    "dial",
]
