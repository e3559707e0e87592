"""From a model's configuration to the model."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from hashlib import sha256

import torch
from torch import Tensor

from engine.config import Accelerator, DType, ModelConfig
from engine.errors import ConfigError
from engine.models.architecture import Architecture
from engine.models.capabilities import lacks
from engine.models.decoder import Decoder
from engine.models.fake import FakeModel
from engine.models.linear import Products
from engine.models.model import Model
from engine.models.parallel import TensorGroup
from engine.models.shard import Grid, shards
from engine.models.tiny import TINY_ARCHITECTURE, tiny_fingerprint, tiny_tensors
from engine.native.decoder import NativeDecoder
from engine.native.library import NativeUnavailable, native_available, variants
from engine.quantisation.codes import CodedMatrix
from engine.quantisation.rounding import round_to_codes
from engine.weights.checkpoint import Lazy
from engine.weights.load import load_checkpoint

DEFAULT_GROUP = 32

logger = logging.getLogger(__name__)


def load_model(config: ModelConfig, *, num_threads: int | None = None) -> Model:
    """Read the weights and build the model, ready for its first pass.

    num_threads: compute threads of this process (torch's setting is global), set before the weights
    are packed. None leaves it as it is. Raises ConfigError.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    if config.source == "synthetic":
        raise ConfigError(
            f"model {config.name!r}: source='synthetic' is an engine that computes nothing, not a "
            "model: use fake or tiny where a model is needed"
        )
    if config.source == "fake":
        if config.accelerator == "gpu":
            raise ConfigError(
                f"model {config.name!r}: accelerator='gpu': the fake model is Python: use cpu"
            )
        if config.dtype not in ("auto", "float64"):
            raise ConfigError(
                f"model {config.name!r}: dtype={config.dtype!r}: the fake model's KV holds token "
                "ids in float64: use auto or float64"
            )
        if config.kv_dtype not in ("auto", "float64"):
            raise ConfigError(
                f"model {config.name!r}: kv_dtype={config.kv_dtype!r}: the fake model's KV holds "
                "token ids in float64: use auto or float64"
            )
        if config.backend == "native":
            raise ConfigError(
                f"model {config.name!r}: backend='native': the fake model is Python: use auto"
            )
        return FakeModel()
    if config.source == "tiny":
        wide = config.dtype == "auto" and config.accelerator == "cpu"
        dtype = torch.float64 if wide else compute_dtype(config.dtype, config.accelerator)
        return build_decoder(
            config, TINY_ARCHITECTURE, tiny_tensors(), {}, dtype, tiny_fingerprint(dtype)
        )
    dtype = compute_dtype(config.dtype, config.accelerator)
    checkpoint = load_checkpoint(config.source, dtype)
    return build_decoder(
        config,
        checkpoint.architecture,
        checkpoint.tensors,
        checkpoint.coded,
        dtype,
        checkpoint.fingerprint,
    )


def build_decoder(
    config: ModelConfig,
    architecture: Architecture,
    tensors: Mapping[str, Tensor],
    stored: Mapping[str, CodedMatrix],
    dtype: torch.dtype,
    fingerprint: str,
) -> Model:
    """The native decoder where the configuration and the machine allow it, else torch's.

    stored: matrices that the checkpoint has as codes. Raises ConfigError.
    """
    coded = _coded(config, architecture, tensors, stored)
    if coded:
        fingerprint = _fingerprint_of_codes(config, fingerprint)
    if config.accelerator == "gpu":
        from engine.models.gpu import gpu_decoder

        expanded = _expanded(tensors, coded, dtype)
        return gpu_decoder(config, architecture, expanded, coded, dtype, fingerprint)
    name = str(dtype).removeprefix("torch.")
    # float64 is for comparing results, also between machines: torch computes it everywhere.
    wanted = config.backend == "native" or (
        config.backend == "auto" and dtype in (torch.bfloat16, torch.float32)
    )
    if wanted:
        reason = lacks("native", architecture, name, config.kv_dtype) or native_available(name)
        if reason is None and config.backend == "auto" and variants(name) == ("portable",):
            reason = f"no vector instructions of this processor are known for {name}"
        if reason is None:
            try:
                model = NativeDecoder(
                    architecture,
                    tensors,
                    coded=coded,
                    dtype=dtype,
                    fingerprint=fingerprint,
                    kv_codes=config.kv_dtype == "int8",
                )
            except NativeUnavailable as error:
                reason = str(error)
            else:
                logger.info(
                    "model %s: native %s decoder in %s, %d threads, weights of %d MB, "
                    "%d of %d matrices as codes, KV in %s",
                    config.name, model.variant, name, model.num_threads,
                    model.weight_bytes // 1_000_000, model.num_coded, model.num_matrices,
                    model.layout.dtype,
                )  # fmt: skip
                return model
        if config.backend == "native":
            raise ConfigError(
                f"model {config.name!r}: backend='native': {reason}; or use 'auto' or 'torch'"
            )
        logger.warning(
            "model %s is computed by torch, several times slower: %s", config.name, reason
        )
    lacking = lacks("torch", architecture, name, config.kv_dtype)
    if lacking is not None:
        raise ConfigError(
            f"model {config.name!r}: {lacking}: use a model, dtype or kv_dtype that it computes, "
            "or a machine with another backend"
        )
    if coded:
        logger.warning(
            "model %s: torch does not compute with codes: its quantised weights are expanded to "
            "%s and take the memory of that",
            config.name, name,
        )  # fmt: skip
    expanded = _expanded(tensors, coded, dtype)
    return Decoder(
        architecture,
        expanded,
        dtype=dtype,
        fingerprint=fingerprint,
        kv_dtype=config.kv_dtype,
    )


def load_shard(
    config: ModelConfig,
    grid: Grid,
    rank: int,
    *,
    group: TensorGroup | None,
    device: torch.device | str = "cpu",
) -> Decoder:
    """One rank's part of the model, of which it reads its own slices.

    Computed by torch: the native decoder does a whole step in one call and has no place for the
    sums between ranks. Raises ConfigError.
    """
    where = f"model {config.name!r}: {grid.tensor_parallel} x {grid.pipeline_parallel} ranks"
    if config.source in ("fake", "synthetic"):
        raise ConfigError(f"{where}: source={config.source!r} has no parts: use tiny, or one rank")
    if config.backend == "native":
        raise ConfigError(f"{where}: backend='native' computes on one rank only: use auto or torch")
    if config.source == "tiny":
        wide = config.dtype == "auto" and config.accelerator == "cpu"
        dtype = torch.float64 if wide else compute_dtype(config.dtype, config.accelerator)
        architecture, tensors = TINY_ARCHITECTURE, tiny_tensors()
        stored: Mapping[str, CodedMatrix] = {}
        fingerprint = tiny_fingerprint(dtype)
    else:
        dtype = compute_dtype(config.dtype, config.accelerator)
        checkpoint = load_checkpoint(config.source, dtype)
        architecture, tensors = checkpoint.architecture, checkpoint.tensors
        stored, fingerprint = checkpoint.coded, checkpoint.fingerprint
    backend = "gpu" if config.accelerator == "gpu" else "torch"
    lacking = lacks(backend, architecture, str(dtype).removeprefix("torch."), config.kv_dtype)
    if lacking is not None:
        raise ConfigError(f"{where}: {lacking}: use a model, dtype or kv_dtype that it computes")
    coded = _coded(config, architecture, tensors, stored)
    if coded:
        fingerprint = _fingerprint_of_codes(config, fingerprint)
    if config.quantisation != "keep":  # what a file stores as codes, its slices expand to
        tensors = _expanded(tensors, coded, dtype)
    return Decoder(
        architecture,
        tensors,
        dtype=dtype,
        fingerprint=fingerprint,
        device=device,
        kv_dtype=config.kv_dtype,
        shard=shards(architecture, grid)[rank],
        group=group,
        products=_shard_products(config, device, dtype),
    )


def _shard_products(
    config: ModelConfig, device: torch.device | str, dtype: torch.dtype
) -> Products | None:
    """Slices of codes are expanded; fp8 is made of whatever numbers a rank holds."""
    device = torch.device(device)
    if device.type == "cpu":
        return None
    from engine.models.device_linear import DeviceProducts

    return DeviceProducts({}, device=device, dtype=dtype, fp8=config.quantisation == "fp8")


def _fingerprint_of_codes(config: ModelConfig, fingerprint: str) -> str:
    """Codes are not the rounded numbers: KV of one is none of the other's."""
    form = f"{fingerprint} {config.quantisation} {config.quantisation_group or DEFAULT_GROUP}"
    return sha256(form.encode()).hexdigest()


def _coded(
    config: ModelConfig,
    architecture: Architecture,
    tensors: Mapping[str, Tensor],
    stored: Mapping[str, CodedMatrix],
) -> Mapping[str, CodedMatrix]:
    """The matrices that the configuration wants as codes."""
    if config.quantisation == "keep":
        return stored
    if config.quantisation in ("none", "fp8"):
        return {}
    group = config.quantisation_group or DEFAULT_GROUP
    head = "embed" if architecture.tied_embeddings else "head"

    def rounded(name: str) -> CodedMatrix:
        # Every token is chosen by the head: as elsewhere, it is not cut to 4 bits.
        bits = 4 if config.quantisation == "int4" and name != head else 8
        return round_to_codes(tensors[name], bits, group)

    matrices = {
        name
        for name, shape in architecture.tensor_shapes().items()
        if len(shape) == 2 and name != "embed"
    }
    return Lazy({name: functools.partial(rounded, name) for name in matrices | {head}})


def _expanded(
    tensors: Mapping[str, Tensor], coded: Mapping[str, CodedMatrix], dtype: torch.dtype
) -> Mapping[str, Tensor]:
    """All tensors as numbers: those that are codes as what the codes stand for."""
    if not coded:
        return tensors
    readers = {name: functools.partial(tensors.__getitem__, name) for name in tensors}
    return Lazy(readers | {name: functools.partial(_expand, coded, name, dtype) for name in coded})


def _expand(coded: Mapping[str, CodedMatrix], name: str, dtype: torch.dtype) -> Tensor:
    return coded[name].expand(dtype)


def compute_dtype(dtype: DType, accelerator: Accelerator = "cpu") -> torch.dtype:
    """`auto` is bfloat16 on a GPU and where the CPU multiplies it natively, else float32."""
    if dtype == "auto" and accelerator == "gpu":
        return torch.bfloat16
    if dtype == "auto":
        return torch.bfloat16 if _multiplies_bfloat16() else torch.float32
    return getattr(torch, dtype)


def _multiplies_bfloat16() -> bool:
    # oneDNN's own answer is true for any AVX-512, where it emulates at a third of float32's speed.
    capabilities: Mapping[str, object] = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16", "arm_bf16"))
