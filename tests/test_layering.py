"""Data flows one way: the import table of DESIGN.md, enforced on the source of every module."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "swapper"

BASE = {"endings", "errors", "layout", "metrics", "modes"}
HANDLE = BASE | {"bounce", "devices", "handle"}
STORE = {"transfers", "runs", "record_files", "spares", "speed", "codec", "store"}
PIPELINE = HANDLE | STORE | {"buffers", "growing_pool", "schedule", "held_records", "pipeline"}
OPTIMIZER = PIPELINE | {
    "config",
    "trial",
    "segments",
    "failure",
    "optimizer_plan",
    "optimizer_state",
    "evicted",
    "stepper",
}
STEPS = {"stepper", "loss_scaling", "memory_overlap", "backward_step"}
PARAMETERS = PIPELINE | {"config"}
PARAMETER_PARTS = {
    "evicted",
    "forward_hooks",
    "lasting",
    "order",
    "parameter_cache",
    "parameter_records",
    "saved_places",
}
SWAPPERS = {"optimizer", "gradient", "parameter"}
BUILDING = {"heap", "lasting", "nursery", "tensor_files", "unfilled", "weights"}
CHECKPOINT_FILES = {"checkpoint_index", "checkpoint_directories", "checkpoint_files", "checkpoint_reader"}
CHECKPOINT = HANDLE | CHECKPOINT_FILES | {"codec", "record_files", "store", "tensor_files", "values"}
API = (
    OPTIMIZER
    | STEPS
    | SWAPPERS
    | BUILDING
    | PARAMETER_PARTS
    | {"gradient_records", "guarded_state", "progress", "stats", "unswapped", "shared", "dry_run"}
    | CHECKPOINT
    | {"checkpoint", "saved_model", "saved_state", "checkpoint_streams", "plain_import", "references", "export"}
    | {"state_writer"}
    | {"archive", "away_storages", "temporary_files", "streams", "fastsave", "dcp", "values"}
)

MAY_IMPORT: dict[str, set[str]] = {
    "endings": set(),
    "modes": set(),
    "errors": set(),
    "layout": {"errors"},
    "metrics": {"errors"},
    "heap": set(),
    "progress": set(),
    "end_of_backward": set(),
    "devices": {"errors"},
    "bounce": {"devices", "errors"},
    "handle": BASE | {"_native", "bounce"},
    "gds": HANDLE | {"_native"},
    "transfers": HANDLE,
    "buffers": HANDLE | {"transfers"},
    "growing_pool": HANDLE | {"transfers", "buffers"},
    "runs": {"errors", "layout"},
    "speed": HANDLE | {"runs"},
    "record_files": HANDLE,
    "spares": set(),
    "store": HANDLE | (STORE - {"store"}),
    "codec": HANDLE | {"_native"},
    "value_advice": set(),
    "value_tensors": {"codec"},
    "values": {"errors", "value_advice", "value_tensors"},
    "schedule": {"errors", "layout"},
    "held_records": {"buffers", "store"},
    "pipeline": PIPELINE - {"pipeline"},
    "config": {"errors", "deepspeed"},
    "deepspeed": {"errors"},
    "trial": {"errors", "layout"},
    "segments": {"trial", "store", "buffers", "devices", "codec", "layout"},
    "failure": {"errors", "evicted"},
    "guarded_state": {"errors"},
    "optimizer_state": OPTIMIZER | {"heap", "stepper"},
    "optimizer_plan": {"config", "devices", "segments", "schedule", "trial", "layout", "errors"},
    "stepper": PIPELINE | {"evicted", "heap", "optimizer_plan", "progress", "segments", "trial"},
    "loss_scaling": set(),
    "memory_overlap": {"errors", "evicted"},
    "backward_step": {
        "memory_overlap",
        "errors",
        "evicted",
        "loss_scaling",
        "modes",
        "optimizer_plan",
        "segments",
        "stepper",
    },
    "stats": {"metrics"},
    "optimizer": OPTIMIZER | STEPS | {"guarded_state", "stats"},
    "unswapped": {"metrics", "optimizer", "stats", "stepper"},
    "evicted": {"errors", "modes"},
    "lasting": {"store", "parameter_records"},
    "order": set(),
    "parameter_records": {"layout", "codec", "trial", "errors", "evicted"},
    "gradient_records": {"store", "layout", "errors", "evicted", "trial"},
    "gradient": PARAMETERS | {"evicted", "gradient_records", "heap", "end_of_backward"},
    "parameter_cache": PIPELINE | {"order", "parameter_records"},
    "saved_places": {"errors", "evicted", "parameter_cache"},
    "forward_hooks": {"evicted", "parameter_cache"},
    "parameter": PARAMETERS | PARAMETER_PARTS,
    "nursery": PARAMETERS | PARAMETER_PARTS | {"heap", "parameter", "unfilled"},
    "tensor_files": HANDLE | {"evicted"},
    "unfilled": {"errors", "evicted"},
    "weights": HANDLE | {"evicted", "progress", "tensor_files", "unfilled"},
    "checkpoint_index": {"codec"},
    "checkpoint_directories": {"checkpoint_index", "errors"},
    "checkpoint_files": HANDLE
    | {"checkpoint_directories", "checkpoint_index", "codec", "progress", "record_files", "store", "streams"},
    "checkpoint_reader": HANDLE | {"checkpoint_files", "checkpoint_index", "codec", "tensor_files"},
    "saved_model": CHECKPOINT | {"evicted", "parameter", "parameter_cache", "unfilled"},
    "state_writer": CHECKPOINT | OPTIMIZER | {"optimizer", "unswapped"},
    "saved_state": CHECKPOINT | OPTIMIZER | {"optimizer", "state_writer"},
    "checkpoint": CHECKPOINT | {"fastsave", "saved_model", "saved_state", "state_writer"},
    "checkpoint_streams": CHECKPOINT | {"heap", "saved_state", "segments", "trial"},
    "plain_import": CHECKPOINT | {"archive", "checkpoint", "saved_model", "segments", "state_writer", "trial"},
    "export": CHECKPOINT
    | {"archive", "checkpoint_streams", "dcp", "fastsave", "plain_import", "references", "saved_state", "segments"}
    | {"streams"},
    "references": set(),
    "archive": set(),
    "temporary_files": set(),
    "streams": HANDLE | {"buffers", "codec", "archive", "temporary_files"},
    "away_storages": {"errors", "evicted"},
    "fastsave": HANDLE | {"buffers", "archive", "away_storages", "streams"},
    "dcp": HANDLE | {"buffers", "archive", "streams", "fastsave"},
    "api": API,
    "shared": PIPELINE | {"config"},
    "dry_run": PIPELINE | {"config", "gradient_records", "optimizer_plan", "parameter_records", "shared"},
    "deepnvme": {"endings", "handle", "gds", "errors"},
    "strategy_arguments": {"config", "errors"},
    "replicas": {"evicted"},
    "lightning": API | {"api", "replicas", "strategy_arguments"},
    "fabric": API | {"api", "replicas", "strategy_arguments"},
    "cli": API | {"api", "gds"},
    "__main__": {"cli"},
    "__init__": API | {"api"},
}
"""Module of the package: the modules of the package that it may import."""

TYPES_ONLY = {("store", "buffers")}
"""Imports under `if TYPE_CHECKING`: the store is given leases, and knows no pool."""

OTHER_PACKAGES = {
    "config": {"pydantic", "pydantic_core", "yaml"},
    "progress": {"tqdm"},
    "checkpoint_index": {"pydantic"},
    "checkpoint_reader": {"pydantic"},
    "values": {"numpy"},  # only for arrays, whose owner has it
    "cli": {"typer", "rich", "yaml", "matplotlib"},
    "lightning": {"lightning"},  # or pytorch_lightning, by its name
    "fabric": {"lightning"},  # or lightning_fabric
}
"""What may be imported besides torch and the standard library."""

PURE = {"errors", "layout", "schedule"}
"""Arithmetic: neither torch nor input and output."""

PURE_MODULES = {
    "__future__",
    "collections",
    "dataclasses",
    "enum",
    "errno",
    "functools",
    "itertools",
    "json",
    "math",
    "typing",
}


def modules() -> dict[str, list[Path]]:
    """The sources of each module of the package; a subpackage counts as one."""
    found: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        found.setdefault(path.relative_to(PACKAGE).parts[0].removesuffix(".py"), []).append(path)
    return found


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Dotted name of everything imported anywhere in the file, and whether only for types."""
    tree = ast.parse(path.read_text())
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}, line {node.lineno}: import by the full name, not relatively"
            assert node.module is not None
            # `from swapper import codec` names modules, `from swapper.codec import split_master` names one.
            names = [f"swapper.{alias.name}" for alias in node.names] if node.module == "swapper" else [node.module]
        else:
            continue
        for name in names:
            yield name, node in for_types


