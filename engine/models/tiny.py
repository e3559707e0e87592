"""A small random decoder in float64: real arithmetic, fast, and the same on every machine.

Re-chunking and batching move its logits by about 1e-14, so tests may demand equal tokens of it.
"""

from __future__ import annotations

import string
from hashlib import sha256

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.models.architecture import Architecture, Rope
from engine.models.decoder import Decoder
from engine.models.fake import counter_bits
from engine.text.text_model import BUILTIN_CONTEXT_TOKENS
from engine.text.tokenizer import BYTE_BOS_ID, BYTE_EOS_ID, BYTE_VOCAB_SIZE

TINY_ARCHITECTURE = Architecture(
    name="tiny",
    vocab_size=BYTE_VOCAB_SIZE,
    hidden_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    norm_eps=1e-5,
    rope=Rope(theta=10_000.0),
    max_context_tokens=BUILTIN_CONTEXT_TOKENS,
    tied_embeddings=False,
    eos_token_ids=(BYTE_EOS_ID,),
    bos_token_id=BYTE_BOS_ID,
)

_RECIPE = "tailrace tiny model, 1"
"""Goes into the fingerprint: change it with anything that changes a weight."""


def tiny_tensors() -> dict[str, Tensor]:
    """The weights under canonical names, float64.

    Uniform with a variance of `gain / in`. The gains were chosen so that attention is far from
    uniform and the answers do not fall into short loops.
    """
    tensors: dict[str, Tensor] = {}
    for stream, (name, shape) in enumerate(TINY_ARCHITECTURE.tensor_shapes().items()):
        if len(shape) == 1:
            tensors[name] = torch.ones(shape, dtype=torch.float64)
            continue
        rows, columns = shape
        leaf = name.rpartition(".")[2]
        gain = {"embed": columns, "q": 4.0, "k": 4.0, "v": 4.0, "head": 16.0}.get(leaf, 2.0)
        # 53 bits give a float64 exactly; nothing here depends on a machine's rounding but the sqrt,
        # which IEEE 754 defines.
        bits = counter_bits(1000 + stream, rows * columns) >> np.uint64(11)
        uniform = bits.astype(np.float64) * 2.0**-52 - 1.0
        weights = (uniform * np.sqrt(3.0 * gain / columns)).reshape(rows, columns)
        if name == "head":
            weights *= _emphasis()[:, None]
        tensors[name] = torch.as_tensor(weights)
    return tensors


def _emphasis() -> NDArray[np.float64]:
    """Factor for each token's row of the head: answers consist mostly of text and do end."""
    factor = np.full(BYTE_VOCAB_SIZE, 0.1)
    factor[[ord(c) for c in string.ascii_letters + string.digits + " .,!?'\n"]] = 1.0
    factor[BYTE_EOS_ID] = 0.75
    return factor


def tiny_fingerprint(dtype: torch.dtype) -> str:
    """Identity of the weights in `dtype`."""
    return sha256(f"{_RECIPE} {dtype}".encode()).hexdigest()


def tiny_model(dtype: torch.dtype = torch.float64) -> Decoder:
    """The decoder of torch, in float64 unless another `dtype` is asked for."""
    return Decoder(
        TINY_ARCHITECTURE, tiny_tensors(), dtype=dtype, fingerprint=tiny_fingerprint(dtype)
    )
