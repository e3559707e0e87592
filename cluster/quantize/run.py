"""What `tailrace quantize` does. Imports torch."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from cluster.bench.held_out import HELD_OUT
from cluster.bench.reading import expanded, judge, kept, read
from cluster.bench.summary import significant
from cluster.errors import ClusterError
from cluster.quantize.calibration_text import CALIBRATION
from engine.errors import ConfigError
from engine.models.load import compute_dtype
from engine.quantisation.calibration import Measured
from engine.quantisation.recipe import Recipe
from engine.quantisation.write import Written, file_format, quantise_checkpoint
from engine.text.gguf_header import read_gguf_header
from engine.text.json_file import read_json
from engine.text.source import Source, resolve_source
from engine.text.text_model import load_text
from engine.weights.load import load_checkpoint
from engine.weights.packed import packed_format
from engine.weights.writing import model_config

Say = Callable[[str], None]

WINDOW_TOKENS: Final = 512
SHORTEST_WINDOW_TOKENS: Final = 64
CALIBRATION_TOKENS: Final = 16384
FEWEST_TOKENS: Final = 512
REPORT: Final = "quality.json"
"""Beside the checkpoint: what the command printed."""

_CODED_IN_FEW_BITS: Final = ("Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")
_TEXT_FILES: Final = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json"),
    *("generation_config.json",),
)


def recipe(
    method: str,
    *,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = False,
    order: str | None = None,
    damping: float | None = None,
    correction: float | None = None,
    combine: bool = False,
) -> Recipe:
    """What the command's options mean, None where one is not given.

    Raises ConfigError, for one that the method has no use for too.
    """
    if method == "rtn" and combine:
        raise ConfigError(
            "--combine does nothing with --method rtn: leave it out, or use gptq or awq"
        )
    if method == "rtn" or (method == "awq" and not combine):
        way_out = "use gptq" if method == "rtn" else "add --combine, or use gptq"
        _refuse_idle(
            {"--act-order": order, "--damping": damping, "--correction": correction},
            method,
            way_out,
        )
        correction = 0.0
    return Recipe(
        method=method,
        bits=bits,
        group=group,
        symmetric=symmetric,
        order="static" if order is None else order,
        damping=0.01 if damping is None else damping,
        correction=0.5 if correction is None else correction,
        scales=combine,
        feedback=combine,
    )


def _refuse_idle(options: Mapping[str, object], method: str, way_out: str) -> None:
    """Raises ConfigError for an option that is given and does nothing."""
    for option, value in options.items():
        if value is not None:
            raise ConfigError(
                f"{option}={value} does nothing with --method {method}: leave it out, or {way_out}"
            )


def format_name(chosen: Recipe) -> str:
    """Under which a result's quality is reported: `gptq-int4`, `awq-int4/64`, ..."""
    group = {32: "", -1: "/row"}.get(chosen.group, f"/{chosen.group}")
    return f"{chosen.method}-int{chosen.bits}{group}"


def quantize_model(
    source: str,
    out: Path,
    chosen: Recipe,
    *,
    calibration: Path | None = None,
    max_tokens: int | None = None,
    requantize: bool = False,
    threads: int | None = None,
    held_out: str = HELD_OUT,
    say: Say,
) -> dict[str, Any]:
    """Write a quantised checkpoint to `out` and judge it on held-out text.

    Raises as `write_quantized` does.
    """
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    result = write_quantized(
        source,
        out,
        chosen,
        calibration=calibration,
        max_tokens=max_tokens,
        requantize=requantize,
        say=say,
    )
    say("reading held-out text with both")
    result |= _quality(source, out, format_name(chosen), held_out)
    (out / REPORT).write_text(json.dumps(result, indent=1) + "\n")
    return result


