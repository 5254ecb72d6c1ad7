"""`swapper pack`: a copy of a model's directory whose bf16 weights take fewer bytes, and back."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from swapper.cli.arguments import AsJson
from swapper.cli.output import print_json, printable, say
from swapper.files.packing import pack_weights, unpack_weights
from swapper.sizes import format_bytes

__all__ = ["pack"]


def pack(
    src: Annotated[
        Path,
        typer.Argument(metavar="SRC", help="A model's directory, its entry in Hugging Face's cache, or its weights."),
    ],
    dst: Annotated[Path, typer.Argument(metavar="DST", help="The directory to make; it must not exist.")],
    unpack: Annotated[
        bool, typer.Option("--unpack", help="Make plain safetensors files of SRC, which was packed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Pack a model's bf16 weights, to the bit.

    DST is a copy of SRC in which they take about two thirds of the bytes. It is for inference with the weights on the
    drive (swapper.from_pretrained, swapper.offload with weights), which then reads less for each token. What would not
    shrink is copied as it is, and so are all other files. DST appears when all of it is written. Other programs than
    swapper cannot load it; --unpack gives them their files back.

    \b
        swapper pack models/llama models/llama-packed
        swapper pack --unpack models/llama-packed models/llama
    """
    sizes = (unpack_weights if unpack else pack_weights)(src, dst)
    if as_json:
        print_json({**asdict(sizes), "path": str(sizes.path)})
        return
    part = sizes.to_bytes / max(sizes.from_bytes, 1)
    say(
        f"{printable(sizes.path)}: {format_bytes(sizes.from_bytes)} are {format_bytes(sizes.to_bytes)} now "
        f"({part:.1%}); {sizes.changed} tensors {'unpacked' if unpack else 'packed'}, {sizes.left} as they were"
    )
