"""What a prefill replica says about the KV it hands over, and the pieces it comes in.

The wire form knows neither page size nor device layout of either side: a chunk is a run of tokens
of a range of layers and heads, in the order layer, K then V, token, head, dim. KV that is codes has
its scales behind them: layer, K then V, (token, head, dim), (head, token).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.errors import TransferError
from engine.models.model import KVLayout
from engine.request import SampledToken

MANIFEST_VERSION = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Sent once, before the first chunk. The receiver refuses what does not match its own model."""

    fingerprint: str
    """Of weights, arithmetic and rope: `KVLayout.fingerprint`."""

    dtype: str
    scale_dtype: str
    """Of the scales that come with each run of codes; empty where KV is numbers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    head_range: tuple[int, int]
    """Global KV heads this sender offers, end exclusive."""

    first_token: int
    """First position that will be sent."""

    num_tokens: int
    """End of the run: chunks cover `[first_token, num_tokens)`."""

    chain: tuple[bytes, ...]
    """Hash chain over the tokens in units of `chain_tokens`, from position 0."""

    chain_tokens: int
    num_cached_tokens: int
    """Tokens the sender did not have to compute."""

    lease_ms: int
    """How long the sender keeps the KV without being asked again."""

    version: int = MANIFEST_VERSION

    def to_wire(self) -> list[Any]:
        return [
            self.version,
            self.fingerprint,
            self.dtype,
            self.scale_dtype,
            self.num_layers,
            self.num_kv_heads,
            self.head_dim,
            self.head_range,
            self.first_token,
            self.num_tokens,
            self.chain,
            self.chain_tokens,
            self.num_cached_tokens,
            self.lease_ms,
        ]

    @classmethod
    def from_wire(cls, wire: list[Any]) -> Manifest:
        """Raises TransferError for another version or a malformed list."""
        if not wire or wire[0] != MANIFEST_VERSION:
            raise TransferError(
                f"manifest version {wire[0] if wire else None}, this side speaks "
                f"{MANIFEST_VERSION}: run equal releases on both pools",
                stage="offer",
            )
        try:
            _, fingerprint, dtype, scales, layers, heads, dim, (h0, h1), first, end = wire[:10]
            chain, chain_tokens, cached, lease_ms = wire[10:]
        except (ValueError, TypeError) as error:
            raise TransferError(f"malformed manifest: {error}", stage="offer") from error
        return cls(
            fingerprint=fingerprint,
            dtype=dtype,
            scale_dtype=scales,
            num_layers=layers,
            num_kv_heads=heads,
            head_dim=dim,
            head_range=(h0, h1),
            first_token=first,
            num_tokens=end,
            chain=tuple(chain),
            chain_tokens=chain_tokens,
            num_cached_tokens=cached,
            lease_ms=lease_ms,
        )

    def require(self, layout: KVLayout, chain: tuple[bytes, ...], first: int, end: int) -> None:
        """Raise TransferError unless this is exactly the KV that was asked for."""
        if (self.dtype, self.scale_dtype) != (layout.dtype, layout.scale_dtype):
            raise TransferError(
                f"KV in {_kept(self.dtype, self.scale_dtype)} offered, this replica keeps "
                f"{_kept(layout.dtype, layout.scale_dtype)}: give both pools one kv_dtype",
                stage="offer",
            )
        ours = (layout.fingerprint, layout.dtype, layout.num_layers, layout.num_kv_heads)
        theirs = (self.fingerprint, self.dtype, self.num_layers, self.num_kv_heads)
        if ours != theirs or layout.head_dim != self.head_dim:
            raise TransferError(
                f"KV of another model: offered {theirs} x {self.head_dim}, "
                f"this replica serves {ours} x {layout.head_dim}",
                stage="offer",
            )
        if self.head_range != (0, layout.num_kv_heads):
            raise TransferError(
                f"KV heads {self.head_range} offered, all {layout.num_kv_heads} are needed",
                stage="offer",
            )
        if (self.first_token, self.num_tokens) != (first, end):
            raise TransferError(
                f"tokens {self.first_token}..{self.num_tokens} offered, {first}..{end} asked",
                stage="offer",
            )
        if self.chain != chain:
            raise TransferError("the offered KV belongs to other tokens or tenants", stage="offer")


def _kept(dtype: str, scale_dtype: str) -> str:
    return f"{dtype} with scales in {scale_dtype}" if scale_dtype else dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkHead:
    """Describes one payload: layers x tokens x heads, with its checksum."""

    first_layer: int
    last_layer: int
    """Exclusive."""

    first_token: int
    num_tokens: int
    first_head: int
    last_head: int
    """Exclusive."""

    num_bytes: int
    checksum: int
    """Of the payload, see `engine.transfer.checksum`."""

    def to_wire(self) -> list[int]:
        return [
            self.first_layer,
            self.last_layer,
            self.first_token,
            self.num_tokens,
            self.first_head,
            self.last_head,
            self.num_bytes,
            self.checksum,
        ]

    @classmethod
    def from_wire(cls, wire: list[int]) -> ChunkHead:
        """Raises TransferError for a malformed list."""
        if len(wire) != 8 or min(wire) < 0:
            raise TransferError("malformed chunk head", stage="chunk")
        l0, l1, t0, n, h0, h1, num_bytes, checksum = wire
        return cls(
            first_layer=l0,
            last_layer=l1,
            first_token=t0,
            num_tokens=n,
            first_head=h0,
            last_head=h1,
            num_bytes=num_bytes,
            checksum=checksum,
        )


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What a finished pull brought besides the bytes."""

    first: SampledToken
    """What prefill drew at the position after the last transferred token."""

    num_cached_tokens: int
    num_bytes: int
    exposed_s: float
    """From the news that prefill has sampled the first token to the last byte here."""

    connector: str = "link"
    """What carried whole blocks: `link` or `nixl`."""
