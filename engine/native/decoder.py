"""The decoder of `engine.models.decoder` in one native call a step.

The same architectures, weights and KV layout as `Decoder`. Sums, the residual, norms, rotation and
softmax are float32 (float64 in a float64 model); bfloat16 is rounded to only where a product reads
its left side and where KV is stored, unless that is codes. So it lies nearer to float32 than
torch's bfloat16 does, and the KV of the two differs by rounding only: both carry the fingerprint of
the weights and may be exchanged.

Each row is summed in an order of its own: neither the batch, nor the chunks of a prompt, nor the
page size, nor the number of threads changes a bit of its logits.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from ctypes import Array, byref, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from engine.attention.backend import StepContext
from engine.errors import EngineError
from engine.execution.pool import KVPool
from engine.models.architecture import Architecture
from engine.models.decoder import RotaryAngles
from engine.models.model import KVLayout
from engine.native.library import (
    DTYPES,
    PARTS,
    VARIANTS,
    Codes,
    NativeUnavailable,
    Shape,
    Step,
    Variant,
    library_path,
    load_library,
    variants,
)
from engine.quantisation.codes import CodedMatrix, alike


class NativeDecoder:
    """Implements `Model`.

    tensors, fingerprint and kv_codes: as for `Decoder`. coded: matrices to keep as codes, by the
    same names; they go before `tensors`, but where the parts of one product differ in form, which
    are expanded.
    The head of a model with tied embeddings is `embed`. num_threads: None takes torch's setting.
    variant: None takes the fastest that this processor has; library: another build, for tests.
    Raises NativeUnavailable. Not thread-safe: one pass at a time; each pass uses all threads and
    leaves the interpreter's lock to others meanwhile.
    """

    def __init__(
        self,
        architecture: Architecture,
        tensors: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        fingerprint: str,
        kv_codes: bool = False,
        coded: Mapping[str, CodedMatrix] | None = None,
        num_threads: int | None = None,
        variant: Variant | None = None,
        library: Path | None = None,
    ) -> None:
        self.architecture = architecture
        self.device = torch.device("cpu")
        self.vocab_size = architecture.vocab_size
        self.max_context_tokens = architecture.max_context_tokens
        self.eos_token_ids = architecture.eos_token_ids
        self.dtype = name = str(dtype).removeprefix("torch.")
        layout = KVLayout(
            num_layers=architecture.num_layers,
            num_kv_heads=architecture.num_kv_heads,
            head_dim=architecture.head_dim,
            dtype=name,
            fingerprint=fingerprint,
        )
        self.layout = layout.as_codes() if kv_codes else layout
        self._dtype = dtype
        self._wide = torch.float64 if dtype == torch.float64 else torch.float32
        library = library or library_path()
        possible = variants(name, library)
        if not possible or (variant is not None and variant not in possible):
            raise NativeUnavailable(
                f"the native decoder has no {variant or 'variant'} for {name} on this processor, "
                f"only {', '.join(possible) or 'none'}"
            )
        self.variant: Variant = variant or possible[-1]
        self.num_threads = num_threads or torch.get_num_threads()
        self.weight_bytes = 0
        """What weights take, the embedding's table included."""

        self.num_matrices = self.num_coded = 0
        """Of the matrices that products read, all, and those kept as codes."""

        self._library = load_library(library)
        self._handle = self._create()
        self._load(tensors, coded or {})
        self._rotary = RotaryAngles(
            architecture.rope, architecture.head_dim, self._wide, self.device
        )
        self._cos, self._sin = torch.empty(0), torch.empty(0)
        self._num_angles = 0

    def forward(self, ids: Tensor, positions: Tensor, pool: KVPool, step: StepContext) -> Tensor:
        """See `Model.forward`. Raises IndexError for tables and slots that leave the pool."""
        logits = torch.empty((step.last.numel(), self.vocab_size), dtype=self._wide)
        arguments, alive = self._arguments(ids, positions, pool, step)
        arguments.logits = logits.data_ptr()
        _raise(self._library.tailrace_step_run(self._handle, byref(arguments)))
        del alive
        return logits

    def attention(self, qkv: Tensor, layer: int, pool: KVPool, step: StepContext) -> Tensor:
        """One layer's attention by itself, the rotation and the storing of k and v included.

        qkv: `[tokens, heads + 2 * kv_heads, head_dim]`, of float32 (float64). Position i of a
        request is where its tokens lie among its keys. Returns `[tokens, heads, head_dim]`.
        """
        a = self.architecture
        counts = torch.tensor(step.q_lens)
        begin = torch.repeat_interleave(torch.tensor(step.k_lens) - counts, counts)
        within = torch.arange(qkv.shape[0]) - torch.repeat_interleave(step.cu_q[:-1], counts)
        positions = (begin + within).to(torch.int64)
        arguments, alive = self._arguments(torch.zeros_like(positions), positions, pool, step)
        qkv = qkv.to(self._wide).contiguous()
        out = torch.empty((qkv.shape[0], a.num_heads, a.head_dim), dtype=self._wide)
        _raise(
            self._library.tailrace_attention(
                self._handle, layer, byref(arguments), qkv.data_ptr(), out.data_ptr()
            )
        )
        del alive
        return out

    def products(self, tokens: int, sampled: int) -> None:
        """The matrix products of a pass and nothing else, their results dropped.

        For measuring: no arrangement of the rest can make a pass over `tokens` rows, of which
        `sampled` are sampled from, take less time. Raises IndexError for counts that no pass has.
        """
        _raise(self._library.tailrace_products(self._handle, tokens, sampled))

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product by itself: x `[rows, in]`, weight `[out, in]` to `[rows, out]`, unrounded."""
        x, weight = x.to(self._wide).contiguous(), weight.to(self._dtype).contiguous()
        if bias is not None:
            bias = bias.to(self._dtype).contiguous()
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=self._wide)
        _raise(
            self._library.tailrace_linear(
                self._handle,
                *(x.shape[0], weight.shape[0], x.shape[1]),
                *(x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr()),
                out.data_ptr(),
            )
        )
        return out

    def linear_codes(self, x: Tensor, matrix: CodedMatrix) -> Tensor:
        """The product with a matrix of codes: x `[rows, in]` to `[rows, out]`, unrounded."""
        x = x.to(self._wide).contiguous()
        out = torch.empty((x.shape[0], matrix.codes.shape[0]), dtype=self._wide)
        matching = alike([matrix])
        assert matching is not None
        codes, alive = _codes(matching)
        _raise(
            self._library.tailrace_linear_codes(
                self._handle,
                *(x.shape[0], matrix.codes.shape[0], x.shape[1]),
                *(x.data_ptr(), codes, out.data_ptr()),
            )
        )
        del alive
        return out

    def gated(self, x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        """`activation(x @ gate.T) * (x @ up.T)`: x `[rows, in]`, gate and up `[inner, in]`."""
        x = x.to(self._wide).contiguous()
        gate, up = gate.to(self._dtype).contiguous(), up.to(self._dtype).contiguous()
        out = torch.empty((x.shape[0], gate.shape[0]), dtype=self._wide)
        _raise(
            self._library.tailrace_gated(
                self._handle,
                *(x.shape[0], gate.shape[0], x.shape[1]),
                *(x.data_ptr(), gate.data_ptr(), up.data_ptr(), out.data_ptr()),
            )
        )
        return out

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm by itself: x `[rows, size]`, weight `[size]`."""
        x, weight = x.to(self._wide).contiguous(), weight.to(self._dtype).contiguous()
        out = torch.empty_like(x)
        _raise(
            self._library.tailrace_norm(
                self._handle,
                *(x.shape[0], x.shape[1], x.data_ptr(), weight.data_ptr(), out.data_ptr()),
            )
        )
        return out

    def _create(self) -> int:
        a = self.architecture
        shape = Shape(
            vocab=a.vocab_size,
            hidden=a.hidden_size,
            layers=a.num_layers,
            heads=a.num_heads,
            kv_heads=a.num_kv_heads,
            head_dim=a.head_dim,
            inner=a.intermediate_size,
            window=a.window or 0,
            norm_eps=a.norm_eps,
            qkv_bias=a.qkv_bias,
            qk_norm=a.qk_norm,
            gelu_tanh=a.activation == "gelu_tanh",
            dtype=DTYPES.index(self.dtype),
            variant=VARIANTS.index(self.variant),
            threads=self.num_threads,
            kv_codes=self.layout.coded,
        )
        handle = self._library.tailrace_create(byref(shape))
        if not handle:
            raise NativeUnavailable(
                f"the native decoder could not start: memory or {self.num_threads} threads refused"
            )
        weakref.finalize(self, self._library.tailrace_destroy, handle)
        return handle

    def _load(self, tensors: Mapping[str, Tensor], coded: Mapping[str, CodedMatrix]) -> None:
        def take(name: str) -> Tensor:
            return tensors[name].to(device=self.device, dtype=self._dtype).contiguous()

        def put(part: str, layer: int, *names: str) -> None:
            parts = [
                coded[name].expand(self._dtype) if name in coded else take(name) for name in names
            ]
            self.weight_bytes += sum(x.numel() * x.itemsize for x in parts)
            pointers = (c_void_p * len(parts))(*(part.data_ptr() for part in parts))
            _raise(self._library.tailrace_load(self._handle, PARTS.index(part), layer, pointers))

        def put_matrix(part: str, layer: int, *names: str) -> None:
            matrices = [coded[name] for name in names if name in coded]
            matching = alike(matrices) if len(matrices) == len(names) else None
            self.num_matrices += len(names)
            if matching is None:
                put(part, layer, *names)
                return
            self.num_coded += len(names)
            self.weight_bytes += int(sum(matrix.num_bytes for matrix in matching))
            codes, alive = _codes(matching)
            _raise(self._library.tailrace_load_codes(self._handle, PARTS.index(part), layer, codes))
            del alive

        a = self.architecture
        self._embed = take("embed")  # read where it lies
        self.weight_bytes += self._embed.numel() * self._embed.itemsize
        pointer = (c_void_p * 1)(self._embed.data_ptr())
        _raise(self._library.tailrace_load(self._handle, PARTS.index("embed"), 0, pointer))
        for i in range(a.num_layers):
            at = f"layers.{i}"
            put("attn_norm", i, f"{at}.attn_norm")
            put_matrix("qkv", i, *(f"{at}.{x}" for x in "qkv"))
            if a.qkv_bias:
                put("qkv_bias", i, *(f"{at}.{x}.bias" for x in "qkv"))
            if a.qk_norm:
                put("qk_norm", i, *(f"{at}.{x}_norm" for x in "qk"))
            put_matrix("o", i, f"{at}.o")
            put("mlp_norm", i, f"{at}.mlp_norm")
            put_matrix("gate_up", i, f"{at}.gate", f"{at}.up")
            put_matrix("down", i, f"{at}.down")
        put("norm", 0, "norm")
        put_matrix("head", 0, "embed" if a.tied_embeddings else "head")

    def _arguments(
        self, ids: Tensor, positions: Tensor, pool: KVPool, step: StepContext
    ) -> tuple[Step, list[Tensor]]:
        """The step as the library takes it, and the tensors that must outlive the call."""
        assert pool.layout == self.layout, f"{pool.layout} is not {self.layout}"
        assert pool.data.is_contiguous()
        longest = max(step.max_k, 1)
        if longest > self._num_angles:
            self._grow_angles(longest)
        alive = [
            *(_plain(x, torch.int64) for x in (ids, positions, step.slots, step.last)),
            *(_plain(x, torch.int32) for x in (step.cu_q, step.kv_lens, step.block_table)),
        ]
        pointers = [x.data_ptr() for x in alive]
        arguments = Step(
            ids.shape[0],
            step.kv_lens.shape[0],
            step.block_table.shape[1],
            step.last.shape[0],
            *pointers,
            self._cos.data_ptr(),
            self._sin.data_ptr(),
            self._num_angles,
            pool.data.data_ptr(),
            pool.num_blocks,
            pool.block_tokens,
        )
        return arguments, alive

    def _grow_angles(self, num_positions: int) -> None:
        """Tables for at least so many positions, doubling, so that steps compute no angles."""
        count = max(num_positions, 2 * self._num_angles, 1024)
        half = self.architecture.head_dim // 2
        cos, sin = self._rotary.at(torch.arange(count))
        self._cos = cos[:, 0, :half].contiguous()
        self._sin = sin[:, 0, half:].contiguous()
        self._num_angles = count


def _codes(matrices: list[CodedMatrix]) -> tuple[Array[Codes], list[Tensor]]:
    """Matrices as the library takes them, and the tensors that must outlive the call."""
    alive: list[Tensor] = []

    def pointer(x: Tensor | None) -> int | None:
        if x is None:
            return None
        alive.append(x.contiguous())
        return alive[-1].data_ptr()

    entries = [
        Codes(
            *(m.bits, m.group),
            *(pointer(x) for x in (m.codes, m.scales, m.minimums, m.order)),
        )
        for m in matrices
    ]
    return (Codes * len(entries))(*entries), alive


def _plain(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype=dtype).contiguous()


def _raise(fault: bytes | None) -> None:
    if fault is None:
        return
    message = fault.decode()
    if message in ("out of memory", "an unexpected failure"):
        raise EngineError(f"the native decoder: {message}")
    raise IndexError(f"the native decoder: {message}")
