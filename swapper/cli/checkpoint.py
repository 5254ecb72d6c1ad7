"""`swapper checkpoint show`, `verify`, `export` and `import`."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from swapper.checkpoint.index import INDEX, SavedOptimizer, SavedSegment, glance
from swapper.checkpoint.reader import Checkpoint
from swapper.checkpoint.values import decode
from swapper.cli.arguments import AsJson
from swapper.cli.output import fail_if, make_console, print_json, print_table, say
from swapper.errors import SwapError, show, system_errors
from swapper.progress import progress_bar
from swapper.sizes import format_bytes

if TYPE_CHECKING:
    from swapper.checkpoint.export import Exported
    from swapper.checkpoint.plain_import import Imported

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Show, check, export and import checkpoints.")

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint, as swapper.save_checkpoint writes it.")]
Annexes = Annotated[
    list[Path] | None,
    typer.Option("--annex", metavar="DIR", help="Where annexes are now, if they were moved. May be repeated."),
]
Force = Annotated[bool, typer.Option("--force", help="Replace what is there.")]

_KINDS = (
    ("model-memory.", "parameters and buffers in memory"),
    ("model.safetensors.index", "index for other tools"),
    ("model-", "parameter records"),
    ("values.", "small tensors"),
    ("config.json", "the model's config"),
)
_RANK = re.compile(r"(^model|^values|^optimizer-[0-9]+)-r[0-9]+(?=[-.])")
"""The part of a file's name that says which rank has written it."""


# --- show ------------------------------------------------------------------------------------------------------------


@app.command("show")
def show_checkpoint(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint, or a directory of checkpoints.")],
    annex: Annexes = None,
    as_json: AsJson = False,
) -> None:
    """Show what is in a checkpoint.

    Of a directory of checkpoints it shows a line each, the newest last. Annexes need not be reached.

    \b
    Example:
        swapper checkpoint show runs/step-1000
    """
    if directory.is_dir() and not os.path.lexists(directory / INDEX):
        _show_all(directory, as_json)
        return
    with Checkpoint(directory, annexes=annex or ()) as checkpoint:
        described = _describe(checkpoint)
    if as_json:
        print_json(described)
    else:
        _print_one(described)


def _describe(checkpoint: Checkpoint) -> dict[str, Any]:
    index, paths = checkpoint.index, checkpoint.annexes
    wholes = index.model.wholes()
    return {
        **_in_short(checkpoint),
        "files": _files(checkpoint),
        "annexes": [
            {"host": annex.host, "path": annex.path, "found": None if (at := paths.path(n)) is None else str(at)}
            for n, annex in enumerate(index.annexes)
        ],
        "model": {
            "tensors": len(wholes),
            "numel": _numel_of_model(checkpoint),
            "length_bytes": sum(_length_bytes(checkpoint, name) for name in index.model.tensors),
            "dtypes": dict(Counter(dtype for dtype, _ in wholes.values())),
            "tied": index.model.tied,
            "values": sorted(index.model.values),
        },
        "optimizers": [_optimizer(checkpoint, number) for number in range(len(index.optimizers))],
        "extra": _extra(index.extra),
    }


def _length_bytes(checkpoint: Checkpoint, name: str) -> int:
    """Of a tensor of the model, as its file has it."""
    if checkpoint.reaches(checkpoint.index.model.tensors[name].file):
        stored = checkpoint.tensor(checkpoint.index.model.tensors[name].file, name)
        return stored.stop_bytes - stored.start_bytes
    dtype, shape = checkpoint.model_spec(name)
    return shape.numel() * dtype.itemsize


def _in_short(checkpoint: Checkpoint) -> dict[str, Any]:
    index = checkpoint.index
    length_bytes = sum(file.length_bytes for file in index.files.values())
    return {
        "path": str(checkpoint.directory),
        **{key: getattr(index, key) for key in ("step", "saved_at", "run", "sequence", "swapper", "torch")},
        "length_bytes": length_bytes + (checkpoint.directory / INDEX).stat().st_size,
    }


def _numel_of_model(checkpoint: Checkpoint) -> int:
    return sum(torch.Size(shape).numel() for _, shape in checkpoint.index.model.wholes().values())