def write_quantized(
    source: str,
    out: Path,
    chosen: Recipe,
    *,
    calibration: Path | None = None,
    max_tokens: int | None = None,
    requantize: bool = False,
    say: Say,
) -> dict[str, Any]:
    """Write a quantised checkpoint to `out`; says how it was made and what became of it.

    It is made beside and moved into place, so that a directory that is there is whole.

    Raises:
        ConfigError: a model that cannot be loaded, is quantised already or does not suit the
            recipe, or whose tokenizer cannot be exported; a calibration text that cannot be read,
            is too short or is not needed.
        ClusterError: `out` is in use or cannot be written.
    """
    if not chosen.calibrated:
        given = {"--calibration": calibration, "--calibration-tokens": max_tokens}
        _refuse_idle(given, chosen.method, "use gptq or awq")
    resolved = resolve_source(source)
    _refuse_quantised(source, resolved, requantize)
    _refuse_used(out)
    began = time.monotonic()
    checkpoint = load_checkpoint(source, torch.float32)
    chosen.check(checkpoint.architecture)
    windows = _windows(source, chosen, calibration, max_tokens or CALIBRATION_TOKENS)
    num_tokens = sum(map(len, windows))
    stored, config = _own_config(resolved, checkpoint.architecture)
    name = format_name(chosen)
    if windows:
        where = "" if calibration is None else f" of {calibration}"
        say(f"{name}: calibrating with {num_tokens} tokens{where}")
    else:
        say(f"{name}: rounding, no text is read")

    def progress(done: int, of: int, measured: Sequence[Measured]) -> None:
        worst = max(measured, key=lambda m: m.error, default=None)
        took = time.monotonic() - began
        error = f", {worst.error:.2%} of {worst.name}'s product is error" if worst else ""
        say(f"layer {done} of {of} ({took:.0f} s){error}")

    try:
        written = _write(checkpoint, windows, chosen, out, resolved, stored, config, progress)
    except OSError as error:
        raise ClusterError(f"{out}: cannot be written ({error}): choose another --out") from error
    return {
        "model": source,
        "out": str(out),
        "format": name,
        "stored_as": file_format(chosen),
        "recipe": _told(chosen),
        "calibration": {
            "text": "packaged" if calibration is None else str(calibration),
            "tokens": num_tokens,
        },
        "bytes": written.num_bytes,
        "bytes_before": written.num_bytes_before,
        "kept": list(written.kept),
        "took_s": round(time.monotonic() - began, 1),
        **({"error": _by_part(written.measured)} if windows else {}),
    }


def table(result: Mapping[str, Any]) -> list[str]:
    """For people."""
    name = result["format"]
    quality = result["quality"][name]
    share = result["bytes"] / result["bytes_before"]
    return [
        f"{result['out']}  {name}, stored as {result['stored_as']}  "
        f"{result['bytes'] / 1e6:.0f} MB, {share:.0%} of {result['bytes_before'] / 1e6:.0f} MB",
        f"not quantised: {', '.join(result['kept'])}",
        f"held-out text of {result['tokens']} tokens: perplexity {result['perplexity']:.2f}, "
        f"now {quality['perplexity_ratio']:.4f} times; KL {quality['kl']:.5f} nats a token",
        f"serve it: source: {result['out']}",
    ]


def _refuse_quantised(source: str, resolved: Source, requantize: bool) -> None:
    path = resolved.files
    if resolved.kind == "directory":
        format_ = packed_format(path / "config.json", read_json(path / "config.json"))
        if format_ is not None:
            raise ConfigError(
                f"{source}: its matrices are quantised already ({format_.method}): quantise the "
                "model that it was made from"
            )
        return
    types = {t.type_name for t in read_gguf_header(path).tensors.values() if len(t.shape) == 2}
    few = sorted(types & set(_CODED_IN_FEW_BITS))
    if few and not requantize:
        raise ConfigError(
            f"{source}: its weights are stored as {', '.join(few)}: what that lost would be lost "
            "again; quantise the model that it was made from, or say --requantize"
        )


def _refuse_used(out: Path) -> None:
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists() or out.is_symlink():
        raise ClusterError(f"{out}: is there and not an empty directory: choose another --out")


