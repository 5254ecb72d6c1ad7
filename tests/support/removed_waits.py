"""Removes one call of a function of swapper, for tests of tests: what waits for a device must be missed if it is gone.

A call is found by where it is in the source: module, function, and the name of the method. If a function has several,
they are numbered in their order.
"""

from __future__ import annotations

import ast
import collections
import importlib
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import swapper

ROOT = Path(swapper.__file__).parent
WAITS = {
    "begin",
    "follow",
    "join",
    "keep",
    "record_stream",
    "settle",
    "settle_all",
    "synchronize",
    "wait_event",
    "wait",
}
"""Methods that only wait, or let others wait."""
OF_DEVICES = re.compile(
    r"copies|copy\b|stream|event|scratch|transfer\b|tensor\b|module|_down\b|_up\b|_copies_of\(|\.of\(|^self$"
)
"""What they are called on."""
PLACES = (
    "gradient/",
    "io/bounce.py",
    "io/devices.py",
    "optimizer/",
    "parameter/",
    "storage/buffers.py",
    "storage/cache.py",
    "storage/writes.py",
)
"""Where device code is."""


@dataclass(frozen=True)
class Site:
    """A call in the source."""

    path: str
    function: str
    method: str
    number: int
    line: int
    column: int
    function_line: int

    def __str__(self) -> str:
        return f"{self.path} {self.function} {self.method}" + (f" {self.number}" if self.number else "")


def _calls(tree: ast.AST, function: str = "", line: int = 0) -> Iterator[tuple[str, int, ast.Call]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield from _calls(node, node.name, min([node.lineno, *(each.lineno for each in node.decorator_list)]))
            continue
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield function, line, node
        yield from _calls(node, function, line)


def sites() -> list[Site]:
    """All calls that wait for a device, in modules that know of devices."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        source, name = path.read_text(), str(path.relative_to(ROOT))
        if not name.startswith(PLACES):
            continue
        numbers: collections.Counter[tuple[str, str]] = collections.Counter()
        for function, line, node in _calls(ast.parse(source)):
            assert isinstance(node.func, ast.Attribute)
            method = node.func.attr
            if method in WAITS and OF_DEVICES.search(ast.unparse(node.func.value)):
                number = numbers[function, method]
                numbers[function, method] += 1
                found.append(Site(name, function, method, number, node.lineno, node.col_offset, line))
    return found


class _Removal(ast.NodeTransformer):
    def __init__(self, site: Site) -> None:
        self._site = site

    def visit_Call(self, node: ast.Call) -> ast.AST:
        is_here = (node.lineno, node.col_offset) == (self._site.line, self._site.column)
        # A chain of calls begins in one place.
        if is_here and isinstance(node.func, ast.Attribute) and node.func.attr == self._site.method:
            return ast.copy_location(ast.Constant(None), node)
        return self.generic_visit(node)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes(constant)


def _functions(namespace: dict[str, object], module: str) -> Iterator[types.FunctionType]:
    for value in list(namespace.values()):
        value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        value = getattr(value, "__wrapped__", value)
        if isinstance(value, types.FunctionType):
            yield value
        elif isinstance(value, type) and value.__module__ == module:
            yield from _functions(dict(vars(value)), module)


def remove(site: Site, patch: pytest.MonkeyPatch) -> None:
    """Let the call at `site` do nothing, and be None."""
    path = ROOT / site.path
    tree = ast.fix_missing_locations(_Removal(site).visit(ast.parse(path.read_text())))
    compiled = compile(tree, str(path), "exec")
    module = "swapper." + site.path.removesuffix(".py").replace("/", ".")

    def holds(code: types.CodeType) -> bool:
        return any((c.co_name, c.co_firstlineno) == (site.function, site.function_line) for c in [code, *_codes(code)])

    for function in _functions(vars(importlib.import_module(module)), module):
        if function.__code__.co_filename != str(path) or not holds(function.__code__):
            continue
        for code in _codes(compiled):
            if (code.co_name, code.co_firstlineno) == (function.__name__, function.__code__.co_firstlineno):
                patch.setattr(function, "__code__", code)
                return
    raise LookupError(f"no function was found for {site}")