def _files(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    kinds: dict[str, dict[str, Any]] = {}
    for name, file in checkpoint.index.files.items():
        name = _RANK.sub(r"\1", name)
        kind = next((words for start, words in _KINDS if name.startswith(start)), "others")
        if name.startswith("optimizer-"):
            number, _, rest = name.removeprefix("optimizer-").partition("-")
            where = "state in memory" if rest.startswith("memory") else "records"
            kind = f"{where} of optimizer {number}"
        found = kinds.setdefault(kind, {"kind": kind, "files": 0, "length_bytes": 0})
        found["files"] += 1
        found["length_bytes"] += file.length_bytes
    return list(kinds.values())


def _optimizer(checkpoint: Checkpoint, number: int) -> dict[str, Any]:
    saved = checkpoint.index.optimizers[number]
    options = decode(saved.options, f"optimizer {number}, options", checkpoint.small_tensor)
    state: dict[str, str] = {}
    for parameter in saved.parameters:
        for key in parameter.keys:
            state.setdefault(key, parameter.dtypes.get(key, "small"))
            if key in parameter.dtypes:
                encoding = parameter.encodings.get(key)
                state[key] = parameter.dtypes[key] + (f" as {encoding}" if encoding else "")
    return {
        "class": saved.kind,
        "encoding": saved.encoding,
        "parameters": len(saved.wholes()),
        "with_state": sum(any(saved.parameters[part].keys for part in whole.parts) for whole in saved.wholes()),
        "state": state,
        "masters_numel": _masters(saved),
        "groups": [
            {"parameters": len(positions), "options": {key: _plain(value) for key, value in group.items()}}
            for group, positions in zip(options, saved.groups, strict=True)
        ],
    }


def _masters(saved: SavedOptimizer) -> dict[str, int]:
    """Elements that have a master, by how it is stored: split (beside the parameter), or whole."""
    found: Counter[str] = Counter()
    for segment in (segment for bucket in saved.buckets for segment in bucket.segments):
        if isinstance(segment, SavedSegment) and segment.parameter_crc32c is not None:
            found["split" if segment.master == "split" else "whole"] += segment.stop - segment.start
    return dict(found)


def _plain(value: object) -> object:
    """An option as JSON has it."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else show(value)


def _extra(data: Any) -> dict[str, str]:
    """The content of `extra` in words, by its keys if it is a dictionary, from how it is encoded."""
    if data is None:
        return {}
    if isinstance(data, dict) and not any(key.startswith("$") for key in data):
        return {key: _words(value) for key, value in data.items()}
    return {"": _words(data)}


def _words(data: Any) -> str:
    if isinstance(data, list):
        return f"list of {len(data)}"
    if not isinstance(data, dict):
        return show(data)
    if len(data) == 1 and (key := next(iter(data))).startswith("$"):
        inner = data[key]
        if key in ("$tensor", "$ndarray"):
            return f"{key[1:]} {inner['dtype']} {inner['shape']}"
        if isinstance(inner, dict):
            inner = inner.get("items", inner)
        return f"{key[1:]} of {len(inner)}" if isinstance(inner, (list, dict)) else f"{key[1:]} {show(inner)}"
    return f"dict of {len(data)}: {', '.join(list(data)[:6])}{', ...' if len(data) > 6 else ''}"


def _print_one(found: dict[str, Any]) -> None:
    step = "its optimizer counts no steps" if found["step"] is None else f"step {found['step']}"
    say(f"{found['path']}: {step}, {format_bytes(found['length_bytes'])}")
    say(f"  saved {found['saved_at']} by swapper {found['swapper']} with torch {found['torch']}")
    say(f"  checkpoint {found['sequence']} of run {found['run']}")
    say("")
    rows = [[files["kind"], str(files["files"]), format_bytes(files["length_bytes"])] for files in found["files"]]
    print_table(make_console(), ["FILES", "COUNT", "SIZE"], rows)
    for annex in found["annexes"]:
        at = "" if annex["found"] == annex["path"] else f", here {annex['found']}"
        say(f"annex {annex['path']} of host {annex['host']}{', not reached here' if annex['found'] is None else at}")
    say("")
    model = found["model"]
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in model["dtypes"].items())
    size = format_bytes(model["length_bytes"])
    say(f"model: {model['tensors']} tensors ({dtypes}), {model['numel']:,} elements, {size}")
    for name, first in model["tied"].items():
        say(f"  {name} is {first}")
    for name in model["values"]:
        say(f"  {name} is no tensor")
    for number, optimizer in enumerate(found["optimizers"]):
        say(f"optimizer {number}: {optimizer['class']}, encoding {optimizer['encoding']}")
        state = ", ".join(f"{key} ({dtype})" for key, dtype in optimizer["state"].items())
        say(f"  state of {optimizer['with_state']} of {optimizer['parameters']} parameters{': ' * bool(state)}{state}")
        for way, numel in optimizer["masters_numel"].items():
            beside = "low halves beside the parameters" if way == "split" else "whole"
            say(f"  master weights of {numel:,} elements, {beside}")
        for position, group in enumerate(optimizer["groups"]):
            options = ", ".join(f"{k} {v}" for k, v in group["options"].items() if v is not None and v is not False)
            say(f"  group {position}: {group['parameters']} parameters; {options}")
    for key, words in found["extra"].items():
        say(f"extra{f'[{key!r}]' if key else ''}: {words}")


def _show_all(directory: Path, as_json: bool) -> None:
    found: list[dict[str, Any]] = []
    errors: list[dict[str, str]] = []
    with system_errors("list", directory):
        paths = sorted(path for path in directory.iterdir() if not path.name.startswith(".") and path.is_dir())
    for path in paths:
        if os.path.lexists(path / INDEX):
            try:
                with Checkpoint(path) as checkpoint:
                    found.append({**_in_short(checkpoint), "numel": _numel_of_model(checkpoint)})
            except SwapError as error:
                if glance(path) is not None or not _is_of_others(path):
                    errors.append({"path": str(path), "error": str(error)})
    found.sort(key=lambda each: (each["saved_at"], each["run"], each["sequence"]))
    if as_json:
        print_json({"directory": str(directory), "checkpoints": found, "errors": errors})
    elif found:
        rows = []
        for each in found:
            step = "-" if each["step"] is None else str(each["step"])
            run = f"{each['run']} {each['sequence']}"
            size, numel = format_bytes(each["length_bytes"]), f"{each['numel']:,}"
            rows.append([step, each["saved_at"], size, numel, run, each["path"]])
        print_table(make_console(), ["STEP", "SAVED", "SIZE", "ELEMENTS", "RUN", "PATH"], rows)
    if not found and not errors:
        raise SwapError(f"{directory} is no checkpoint, and has none in it")
    fail_if([f"checkpoint show: {error['error']}" for error in errors])


def _is_of_others(path: Path) -> bool:
    """True if the file that has the name of an index is something else, of another program."""
    try:
        with open(path / INDEX, "rb") as file:
            return b'"swapper checkpoint"' not in file.read(200)
    except OSError:
        return False


# --- verify ----------------------------------------------------------------------------------------------------------


@app.command("verify")
def verify(directory: Directory, annex: Annexes = None, as_json: AsJson = False) -> None:
    """Compare every file with its checksum.

    Reads all of the checkpoint, its annexes too. Goes on after a file that is damaged or missing, and names each. The
    exit code is 1 then.

    \b
    Example:
        swapper checkpoint verify runs/step-1000
    """
    damaged: list[dict[str, str]] = []
    with Checkpoint(directory, check_files=False, annexes=annex or ()) as checkpoint:
        files = checkpoint.index.files
        length_bytes = sum(file.length_bytes for file in files.values())
        for number, saved in enumerate(checkpoint.index.annexes):
            try:
                checkpoint.annexes.refuse([number])
            except SwapError as error:  # Once, and not for each of its files.
                damaged.append({"file": saved.path, "error": str(error)})
        with progress_bar("verifying", length_bytes) as done:
            for name in filter(checkpoint.reaches, files):
                try:
                    checkpoint.check_file(name)
                    checkpoint.verify(name, done)
                    if name.endswith(".safetensors"):
                        checkpoint.table(name)
                except SwapError as error:
                    damaged.append({"file": name, "error": str(error)})
        # The index has a checksum of its own, which was compared when it was opened.
        length_bytes += (checkpoint.directory / INDEX).stat().st_size
        path = checkpoint.directory
        beside = {name for name, file in files.items() if file.annex is None}
        unknown = sorted(set(os.listdir(path)) - beside - {INDEX})
    counts = {"files": len(files) + 1, "length_bytes": length_bytes}
    if as_json:
        print_json({"path": str(path), **counts, "damaged": damaged, "unknown": unknown})
    else:
        for name in unknown:
            say(f"not of the checkpoint: {name}")
        verdict = f"{len(damaged)} damaged or missing" if damaged else "all as they were written"
        say(f"{path}: {counts['files']} files, {format_bytes(length_bytes)}, {verdict}")
    fail_if([f"checkpoint verify: {each['error']}" for each in damaged])


# --- export, import --------------------------------------------------------------------------------------------------


class _Format(str, Enum):
    torch = "torch"
    safetensors = "safetensors"
    dcp = "dcp"
    lightning = "lightning"


@app.command("export")
def export(
    directory: Directory,
    to: Annotated[_Format, typer.Option("--to", help="torch: one file for torch.load; lightning: as its own.")],
    out: Annotated[
        Path | None,
        typer.Argument(
            metavar="[OUT]", help="The file (torch, lightning) or directory to make. Default: beside DIR, by its name."
        ),
    ] = None,
    model_only: Annotated[bool, typer.Option("--model-only", help="Without optimizers and extra.")] = False,
    drop_masters: Annotated[
        bool, typer.Option("--drop-masters", help="Without master weights, which plain classes do not use.")
    ] = False,
    annex: Annexes = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint as ordinary files, for plain PyTorch. Memory is bounded, whatever the size.

    \b
    Examples:
        swapper checkpoint export runs/step-1000 --to torch  (runs/step-1000.pt)
        swapper checkpoint export runs/step-1000 --to safetensors --model-only weights/
        swapper checkpoint export runs/step-1000 --to dcp step-1000-dcp/
    """
    from swapper.checkpoint.export import export_checkpoint  # Distributed checkpoints take a second to import.

    suffixes = {"torch": ".pt", "safetensors": "-safetensors", "dcp": "-dcp", "lightning": "-lightning.ckpt"}
    name = Path(os.path.abspath(directory))
    out = out or name.with_name(name.name + suffixes[to.value])
    made = export_checkpoint(
        directory, to.value, out, model_only=model_only, drop_masters=drop_masters, force=force, annexes=annex or ()
    )
    _print_made(made, format_bytes(made.length_bytes), as_json)


@app.command("import")
def import_file(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="As torch.save writes it.")],
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="DIR", help="The checkpoint to make. Default: beside FILE, by its name."),
    ] = None,
    optimizer: Annotated[
        list[str] | None,
        typer.Option(help="The optimizer's class, such as torch.optim.AdamW. Once for each if there are several."),
    ] = None,
    model_key: Annotated[str | None, typer.Option(help="Where in the file the model's state dict is.")] = None,
    optimizer_key: Annotated[str | None, typer.Option(help="Where the optimizer's is, or a list of them.")] = None,
    drop: Annotated[list[str] | None, typer.Option(metavar="KEY", help="Leave this out. May be repeated.")] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Make a checkpoint of a file that torch.save has written.

    It is for swapper.load_checkpoint. The usual layouts are recognised, Lightning's too. What else is in the file is
    what load_checkpoint returns.

    \b
    Example:
        swapper checkpoint import epoch-3.pt --to runs/epoch-3 --optimizer torch.optim.AdamW
    """
    from swapper.checkpoint.plain_import import import_checkpoint

    made = import_checkpoint(
        file,
        to or file.with_name(f"{file.stem}-checkpoint"),
        optimizer=optimizer,
        model_key=model_key,
        optimizer_key=optimizer_key,
        drop=drop or (),
        force=force,
    )
    parts = ["the model, which is all of the file" if made.model_key is None else f"the model from {made.model_key!r}"]
    if made.optimizers:
        parts.append(f"{' and '.join(made.optimizers)} from {made.optimizer_key!r}")
    if made.extra_keys:
        parts.append(f"as extra: {', '.join(made.extra_keys)}")
    _print_made(made, "; ".join(parts), as_json)


def _print_made(made: Exported | Imported, words: str, as_json: bool) -> None:
    if as_json:
        print_json({**asdict(made), "path": str(made.path)})
        return
    say(f"{made.path}: {words}")
    for note in made.notes:
        say(f"note: {note}")