def _windows(
    source: str, chosen: Recipe, calibration: Path | None, max_tokens: int
) -> list[list[int]]:
    """Token ids of the calibration text in windows, none where no text is needed."""
    if not chosen.calibrated:
        return []
    text = CALIBRATION
    if calibration is not None:
        try:
            text = calibration.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{calibration}: cannot be read as UTF-8 text ({error}): name another file"
            ) from error
    encoded = load_text(source).tokenizer.encode(text)
    if len(encoded) < FEWEST_TOKENS:
        raise ConfigError(
            f"{calibration}: {len(encoded)} tokens are too few to calibrate with: at least "
            f"{FEWEST_TOKENS}, and several thousand are better"
        )
    starts = range(0, len(encoded), WINDOW_TOKENS)
    windows = [encoded[start : start + WINDOW_TOKENS] for start in starts]
    if len(windows[-1]) < SHORTEST_WINDOW_TOKENS:
        del windows[-1]
    most = max(max_tokens // WINDOW_TOKENS, 1)
    if len(windows) <= most:
        return windows
    return [windows[i * len(windows) // most] for i in range(most)]


def _own_config(resolved: Source, architecture: Any) -> tuple[torch.dtype, dict[str, Any]]:
    """The dtype of what is not quantised, and the model's own `config.json`."""
    if resolved.kind != "directory":
        return torch.bfloat16, model_config(architecture, torch.bfloat16)
    config = dict(read_json(resolved.files / "config.json"))
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    known = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    return known.get(name, torch.bfloat16), config


def _write(
    checkpoint: Any,
    windows: Sequence[Sequence[int]],
    chosen: Recipe,
    out: Path,
    resolved: Source,
    stored: torch.dtype,
    config: Mapping[str, Any],
    progress: Callable[[int, int, Sequence[Measured]], None],
) -> Written:
    out.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    try:
        _copy_text(resolved, made)  # first: what fails here fails before the long part
        written = quantise_checkpoint(
            checkpoint,
            windows,
            chosen,
            made,
            config=config,
            stored=stored,
            quantiser=f"tailrace:{importlib.metadata.version('tailrace')}",
            progress=progress,
        )
        made.chmod(0o755)
        if out.is_dir():
            out.rmdir()
        os.replace(made, out)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return written


def _copy_text(resolved: Source, directory: Path) -> None:
    """Tokenizer, chat template and generation settings.

    Raises ConfigError for a tokenizer that cannot be exported.
    """
    path = resolved.files
    if resolved.kind == "directory":
        for name in _TEXT_FILES:
            if (path / name).is_file():
                shutil.copyfile(path / name, directory / name)
        return
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        tokenizer.save_pretrained(directory)
    except Exception as error:  # whatever transformers makes of the file
        raise ConfigError(
            f"{path}: its tokenizer cannot be exported ({error}): quantise the model from a "
            "directory with a tokenizer.json"
        ) from error


def _quality(source: str, out: Path, name: str, held_out: str) -> dict[str, Any]:
    encoded = load_text(source).tokenizer.encode(held_out)
    reference = read(expanded(source), encoded)
    reading = read(kept(str(out)), encoded)
    return {
        "dtype": str(compute_dtype("auto")).removeprefix("torch."),
        "tokens": reference.following.numel(),
        "perplexity": significant(reference.perplexity),
        "quality": {name: judge(reference, reading)},
    }


def _told(chosen: Recipe) -> dict[str, Any]:
    told: dict[str, Any] = {
        "method": chosen.method,
        "bits": chosen.bits,
        "group_size": chosen.group,
        "symmetric": chosen.symmetric,
    }
    if chosen.gptq_choice:
        told |= {"act_order": chosen.order, "damping": chosen.damping, "sweeps": chosen.sweeps}
        told |= {"correction": chosen.correction}
    return told | {"scales": chosen.awq_scales, "feedback": chosen.gptq_choice}


def _by_part(measured: Sequence[Measured]) -> dict[str, float]:
    """The mean over layers of what quantising did to each kind of product, as a share of it."""
    parts: dict[str, list[float]] = {}
    for m in measured:
        parts.setdefault(m.name.rpartition(".")[2], []).append(m.error)
    return {part: significant(sum(errors) / len(errors)) for part, errors in parts.items()}
