"""Removes one wait of swapper, for tests of tests: what waits for a device must be missed if it is gone.

A wait is found by what it is called, in every module that has to do with devices or with the transfers of leases:

    a method in `WAITS`              is not called; where it is only passed on, as a callback, it does nothing
    an assignment to `.transfer`     is not made: the buffer is not kept for what goes on in it

It is named by where it is in the source: module, function, and method. If a function has several, they are numbered in
their order.
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
    "record",
    "record_stream",
    "synchronize",
    "wait",
    "wait_all",
    "wait_event",
    "wait_quietly",
    "wait_stream",
}
"""Methods that only wait, or let others wait. Those with a leading underscore are the same."""
TRANSFER = "transfer"
OF_DEVICES = re.compile(rf"\bdevices\b|\.\s*{TRANSFER}\b")
"""In the text of each module of which `_is_of_devices` is true."""
NO_PLACES = {
    "bench/": "measures, and waits for what it measures",
    "deepnvme/": "waits for transfers of `io`",
    "files/": "waits for transfers of the drive",
}
"""Folders without device code."""
OF_OTHERS = re.compile(
    r"""\ f?["']  # text
    |thread\.join$|native\.wait$|io/bounce\.py\ self\._over\.wait$|job\.wait$|io/gds\.py\ .*\.wait(_quietly)?$ # threads
    |_plan\.follow$|records\.cache\.keep$|opened\.keep$|plan\.py\ self\._records\.keep$  # other things
    |self\._begin$|building\.py\ .*_wait$
    |storage/agreement\.py\ .*\.(wait|join)$  # ranks
    """,
    re.VERBOSE,
)
"""Modules, and what methods of these names are called on there, which do not wait for a device."""


@dataclass(frozen=True)
class Site:
    """A wait in the source."""

    path: str
    function: str
    method: str
    number: int
    end: tuple[int, int]
    function_line: int

    def __str__(self) -> str:
        return f"{self.path} {self.function} {self.method}" + (f" {self.number}" if self.number else "")


def _nodes(tree: ast.AST, function: str = "", line: int = 0) -> Iterator[tuple[str, int, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield from _nodes(node, node.name, min([node.lineno, *(each.lineno for each in node.decorator_list)]))
            continue
        yield function, line, node
        yield from _nodes(node, function, line)


def _is_of_devices(tree: ast.AST) -> bool:
    return any(
        (isinstance(node, ast.ImportFrom) and node.module == "swapper.io.devices")
        or (isinstance(node, ast.Attribute) and node.attr == TRANSFER)
        for node in ast.walk(tree)
    )


def _wait_of(node: ast.AST, path: str) -> str:
    """The name of what `node` does, if it waits; else ""."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr.lstrip("_") in WAITS:
        return "" if OF_OTHERS.search(f"{path} {ast.unparse(node)}") else node.attr
    of_drive = path.startswith("storage/")
    if not of_drive and isinstance(node, ast.Assign) and not isinstance(node.value, ast.Constant):
        return TRANSFER if any(map(_is_transfer, node.targets)) else ""
    return ""


def _is_transfer(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == TRANSFER


def sites() -> list[Site]:
    """All that waits for a device."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        source, name = path.read_text(), str(path.relative_to(ROOT))
        if name.startswith(tuple(NO_PLACES)) or not (name == "io/devices.py" or OF_DEVICES.search(source)):
            continue
        tree = ast.parse(source)
        if name != "io/devices.py" and not _is_of_devices(tree):
            continue
        numbers: collections.Counter[tuple[str, str]] = collections.Counter()
        for function, line, node in _nodes(tree):
            method = _wait_of(node, name)
            if function and method:
                assert isinstance(node, ast.expr | ast.stmt)
                number = numbers[function, method]
                numbers[function, method] += 1
                assert node.end_lineno is not None and node.end_col_offset is not None
                found.append(Site(name, function, method, number, (node.end_lineno, node.end_col_offset), line))
    return found


class _Removal(ast.NodeTransformer):
    def __init__(self, site: Site) -> None:
        self._site = site

    def _is_here(self, node: ast.expr | ast.stmt) -> bool:
        # A chain of calls begins in one place, and each ends in another.
        return (node.end_lineno, node.end_col_offset) == self._site.end

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Attribute) and node.func.attr == self._site.method and self._is_here(node.func):
            return ast.copy_location(ast.Constant(None), node)
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if node.attr == self._site.method and self._is_here(node):
            return ast.copy_location(ast.parse("lambda *_: None", mode="eval").body, node)
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if self._site.method == TRANSFER and self._is_here(node):
            targets = [target for target in node.targets if not _is_transfer(target)]
            if not targets:
                return ast.copy_location(ast.Expr(node.value), node)
            return ast.copy_location(ast.Assign(targets, node.value), node)
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
    """Let what is at `site` do nothing, and be None."""
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
