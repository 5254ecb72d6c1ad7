"""The structure that ARCHITECTURE.md promises, enforced on the source: packages, imports, sizes, names."""

from __future__ import annotations

import ast
import enum
import functools
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from swapper.gradient.records import GradientState
from swapper.storage.cached_records import RecordState

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "swapper"

MOST_NAMES = 30
"""Packages, modules and files in `swapper/` itself."""

INSIDE: dict[str, set[str]] = {
    "io.host_handle": {"io._native", "io.backends", "io.file", "io.transfer"},
    "io.bounce": {"io.devices", "io.transfer"},
    "io.host_memory": {"io._native"},
    "io.fresh_memory": {"io.host_memory", "io._native"},
    "io.checksums": {"io.host_memory", "io._native"},
    "io.bf16_codec": {"io.host_memory", "io._native"},
    "optimizer.cuts": set(),
    "optimizer.int8_codec": set(),
    "optimizer.master_codec": set(),
    "optimizer.packing": set(),
    "storage.layout": set(),
    "storage.recycled_files": set(),
}
"""Module: all that it may import of its own package, where a package has layers of its own that matter."""

NATIVE = {
    "io.bf16_packing",
    "io.handle",
    "io.gds",
    "io.backends",
    "io.file",
    "io.transfer",
    "io.host_handle",
    "io.checksums",
    "io.bf16_codec",
    "io.host_memory",
    "io.fresh_memory",
    "optimizer.int8_codec",
    "optimizer.master_codec",
    "optimizer.packing",
    "optimizer.step_program",
    "storage.buffers",
}
"""Modules that import the native core, or take names of it from those that do."""

PURE = {"errors", "optimizer.cuts", "storage.layout", "storage.budget"}
"""Arithmetic: neither torch nor input and output."""

PURE_MODULES = {
    *("__future__", "collections", "copy", "dataclasses", "enum", "errno"),
    *("functools", "itertools", "json", "math", "typing"),
}


MOST_LINES = 600

RETIRED = {
    "away": "evicted",
    "dry_run": "check",
    "endings": "finalizers",
    "free_up": "reclaim",
    "hand_over_to": "release",
    "heap": "malloc_trim",
    "lasting": "mapped_copies",
    "let_go": "release",
    "lose": "discard",
    "nursery": "building",
    "part_with": "release",
    "pipeline": "cache",
    "references": "tensor_refs",
    "replicas": "ddp_sync",
    "saved_places": "saved_tensors",
    "settle": "wait, wait_quietly, flush or close",
    "settled": "flushed, or what is over",
    "shed": "evict or drop",
    "slot": "position",
    "spares": "recycled_files",
    "surrender": "release",
    "trial": "probe",
    "unhold": "release",
    "unswapped": "plain",
}
"""Words that no name in `swapper/` has any more, and the words to use: see the table of words in ARCHITECTURE.md."""

TOO_SHORT = {
    "Part": "the part of what: ShareFile, PartRecord, AddressRange",
    "Record": "the record of what: RecordFiles, RecordId, ArchiveEntry",
}
"""Words that are no name alone: more than one class had each."""

NO_BEGINNINGS = "How|That|Those|What|Whatever|When|Whenever|Where|Whether|Which|Who|Whose|Why"
"""Words with which no docstring in `swapper/` begins: they begin a clause, and not a sentence."""

STILL_SAID = {
    "dry_run": {"cli"},  # In `cli` it is an option of `swapper clean`, as users know it.
    "slot": {"optimizer", "check"},  # There it is memory of a device.
}
"""The packages in which a retired word is still said. To be emptied, but for what users know."""


class Row(NamedTuple):
    """A row of the table of packages in ARCHITECTURE.md."""

    imports: set[str]
    others: set[str]


