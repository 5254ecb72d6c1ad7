"""Text as bytes: the source files of Python's own standard library, which every machine has, or a file."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["batches", "decode", "encode", "load_text"]

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


def load_text(path: Path | None) -> Tensor:
    """The bytes to train on, (numel,) uint8.

    Args:
        path: a file, mapped into memory rather than read; None for the standard library's sources.
    """
    if path is not None:
        return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in sorted(root.rglob("*.py")) if not _NOT_LIBRARY & set(file.relative_to(root).parts)]
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def batches(text: Tensor, batch_size: int, context: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (tokens, targets), each (batch_size, context) int64: random windows, targets one byte later."""
    if len(text) <= context:
        raise ValueError(f"the text has {len(text)} bytes, a window needs {context + 1}: name a larger file by --data")
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(context + 1)
    while True:
        starts = torch.randint(len(text) - context, (batch_size, 1), generator=generator)
        chunk = text[starts + window].long()
        yield chunk[:, :-1], chunk[:, 1:]


def encode(text: str) -> Tensor:
    """Token ids of `text`, (length,) int64."""
    return torch.tensor(list(text.encode()))


def decode(tokens: Tensor) -> str:
    """The text of token ids; ids that are no byte are left out."""
    return bytes(token for token in tokens.tolist() if token < 256).decode(errors="replace")
