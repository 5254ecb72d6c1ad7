"""The type of `nvme_path`: one directory on a drive, or several."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import WithJsonSchema

from swapper.errors import ConfigError, show

__all__ = ["NvmePath", "NvmePathLike", "parse_nvme_path"]

NvmePath = Annotated[
    Path | tuple[Path, ...],
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "uniqueItems": True},
            ]
        }
    ),
]
NvmePathLike = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def parse_nvme_path(value: object) -> Path | tuple[Path, ...] | None:
    """The path or paths in `value`. Raises ConfigError if they are none."""
    if value is None:
        return None
    if not isinstance(value, (list, tuple)):
        return _parse_directory(value)
    paths = tuple(_parse_directory(item) for item in value)
    if not paths:
        raise ConfigError("[] names no directory; write a directory on the drive, or null for none")
    for i, path in enumerate(paths):
        if path in paths[:i]:
            raise ConfigError(f"{show(str(path))} is there twice; name each drive once")
    return paths if len(paths) > 1 else paths[0]


def _parse_directory(value: object) -> Path:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise ConfigError(f"{show(value)} is not a path; write a directory on the drive, such as /local_nvme")
    if not text.strip() or "\0" in text:
        raise ConfigError(f"{show(text)} is not a path; write a directory on the drive, or null for none")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(f"{show(text)}: there is no such user's home here; write the path in full") from None