def table() -> dict[str, Row]:
    """The table of packages in ARCHITECTURE.md: package, what it holds, what it may import, of others besides torch."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    section = text[text.index("## Packages") :].partition("\n## ")[0] if "## Packages" in text else ""
    rows: dict[str, Row] = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 4:
            for package in re.findall(r"`(\w+)`", cells[0]):
                rows[package] = Row(set(re.findall(r"`(\w+)`", cells[2])), set(re.findall(r"`(\w+)`", cells[3])))
    return rows


def modules() -> dict[str, Path]:
    """Every module by its dotted name within `swapper`; a package's `__init__` by the package's name."""
    found = {}
    for path in sorted(SOURCES.rglob("*.py")):
        parts = path.relative_to(SOURCES).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


MODULES = modules()
ROWS = table()


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def package_of(module: str) -> str:
    return module.partition(".")[0]


@functools.cache
def imports(path: Path) -> list[tuple[str, str, bool]]:
    """All that a file imports, anywhere: dotted module, the name taken from it or "", whether for types only."""
    return list(_imports(path))


def _imports(path: Path) -> Iterator[tuple[str, str, bool]]:
    tree = parsed(path)
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "", node in for_types) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}, line {node.lineno}: import by the full name, not relatively"
            assert node.module is not None
            for alias in node.names:
                # `from swapper.io import bounce` names a module, `from swapper.io.bounce import Bounce` a name.
                module = f"{node.module}.{alias.name}"
                known = module.removeprefix("swapper.")
                is_module = module.startswith("swapper.") and (known in MODULES or known == "io._native")
                yield (module, "", node in for_types) if is_module else (node.module, alias.name, node in for_types)


def ours(path: Path) -> Iterator[tuple[str, str, bool]]:
    """What a file imports of `swapper`, by the dotted name within it."""
    for module, name, for_types in imports(path):
        if module == "swapper" or module.startswith("swapper."):
            yield module.removeprefix("swapper").removeprefix(".") or "__init__", name, for_types


def test_a_module_imports_only_packages_below_its_own() -> None:
    for module, path in MODULES.items():
        package = package_of(module)
        assert package in ROWS, f"{package} is not in the table of packages in ARCHITECTURE.md"
        row = ROWS[package]
        for target, _, _ in ours(path):
            below = package_of(target)
            assert below == package or below in row.imports, f"swapper.{module} must not import swapper.{target}"
        for target, _, _ in imports(path):
            top = target.partition(".")[0]
            if top not in sys.stdlib_module_names and top not in ("torch", "swapper"):
                assert top in row.others, f"swapper.{module} imports {top}, not said of {package} in ARCHITECTURE.md"


def rows_of(heading: str) -> list[list[set[str]]]:
    """The backquoted words of each cell of the first table after a line of ARCHITECTURE.md."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    lines = text[text.index(heading) :].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|---"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start + 1 :])
    return [[set(re.findall(r"`([\w.]+)`", cell)) for cell in line.strip("|").split("|")] for line in rows]


def classes() -> dict[str, str]:
    """The source of each class of the package, by its name, with the module around it."""
    return {
        node.name: path.read_text()
        for path in MODULES.values()
        for node in parsed(path).body
        if isinstance(node, ast.ClassDef)
    }


def test_what_is_found_by_a_key_is_where_the_table_says() -> None:
    known = classes()
    for structures, _, owners, ends in rows_of("### What is found by a key"):
        (owner,) = owners
        assert owner in known, owner
        for name in structures | {end for end in ends if not end[0].isupper()}:
            where = [known[owner]] if name in structures else known.values()
            assert any(re.search(rf"\b{name}\b", source) for source in where), f"{name} of {owner}"


@pytest.mark.parametrize(
    ("heading", "states"), [("A record that is not only on disk", RecordState), ("## Gradients", GradientState)]
)
def test_the_states_are_those_of_the_table(heading: str, states: type[enum.Enum]) -> None:
    assert [state for row in rows_of(heading) for state in row[0]] == [state.name for state in states]


def test_policies_are_those_of_the_table() -> None:
    for policies, *_ in rows_of("## One cache"):
        assert policies <= set(classes())


def test_the_table_names_what_there_is() -> None:
    assert set(ROWS) == {package_of(module) for module in MODULES}