def imported(module: str) -> Iterator[tuple[str, bool]]:
    for path in modules()[module]:
        yield from imports(path)


@pytest.mark.parametrize("module", modules())
def test_a_module_imports_only_what_is_below_it(module: str) -> None:
    assert module in MAY_IMPORT, (
        f"swapper/{module}.py is not in the table of layers: add it to MAY_IMPORT in tests/test_layering.py, with the "
        "modules that it may import, and to the table of modules in ARCHITECTURE.md"
    )
    for name, for_types in imported(module):
        top, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if top == "swapper":
            allowed = target in MAY_IMPORT[module] or (for_types and (module, target) in TYPES_ONLY)
            assert allowed or target == module, f"swapper/{module}.py must not import swapper.{target}"
        elif top not in sys.stdlib_module_names and top != "torch":
            assert top in OTHER_PACKAGES.get(module, set()), (
                f"swapper/{module}.py imports {top}: a dependency is to be wanted, so it goes into OTHER_PACKAGES in "
                "tests/test_layering.py and into pyproject.toml"
            )


@pytest.mark.parametrize("module", sorted(PURE))
def test_a_pure_module_knows_neither_torch_nor_files(module: str) -> None:
    names = {name.partition(".")[0] for name, _ in imported(module)} - {"swapper"}
    # For `os.strerror` and `os.fspath`, which do nothing to any file.
    assert names <= PURE_MODULES | ({"contextlib", "os"} if module == "errors" else set())
    for path in modules()[module]:
        called = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        assert not {node.id for node in called if isinstance(node, ast.Name)} & {"open", "print", "input", "__import__"}


