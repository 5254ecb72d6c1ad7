"""The settings that `swapper tune` tries."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swapper.config import AioConfig, format_size, read_mapping
from swapper.errors import ConfigError, show

__all__ = ["binary_size", "default_sweep", "demand", "load_sweep", "setting_name"]

_ALIASES = {
    "io_parallel": "intra_op_parallelism",
    "num_threads": "intra_op_parallelism",
    "thread_count": "intra_op_parallelism",
    "sequential_requests": "overlap_events",
}
"""DeepSpeed's names. `sequential_requests` is the opposite of `overlap_events`."""


def default_sweep() -> list[AioConfig]:
    """A minute or two on a fast drive."""
    threads = [count for count in (1, 2, 4) if count <= len(os.sched_getaffinity(0))]
    return _product(
        {
            "block_size": ["1MiB", "2MiB", "4MiB", "8MiB"],
            "queue_depth": [8, 32, 128],
            "intra_op_parallelism": threads or [1],
        }
    )


def load_sweep(path: Path) -> list[AioConfig]:
    """Every combination of the lists in a file.

    Args:
        path: JSON or YAML: a mapping from names of the `aio` section to lists of values. A file for DeepSpeed's tuner
            is one: `io_parallel` is `intra_op_parallelism`, `sequential_requests` the opposite of `overlap_events`, and
            "1M" means 2**20 bytes there.

    Raises:
        ConfigError: the file cannot be read, or holds a setting that a config would refuse. Each line starts with the
            path and the key.
    """
    lists: dict[str, list[Any]] = {}
    lines: list[str] = []
    for key, value in read_mapping(path).items():
        name = _ALIASES.get(key, key)
        if name not in AioConfig.model_fields:
            lines.append(f"{key}: unknown key; known here are {', '.join(AioConfig.model_fields)}")
        elif name in lists:
            lines.append(f"{key}: another name of {name!r}, which is given too; delete one of them")
        elif isinstance(value, Mapping) or value == []:
            lines.append(f"{key}: {show(value)} is not a list of values to try")
        else:
            values = value if isinstance(value, list) else [value]
            if key == "sequential_requests":
                values = [not each if isinstance(each, bool) else each for each in values]
            lists[name] = [binary_size(each) if name == "block_size" else each for each in values]
            lines += [line for each in lists[name] for line in _refusal(key, name, each)]
    if not lists and not lines:
        lines.append(f"there is nothing to try; write lists for {', '.join(AioConfig.model_fields)}")
    if lines:
        raise ConfigError("\n".join(f"{path}: {line}" for line in lines))
    return _product(lists)


def binary_size(value: object) -> object:
    """ "1M" as DeepSpeed means it."""
    match = re.fullmatch(r"\s*(\d+)\s*([KMG])\s*", value, re.IGNORECASE) if isinstance(value, str) else None
    return f"{match[1]}{match[2].upper()}iB" if match else value


def _refusal(key: str, name: str, value: object) -> list[str]:
    try:
        AioConfig(**{name: value})
    except ConfigError as error:
        return [f"{key}{line.removeprefix(name)}" for line in str(error).splitlines()]
    return []


def _product(lists: Mapping[str, list[Any]]) -> list[AioConfig]:
    combinations = itertools.product(*lists.values())
    return list(dict.fromkeys(AioConfig(**dict(zip(lists, values, strict=True))) for values in combinations))


def demand(setting: AioConfig) -> tuple[object, ...]:
    """Sorts settings by threads, then bytes in flight, then requests; ties by nearness to a config's defaults."""
    default = AioConfig()
    return (
        setting.intra_op_parallelism,
        setting.block_size * setting.queue_depth,
        -setting.block_size,
        setting.backend != default.backend,
        setting.single_submit != default.single_submit,
        setting.overlap_events != default.overlap_events,
    )


def setting_name(setting: AioConfig) -> str:
    """Short, and fit for a file name: "auto-1MiB-d32-t1"."""
    name = f"{setting.backend}-{format_size(setting.block_size)}-d{setting.queue_depth}-t{setting.intra_op_parallelism}"
    return name + "-single" * setting.single_submit + "-no_overlap" * (not setting.overlap_events)