def test_imports_between_packages_go_one_way() -> None:
    left = {package: row.imports - {package} for package, row in ROWS.items()}
    while left:
        free = [package for package, below in left.items() if not below & left.keys()]
        assert free, f"these packages may import each other: {sorted(left)}"
        for package in free:
            del left[package]


def test_modules_do_not_import_each_other_in_circles() -> None:
    left = {
        module: {target for target, _, for_types in ours(path) if not for_types and target in MODULES} - {module}
        for module, path in MODULES.items()
    }
    while left:
        free = [module for module, below in left.items() if not below & left.keys()]
        assert free, f"these modules import each other: {left}"
        for module in free:
            del left[module]


@pytest.mark.parametrize("module", INSIDE)
def test_a_module_imports_what_its_package_allows(module: str) -> None:
    within = {target for target, _, for_types in ours(MODULES[module]) if not for_types}
    assert {target for target in within if package_of(target) == package_of(module)} <= INSIDE[module]


def test_nothing_private_is_imported() -> None:
    for module, path in MODULES.items():
        for target, name, _ in ours(path):
            assert not name.startswith("_"), f"swapper.{module} imports {name} of swapper.{target}"
            if target.rpartition(".")[2].startswith("_") and target not in ("__init__",):
                assert target == "io._native" and module in NATIVE, f"swapper.{module} must not import swapper.{target}"


def test_swappers_do_not_know_each_other() -> None:
    swappers = {"optimizer", "gradient", "parameter"}
    assert not any(ROWS[swapper].imports & swappers for swapper in swappers)


@pytest.mark.parametrize("module", sorted(PURE))
def test_a_pure_module_knows_neither_torch_nor_files(module: str) -> None:
    names = {target.partition(".")[0] for target, _, _ in imports(MODULES[module])} - {"swapper"}
    # For `os.strerror` and `os.fspath`, which do nothing to any file.
    assert names <= PURE_MODULES | ({"contextlib", "os"} if module == "errors" else set())
    called = [node.func for node in ast.walk(parsed(MODULES[module])) if isinstance(node, ast.Call)]
    assert not {node.id for node in called if isinstance(node, ast.Name)} & {"open", "print", "input", "__import__"}


def test_the_package_itself_holds_few_names() -> None:
    names = {path.name for path in SOURCES.iterdir() if path.name != "__pycache__"}
    assert len(names) <= MOST_NAMES, sorted(names)


@pytest.mark.parametrize("module", ["__init__", *sorted({package_of(module) for module in MODULES if "." in module})])
def test_a_package_says_its_purpose_and_holds_names_only(module: str) -> None:
    tree = parsed(MODULES[module])
    assert ast.get_docstring(tree), f"swapper.{module} does not say what it is for"
    if module in ("cli", "fabric", "lightning"):
        return  # Commands and packages that are registered when they are imported.
    for node in tree.body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        names = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("__all__", "__version__")
        for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        on_demand = isinstance(node, ast.FunctionDef) and node.name == "__getattr__"
        imports_names = isinstance(node, ast.ImportFrom) or for_types or on_demand
        assert docstring or names or imports_names, ast.unparse(node)


def test_a_module_is_not_long() -> None:
    paths = [*MODULES.values(), *(ROOT / "csrc").iterdir()]
    assert not [path for path in paths if len(path.read_text().splitlines()) > MOST_LINES], "split them by noun"


def defined(path: Path) -> Iterator[tuple[str, int]]:
    """All names that a file gives to something, and their lines."""
    yield path.stem, 1
    for node in ast.walk(parsed(path)):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node.lineno
            case ast.arg():
                yield node.arg, node.lineno
            case ast.Name(ctx=ast.Store()):
                yield node.id, node.lineno
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr, node.lineno


def test_no_name_has_a_retired_word() -> None:
    said = []
    for module, path in MODULES.items():
        for name, line in defined(path):
            words = "_".join(re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)).lower()
            for word, instead in RETIRED.items():
                if f"_{word}_" in f"_{words}_" and package_of(module) not in STILL_SAID.get(word, ()):
                    said.append(f"swapper.{module}, line {line}: {name}; say {instead} instead of {word}")
    assert not said


