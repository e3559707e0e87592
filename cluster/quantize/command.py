"""`tailrace quantize`: a calibrated checkpoint, and what it costs in quality."""

from __future__ import annotations

from pathlib import Path

import click

from cluster.cli import emit, json_option, say


@click.command()
@click.argument("model")
@click.option("--method", required=True, help="gptq, awq, or rtn (round to nearest, no text read).")
@click.option("--bits", type=int, default=4, show_default=True, help="4 or 8.")
@click.option(
    "--group-size",
    "group",
    type=int,
    default=32,
    show_default=True,
    help="Inputs that share a scale, a multiple of 32; -1: whole rows.",
)
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="Directory for the checkpoint; it must not exist, or be empty.",
)
@click.option("--symmetric", is_flag=True, help="Groups without a zero of their own.")
@click.option(
    "--act-order",
    "order",
    help="GPTQ: inputs as they are (off), the most active first (static, the default), or groups "
    "made in that order too (groups, stored as g_idx).",
)
@click.option(
    "--combine",
    is_flag=True,
    help="AWQ's scales and GPTQ's choice of codes together, in the format of --method.",
)
@click.option("--damping", type=float, help="GPTQ's. Default: 0.01.")
@click.option(
    "--correction",
    type=float,
    help="GPTQ: the share of what quantising has changed so far that each matrix makes good. "
    "Default: 0.5.",
)
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    help="A text file to calibrate with. Default: text that is in the package.",
)
@click.option(
    "--calibration-tokens",
    type=click.IntRange(min=512),
    help="Of a longer text, this many are read, in windows spread over it. Default: 16384.",
)
@click.option(
    "--requantize",
    is_flag=True,
    help="Take a GGUF file whose weights are stored in 4 to 6 bits all the same.",
)
@click.option("--threads", type=click.IntRange(min=1), help="Default: one per core.")
@json_option
def quantize(
    model: str,
    method: str,
    bits: int,
    group: int,
    out: Path,
    symmetric: bool,
    order: str | None,
    combine: bool,
    damping: float | None,
    correction: float | None,
    calibration: Path | None,
    calibration_tokens: int | None,
    requantize: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """Write MODEL with its matrices quantised, in GPTQ's, AWQ's or compressed-tensors' format.

    MODEL is a source as in a configuration: package:NAME, a .gguf file or a directory. Ends with
    perplexity and KL divergence of the result against MODEL on text that it was not calibrated
    with. Embeddings, head, norms and biases are not quantised.
    """
    from cluster.quantize.run import quantize_model, recipe, table

    result = quantize_model(
        model,
        out,
        recipe(
            method,
            bits=bits,
            group=group,
            symmetric=symmetric,
            order=order,
            damping=damping,
            correction=correction,
            combine=combine,
        ),
        calibration=calibration,
        max_tokens=calibration_tokens,
        requantize=requantize,
        threads=threads,
        say=say,
    )
    if as_json:
        emit(result)
    else:
        click.echo("\n".join(table(result)))
