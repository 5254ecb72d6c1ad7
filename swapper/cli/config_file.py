"""The `aio` section of a config file, changed without touching the rest of it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from swapper.config import AioConfig, OffloadConfig, read_mapping
from swapper.config.files import check_suffix
from swapper.errors import ConfigError, SwapError
from swapper.storage.atomic import NewFile

__all__ = ["aio_yaml", "check_config_file", "write_aio"]


def aio_yaml(aio: AioConfig) -> str:
    """The section as YAML, every setting in it."""
    return yaml.safe_dump({"aio": aio.model_dump(mode="json")}, sort_keys=False)


def check_config_file(path: Path, nvme_paths: Sequence[Path]) -> None:
    """Refuse a file that `write_aio` could not write, before anything is measured. Errors as there."""
    check_suffix(path)
    if not os.access(path.resolve().parent, os.W_OK):
        raise SwapError(f"{path}: no file can be written there")
    if path.exists():
        OffloadConfig.load(path)
    _check(_render(path, AioConfig(), nvme_paths), path)


def write_aio(path: Path, aio: AioConfig, nvme_paths: Sequence[Path]) -> None:
    """Replace the `aio` section of a config file, or make a file with that and `nvme_path`.

    The rest of a YAML file keeps every character, comments too; of a JSON file every value. The file is replaced as a
    whole or not at all, and keeps its mode.

    Raises:
        ConfigError: the result would not load, or would say something else than before outside `aio`.
        OSError: it cannot be written.
    """
    path = path.resolve()  # A link stays one.
    text = _render(path, aio, nvme_paths)
    _check(text, path)
    with NewFile(path) as new:
        with open(new.descriptor, "w", encoding="utf-8", closefd=False) as file:
            file.write(text)
        os.fchmod(new.descriptor, 0o644)  # Of a new file; one that is replaced keeps its mode.
        new.publish()


def _render(path: Path, aio: AioConfig, nvme_paths: Sequence[Path]) -> str:
    """The text of the file with `aio` in it."""
    section = aio.model_dump(mode="json")
    if not path.exists():
        names = [str(each.resolve()) for each in nvme_paths]
        document = {
            "nvme_path": names[0] if len(names) == 1 else names,
            "offload_optimizer": {"device": "nvme"},  # Without it the file would swap nothing.
            "aio": section,
        }
        if path.suffix == ".json":
            return json.dumps(document, indent=2) + "\n"
        return yaml.safe_dump(document, sort_keys=False)
    with open(path, encoding="utf-8", newline="") as file:  # Ends of lines stay as they are.
        text = file.read()
    if path.suffix == ".json":
        return json.dumps({**json.loads(text), "aio": section}, indent=2) + "\n"
    return _with_section(text, aio_yaml(aio), path)


def _with_section(text: str, section: str, path: Path) -> str:
    root = yaml.compose(text, yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode) or root.flow_style:
        raise ConfigError(
            f"{path}: only a file with a setting on each line can be changed; write it so, or print to a new"
        )
    indent = " " * root.start_mark.column
    lines = text.splitlines(keepends=True)
    end = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
    new = [f"{indent}{line}{end}" for line in section.splitlines()]
    for key, value in root.value:
        if isinstance(key, yaml.ScalarNode) and key.value == "aio":
            first = key.start_mark.line
            # An alias is composed as the node that it stands for, which is before it.
            last = max(first, _last_line(value))
            return "".join([*lines[:first], *new, *lines[last + 1 :]])
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += end
    return "".join([*lines, *new])


def _last_line(node: yaml.Node) -> int:
    """The line that a node ends on, without the comments and empty lines that follow it."""
    if isinstance(node, yaml.MappingNode) and not node.flow_style:
        return max(_last_line(part) for pair in node.value for part in pair)
    if isinstance(node, yaml.SequenceNode) and not node.flow_style:
        return max(_last_line(part) for part in node.value)
    end = node.end_mark
    return int(end.line) - (end.column == 0)


def _check(text: str, path: Path) -> None:
    """Load `text` as the file `path`, and compare what it says with what is there."""
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / path.name
        copy.write_text(text, encoding="utf-8")
        try:
            OffloadConfig.load(copy)
            new = read_mapping(copy)
        except ConfigError as error:
            raise ConfigError(str(error).replace(str(copy), str(path))) from None
    if path.exists():
        old = read_mapping(path)
        if {**old, "aio": new["aio"]} != new:
            raise ConfigError(f"{path}: its aio section cannot be replaced alone; move it to lines of its own")
