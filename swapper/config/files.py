"""YAML and JSON files as mappings, without keys given twice; every failure is a `ConfigError`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from swapper.errors import ConfigError, show

__all__ = ["check_suffix", "parse_json", "prefixed", "read_mapping", "refuse_odd_keys"]

_SUFFIXES = (".yaml", ".yml", ".json")


def check_suffix(path: Path) -> None:
    """Refuse a path that is not named as a config file.

    Raises:
        ConfigError: its name ends otherwise.
    """
    if path.suffix not in _SUFFIXES:
        raise ConfigError(f"{path}: a config file's name ends in .yaml, .yml or .json, not in {path.suffix!r}")


def read_mapping(path: Path) -> dict[str, Any]:
    """The content of a YAML or JSON file; by its name's end, JSON where that says nothing.

    Raises:
        ConfigError: it cannot be read, is not valid, gives a key twice, or is no mapping. Starts with the path.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file{_near_files(path)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start}: {error.reason}; save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # a null character in the path
        raise ConfigError(f"{str(path)!r}: not a path: {error}") from None
    if not text.strip():
        raise ConfigError(f"{path}: the file is empty; start from a file in config/")
    try:
        document = _parse_yaml(text) if path.suffix in (".yaml", ".yml") else parse_json(text)
        if isinstance(document, dict):
            refuse_odd_keys(document)
            return document
    except ConfigError as error:
        raise prefixed(str(path), error) from None
    if document is None:
        raise ConfigError(f"{path}: the file holds comments only; start from a file in config/")
    raise ConfigError(f"{path}: {show(document)} is not a mapping; a config is lines of `key: value`")


def parse_json(text: str | bytes | bytearray) -> Any:
    """The value of a JSON text.

    Raises:
        ConfigError: the text is not valid, or gives a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise ConfigError(f"line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"byte {error.start}: not valid JSON: {error.reason}; save it as UTF-8") from None
    except RecursionError:
        raise ConfigError("not a config: nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(f"key {key!r} is given twice; delete one")
        found[key] = value
    return found


class _YamlLoader(yaml.SafeLoader):
    """YAML without tags that run code, and without keys given twice."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        first_lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            line = key.start_mark.line + 1
            if key.value in first_lines:
                problem = f"key {key.value!r} is given twice, first on line {first_lines[key.value]}; delete one"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            first_lines[key.value] = line
        return node


def _parse_yaml(text: str) -> Any:
    try:
        return yaml.load(text, _YamlLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{where}not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError("not a config: nested too deeply") from None


def refuse_odd_keys(data: Mapping[Any, Any], path: str = "") -> None:
    """Refuse keys that are no strings, such as YAML's `1:` and `on:`, in a config and in its sections.

    Raises:
        ConfigError: with the first such key; `path` comes before it.
    """
    for key, value in data.items():
        if not isinstance(key, str):
            raise ConfigError(f"{path}{key}: unknown key; a key is a word, put it in quotes if YAML reads it otherwise")
        if isinstance(value, Mapping) and not path:  # no config is deeper, and YAML may refer to itself
            refuse_odd_keys(value, f"{key}.")


def prefixed(prefix: str, error: ConfigError) -> ConfigError:
    """`error` with `prefix` before each of its lines."""
    return ConfigError("\n".join(f"{prefix}: {line}" for line in str(error).splitlines()))


def _near_files(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix in _SUFFIXES]
    except OSError:
        return f", nor a directory {str(path.parent)!r}"
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {str(path.parent / near[0])!r}?" if near else ""