def test_no_name_is_only_a_word_that_several_had() -> None:
    said = [
        f"swapper.{module}, line {line}: {name}; say {TOO_SHORT[name]}"
        for module, path in MODULES.items()
        for name, line in defined(path)
        if name in TOO_SHORT
    ]
    assert not said


def docstrings(path: Path) -> Iterator[tuple[str, int]]:
    """The docstrings of a module, its classes and functions, those below attributes and constants too; their lines."""
    for node in ast.walk(parsed(path)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield text, node.lineno


def test_no_docstring_begins_with_a_word_of_questions() -> None:
    """Say the verb, or torch's noun: "Return the ...", "The ...". In `config.settings` users read them as they are."""
    words = re.compile(rf"\s*({NO_BEGINNINGS})\b")
    said = [
        f"swapper.{module}, line {line}: {text.strip().splitlines()[0]}"
        for module, path in MODULES.items()
        for text, line in docstrings(path)
        if module != "config.settings" and words.match(text)
    ]
    assert not said


def test_nothing_is_submitted_inside_an_assert() -> None:
    # `python -O` would remove it.
    submitting = {"read", "write", "open", "wait", "stage", "take", "put", "acquire", "release", "submit"}
    for path in MODULES.values():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Assert):
                calls = [call.func for call in ast.walk(node.test) if isinstance(call, ast.Call)]
                bad = [call.attr for call in calls if isinstance(call, ast.Attribute) and call.attr in submitting]
                assert not bad, f"{path.name}, line {node.lineno}: {bad}"


def test_what_is_logged_of_an_error_is_its_text() -> None:
    """Handlers keep records, and an error has the frames of its traceback: with all that they and their callers know,
    as the optimizer that is about to die."""
    allowed = {"process/finalizers.py"}  # at the end of a process
    found = []
    for path in MODULES.values():
        errors: set[str | None] = {each.name for each in ast.walk(parsed(path)) if isinstance(each, ast.ExceptHandler)}
        for call in ast.walk(parsed(path)):
            if isinstance(call, ast.Call) and ast.unparse(call.func).startswith(("log.", "_log.")):
                given = [each for each in call.args if isinstance(each, ast.Name) and each.id in errors]
                options = {keyword.arg for keyword in call.keywords}
                with_traceback = ast.unparse(call.func).endswith("exception") or "exc_info" in options
                if (given or with_traceback) and str(path.relative_to(SOURCES)) not in allowed:
                    found.append(f"{path.name}, line {call.lineno}")
    assert found == []


FACTORIES = re.compile(
    r"torch\.(arange|asarray|as_tensor|empty|empty_permuted|empty_strided|eye|full|linspace|logspace|ones|rand|randint|randn|"
    r"randperm|scalar_tensor|sparse_coo_tensor|tensor|tril_indices|triu_indices|zeros)"
)


def test_a_tensor_is_made_on_a_device_that_the_call_names() -> None:
    """Else it is made where the user has asked by `torch.set_default_device` for tensors of his own."""
    for path in MODULES.values():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and FACTORIES.fullmatch(ast.unparse(node.func)):
                named = {"device", "out", None} & {keyword.arg for keyword in node.keywords}
                assert named, f"{path.name}, line {node.lineno}: {ast.unparse(node)}"


def test_only_values_of_numpy_need_numpy() -> None:
    """Torch can be without it: `Tensor.numpy` fails there."""
    users = {
        str(path.relative_to(SOURCES))
        for path in MODULES.values()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute) and node.attr == "numpy"
    }
    assert users == {"checkpoint/value_decoder.py"}


def test_modules_beside_the_package_have_names_of_their_own() -> None:
    """Several of these folders are on one process's path: of two modules with a name it imports the first it finds."""
    folders = ("tests/support", "tests/sim_device", "examples", "benchmarks")
    names = [path.stem for folder in folders for path in (ROOT / folder).glob("*.py") if path.stem != "__init__"]
    assert sorted({name for name in names if names.count(name) > 1}) == []
