"""The types of fields that take more than one spelling: sizes, directories, encodings and switches."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, PlainSerializer, WithJsonSchema

from swapper.errors import ConfigError, show
from swapper.sizes import format_size, parse_size

__all__ = [
    *("Encoding", "NvmePath", "NvmePathLike", "Size", "Switch"),
    *("not_one_of", "parse_nvme_path", "paths_of_environment"),
]

Size = Annotated[
    int,
    BeforeValidator(parse_size),
    PlainSerializer(format_size, return_type=str, when_used="json"),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 0},
                {"type": "string", "pattern": r"^\s*[0-9]+(\.[0-9]+)?\s*([KkMmGgTtPp][Ii]?)?[Bb]?\s*$"},
            ]
        }
    ),
]
"""Bytes. An integer or a string such as "64MiB"; always an integer once validated."""


def _parse_switch(value: object) -> object:
    """YAML takes a plain `on` for true, and `off` for false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_parse_switch)]


# --- Directories -----------------------------------------------------------------------------------------------------

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


def paths_of_environment() -> list[Path]:
    """The directories that the environment variable SWAPPER_NVME_PATH names, separated by colons as in PATH."""
    return [Path(name) for name in os.environ.get("SWAPPER_NVME_PATH", "").split(os.pathsep) if name]


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


# --- Encodings -------------------------------------------------------------------------------------------------------

_Encoding = Literal["exact", "packed", "unpacked", "bf16", "int8"]


def not_one_of(value: object, words: Sequence[str]) -> str:
    """The text of an error for a value that is none of `words`. Names the one that is meant, perhaps."""
    near = difflib.get_close_matches(value.lower(), words, n=1) if isinstance(value, str) else ()
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{show(value)} is not one of {', '.join(words)}{hint}"


def _parse_encoding(value: object) -> object:
    """Checked here, so that the error says it in words: a union's own would say it once for each of its members."""
    names = get_args(_Encoding)
    for key, name in value.items() if isinstance(value, Mapping) else [("", value)]:
        where = f"{key}: " if isinstance(value, Mapping) else ""
        if not isinstance(key, str):
            raise ConfigError(f"{show(key)} is not the name of a tensor of the state, such as exp_avg")
        if name not in names:
            raise ConfigError(f"{where}{not_one_of(name, names)}")
    return dict(value) if isinstance(value, Mapping) else value


class _EncodingOfKeys(dict[str, _Encoding]):
    """A mapping that can be hashed, since a config can be, and does not change."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


def _as_hashable(value: object) -> object:
    return _EncodingOfKeys(value) if isinstance(value, dict) else value


Encoding = Annotated[_Encoding | dict[str, _Encoding], BeforeValidator(_parse_encoding), AfterValidator(_as_hashable)]