def test_only_the_layer_above_the_native_core_imports_it() -> None:
    users = {module for module in modules() for name, _ in imported(module) if name.startswith("swapper._native")}
    assert users <= {"handle", "gds", "codec", "buffers"}


def test_the_table_has_no_circle() -> None:
    done: set[str] = set()
    left = dict(MAY_IMPORT)
    while left:
        free = [module for module, below in left.items() if not (below - {module, "_native"}) & left.keys()]
        assert free, f"these modules may import each other: {sorted(left)}"
        done.update(free)
        for module in free:
            del left[module]


def test_swappers_do_not_know_each_other() -> None:
    assert not any(MAY_IMPORT[swapper] & SWAPPERS for swapper in SWAPPERS)


def test_the_package_itself_holds_names_only() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    for node in tree.body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        names = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("__all__", "__version__")
        assert docstring or names or isinstance(node, ast.ImportFrom), ast.unparse(node)


def test_nothing_is_submitted_inside_an_assert() -> None:
    # `python -O` would remove it.
    submitting = {"read", "write", "open", "wait", "stage", "take", "put", "acquire", "release", "submit"}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assert):
                calls = [call.func for call in ast.walk(node.test) if isinstance(call, ast.Call)]
                bad = [call.attr for call in calls if isinstance(call, ast.Attribute) and call.attr in submitting]
                assert not bad, f"{path.name}, line {node.lineno}: {bad}"
