"""One checkpoint that several ranks save together.

[Note: ranks] Each rank has parts of DTensors, by FSDP2 or tensor parallelism, or a replica of all, by DDP, and writes
them to files of its own in one directory that rank 0 has made: its records are linked, as ever. What several ranks
have alike (`Replicate`, tensors that are no DTensors) is written once, with annexes once on each host; who writes it is
chosen from what all of them say that they have, so that bytes are spread. Rank 0 puts together what they say of their
parts to one index, and publishes the directory when all have synced their files. Between any two of these steps all
ranks find out whether all of them have succeeded: if one has not, all raise, and rank 0 removes what is there.

    rank 0              others
    make a directory    -                   agree
    say what is here    say what is here    exchange: who writes what
    write, link, sync   write, link, sync   agree
    merge               -                   agree
    complete annex      complete annex      agree; where there are annexes
    publish             -                   exchange: did it?
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from swapper.checkpoint.additions import state_dict_of
from swapper.checkpoint.annexes import Adopt, OldAnnex, Outcome, annexes_of, host, remove_annexes, report_left
from swapper.checkpoint.directories import remove_replaced
from swapper.checkpoint.doubles import drop_doubles
from swapper.checkpoint.index import (
    SavedAnnex,
    SavedFile,
    SavedHole,
    SavedModel,
    SavedOptimizer,
    SavedSegment,
    SavedWhole,
)
from swapper.checkpoint.saved_shards import ShardedModel
from swapper.checkpoint.state_writer import (
    digest_of_options,
    names_of_parameters,
    save_state,
    state_units,
    sums_of_plain,
)
from swapper.checkpoint.streams import are_a_whole
from swapper.checkpoint.writer import NewCheckpoint
from swapper.errors import ConfigError, SwapError
from swapper.optimizer.plan import parameters_of
from swapper.storage.agreement import agreed, exchanged, gathered_by_first, rank_count, rank_of_process
from swapper.tensors.sharded import Box, box_of, part_name

__all__ = ["joined", "new_checkpoint", "publish", "remove_together", "save_part"]

log = logging.getLogger(__name__)


@dataclass
class _Offer:
    """The units that a rank could write, and digests of what ranks may have alike.

    `parts` are of the model, which ranks may have in other units. `place` is what sees the drive that it writes to:
    all, or with annexes its host, as far as is known. `options` are of each optimizer, and so is `plain`: the sums of
    parameters that are no DTensors and have state.
    """

    units: list[tuple[str, int]]
    parts: list[str]
    sums: dict[str, object]
    extra: bytes
    place: str
    options: list[bytes]
    plain: list[dict[int, int]]


@dataclass
class _Whole:
    """A parameter of an optimizer, of which a rank has a part."""

    name: str
    shape: list[int]
    stride: list[int]
    box: Box
    split: set[str]


@dataclass
class Saved:
    """Files and values of one rank. `own_extra`: its `extra` differs from rank 0's; else ranks but 0 leave it out."""

    rank: int
    files: dict[str, SavedFile]
    annex: SavedAnnex | None
    model: SavedModel
    optimizers: list[SavedOptimizer]
    wholes: list[list[_Whole]]
    extra: Any
    own_extra: bool
    step: int | None


@contextlib.contextmanager
def new_checkpoint(
    directory: str | os.PathLike[str], over_files: bool, annex: str | os.PathLike[str] | None
) -> Iterator[NewCheckpoint]:
    """The checkpoint that all ranks write to. Left behind by none, unless it was published."""
    rank = rank_of_process()
    with contextlib.ExitStack() as undo:
        new: NewCheckpoint | None = None
        with agreed():
            if rank == 0:
                new = NewCheckpoint(directory, over_files=over_files, rank=0, annex=annex)
                undo.callback(new.discard)
        place = None if annex is None else host()
        given = exchanged((place, None if new is None else (str(new.path), str(new.directory))))
        with agreed():
            without = [each for each, (there, _) in enumerate(given) if there is None]
            if 0 < len(without) < len(given):
                raise ConfigError(f"annex: ranks {without} give none, and the others do; give one on each, or on none")
        remove_old_annexes([] if new is None else new.old_annexes)
        with agreed():
            if new is None:
                assert given[0][1] is not None
                path, first = map(Path, given[0][1])
                new = NewCheckpoint(directory, rank=rank, path=path, annex=annex)
                undo.callback(new.discard)
                if not path.is_dir() or not _are_one(new.directory, first):
                    raise SwapError(
                        f"{new.directory} is another directory here than {first} on rank 0: ranks save one checkpoint "
                        "together, to a directory that all of them have"
                    )
        assert new is not None
        new.is_apart = place != given[0][0]
        yield new


def publish(new: NewCheckpoint, check: Callable[[Path], object]) -> Path | None:
    """Let a checkpoint whose index is written appear under its name. Collective.

    Args:
        check: as of `NewCheckpoint.seal`; called where rank 0 has not seen the annex.

    Returns:
        On rank 0 what had the name, as from `NewCheckpoint.publish`.
    """
    if new.annex is not None:
        try:
            with agreed():
                if new.is_apart:
                    check(new.path)
                new.annex.complete()
        except BaseException as error:
            # What is raised of a rank all know, and rank 0 does not publish. Of another failure, as when a rank is
            # gone, only rank 0 knows that.
            if isinstance(error, SwapError) or rank_of_process() == 0:
                new.annex.conclude(Outcome.WITHDRAWN)
            raise
    replaced, failure = None, None
    if rank_of_process() == 0:
        try:
            replaced = new.publish()
        except Exception as error:
            failure = error
    outcome = exchanged(new.outcome)[0]
    if new.annex is not None:
        new.annex.conclude(outcome)
    with agreed():
        if failure is not None:
            raise failure
    return replaced


def remove_old_annexes(annexes: Sequence[OldAnnex], adopt: Adopt = lambda _: False) -> None:
    """Remove annexes whose checkpoint is gone, each by a rank that reaches it. Collective; what cannot be is logged.

    Args:
        annexes: of rank 0; others give none.
    """
    annexes = exchanged([*annexes])[0]
    if not annexes:
        return
    # First the rank of the number: on the same drives it made it, and has a use for its files.
    rank, count = rank_of_process(), rank_count()
    left = exchanged(remove_annexes([each for each in annexes if each.number % count == rank], adopt))
    # Then any that has it, as where there are other ranks now.
    found = remove_annexes([each for some in left for each in some], adopt)
    everywhere = exchanged(found)
    if rank == 0:
        report_left(each for each in found if all(each in some for some in everywhere))


def remove_together(aside: Sequence[Path], adopt: Adopt) -> None:
    """Remove checkpoints, and their annexes, each by a rank that reaches it. Collective; what cannot be is logged.

    Args:
        aside: of rank 0: their temporary names; others give none.
    """
    found: list[Path] = []
    annexes: list[OldAnnex] = []
    for path in aside:
        try:
            annexes += annexes_of(path)
        except OSError as error:
            log.warning("%s is left for the next save to remove: %s", path, str(error))
        else:
            found.append(path)
    remove_old_annexes(annexes, adopt)  # First: if that ends in the middle, what names them is there for the next save.
    with agreed():  # All ranks find them gone.
        for path in found:
            remove_replaced(path, adopt, annexes_too=False)


def _are_one(directory: Path, first: Path) -> bool:
    """True if both are going to be one directory, beneath one that is there."""
    try:
        return directory.name == first.name and directory.parent.samefile(first.parent)
    except OSError:
        return False


def save_part(
    model: torch.nn.Module, optimizers: Sequence[Optimizer], extra: object, new: NewCheckpoint
) -> list[Saved]:
    """Write what this rank has. Collective.

    Returns:
        What all ranks have written; nothing on other ranks than 0.
    """
    rank = rank_of_process()
    with agreed():
        encoded = new.encode(extra, "extra", "extra.")
        state_dicts = [state_dict_of(each) for each in optimizers]
        shards = ShardedModel(model, new)
        units = [unit for number, each in enumerate(optimizers) for unit in state_units(each, number)]
        offer = _Offer(
            units=[*shards.units, *units],
            parts=shards.parts,
            sums=shards.sums,
            extra=new.summed(encoded, "extra."),
            place="" if new.annex is None else host(),
            options=[digest_of_options(each, i, state_dicts[i], new) for i, each in enumerate(optimizers)],
            plain=[sums_of_plain(each) for each in optimizers],
        )
    offers = exchanged(offer)
    mine = _share_out([each.units for each in offers], [each.place for each in offers])[rank]
    with agreed():
        _check_alike(offers, optimizers, names_of_parameters(model))
        sums = shards.sums_of_parts(_shared(offers))
    _check_same_parts(exchanged(sums))
    with agreed():
        own = [name for name, crc in offer.sums.items() if offers[0].sums[name] != crc]
        own_extra = offer.extra != offers[0].extra
        if rank and not own_extra:
            new.drop_values("extra.")
            encoded = None
        names = names_of_parameters(model)
        writers = [
            save_state(each, number, names, state_dicts[number], new, mine.__contains__)
            for number, each in enumerate(optimizers)
        ]
        if rank:  # All have the same, and that of the first rank is used.
            for number in range(len(optimizers)):
                new.drop_values(f"optimizer-{number}.options.")
                new.drop_values(f"optimizer-{number}.rest.")
        saved = Saved(
            rank=rank,
            files=new.files,
            annex=None if new.annex is None else new.annex.saved,
            model=shards.save(rank, mine, own),
            optimizers=[each.saved for each in writers],
            wholes=[
                [
                    _Whole(names.get(id(p), ""), list(p.shape), list(p.stride()), box_of(p), split)
                    for p, split in zip(parameters_of(optimizer), writer.split, strict=True)
                ]
                for optimizer, writer in zip(optimizers, writers, strict=True)
            ],
            extra=encoded,
            own_extra=own_extra,
            step=writers[0].step if writers else None,
        )
        new.publish_records()
        new.write_values()
        new.complete()
    return gathered_by_first(saved)


def _check_alike(offers: Sequence[_Offer], optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> None:
    first = offers[0]
    for rank, offer in enumerate(offers):
        if others := sorted(offer.sums.keys() ^ offers[0].sums.keys()):
            raise SwapError(
                f"the model of rank {rank} is not that of rank 0: only one of them has {others[0]}; ranks "
                "that save one checkpoint together have parts of one model"
            )
        if len(offer.options) != len(first.options):
            raise SwapError("ranks have different numbers of optimizers; give the same ones on each")
        for number, (here, there) in enumerate(zip(offer.options, first.options, strict=True)):
            if here != there:
                raise SwapError(
                    f"optimizer {number} of rank {rank} is of another class than that of rank 0, or its groups have "
                    "other options or numbers of parameters, or it adds other values to its state dict; ranks that "
                    "save one checkpoint together have the same"
                )
        for number, (sums, theirs) in enumerate(zip(offer.plain, first.plain, strict=True)):
            if sums != theirs:
                position = min({*sums.items()} ^ {*theirs.items()})[0]
                p = [*parameters_of(optimizers[number])][position]
                raise _differ(names.get(id(p)) or f"parameter {position} of optimizer {number}", 0, rank)


def _differ(name: str, one: int, other: int) -> SwapError:
    return SwapError(
        f"{name} or its optimizer state is not the same on ranks {one} and {other}, which both have it, and a "
        "checkpoint that ranks save together would have that of one; bring them together before it is saved "
        "(torch.distributed.broadcast), or give what is another on each rank another name, or a DTensor of all"
    )


def _shared(offers: Sequence[_Offer]) -> set[str]:
    """The parts of the model that several ranks have."""
    count = Counter(part for offer in offers for part in offer.parts)
    return {part for part, ranks in count.items() if ranks > 1}


def _check_same_parts(sums: Sequence[Mapping[str, tuple[str, int]]]) -> None:
    """Refuse DTensors of which ranks have the same elements with different values: all do, or none."""
    known: dict[str, tuple[int, int]] = {}
    for rank, each in enumerate(sums):
        for part, (name, crc) in each.items():
            one, expected = known.setdefault(part, (rank, crc))
            if crc != expected:
                raise _differ(name, one, rank)


def _share_out(units: Sequence[Sequence[tuple[str, int]]], places: Sequence[str]) -> list[set[str]]:
    """The units that each rank writes: each is written by one of those that have it, so that bytes are spread.

    Args:
        units: of each rank.
        places: of each rank. Each place has all units of its ranks.
    """
    having: dict[tuple[str, str], list[int]] = {}
    length_bytes: dict[str, int] = {}
    for rank, (each, place) in enumerate(zip(units, places, strict=True)):
        for unit, length in each:
            having.setdefault((unit, place), []).append(rank)
            length_bytes.setdefault(unit, length)
    load = [0] * len(units)
    chosen: list[set[str]] = [set() for _ in units]
    # The largest first: the rest evens out.
    for unit, place in sorted(having, key=lambda each: length_bytes[each[0]], reverse=True):
        rank = min(having[unit, place], key=load.__getitem__)
        load[rank] += length_bytes[unit]
        chosen[rank].add(unit)
    return chosen


# --- Rank 0 puts together what all say -------------------------------------------------------------------------------


def joined(saved: Sequence[Saved]) -> dict[str, Any]:
    """The fields of an index that are of what all ranks have written.

    Raises:
        SwapError: the parts are not those of one model and its optimizers.
    """
    files: dict[str, SavedFile] = {}
    for each in saved:
        files |= each.files
    return {
        "files": files,
        "annexes": [each.annex for each in saved if each.annex is not None],
        "ranks": len(saved),
        "step": next((each.step for each in saved if each.step is not None), None),
        "model": (model := _joined_model([each.model for each in saved], keeps_copies=saved[0].annex is not None)),
        "optimizers": [_joined_optimizer(saved, number, model) for number in range(len(saved[0].optimizers))],
        "extra": saved[0].extra,
        "own_extra": {str(each.rank): each.extra for each in saved[1:] if each.own_extra},
    }


def _joined_model(models: Sequence[SavedModel], keeps_copies: bool) -> SavedModel:
    whole = models[0]
    for model in models[1:]:
        if model.sharded.keys() != whole.sharded.keys():
            name = min(model.sharded.keys() ^ whole.sharded.keys())
            raise SwapError(f"{name} is a DTensor of only some ranks, which cannot be saved together")
        for name in model.tensors.keys() & whole.tensors.keys() if keeps_copies else ():
            whole.copies.setdefault(name, []).append(model.tensors.pop(name))
        whole.tensors |= model.tensors
        whole.tied |= model.tied
        for name, shards in model.sharded.items():
            whole.sharded[name].parts.update(shards.parts)
        for name, own in model.own.items():
            whole.own.setdefault(name, {}).update(own)
        for name, values in model.own_values.items():
            whole.own_values.setdefault(name, {}).update(values)
    for name, shards in whole.sharded.items():
        # Of a tensor without elements each rank has all.
        shards.parts = dict(list(shards.parts.items())[:1]) if 0 in shards.shape else shards.parts
        boxes = [Box(tuple(at), tuple(whole.tensors[part].shape)) for part, at in shards.parts.items()]
        _check_parts(name, boxes, shards.shape)
    return whole


def _check_parts(name: str, boxes: Sequence[Box], shape: Sequence[int]) -> None:
    if not are_a_whole(boxes, shape):
        raise SwapError(
            f"{name}: what ranks have of it are no boxes that make up its shape {list(shape)}, as with placements "
            "_StridedShard alone, or on meshes that not all ranks are in; use torch.distributed.checkpoint, also with "
            "swapper.dcp"
        )


def _joined_optimizer(saved: Sequence[Saved], number: int, model: SavedModel) -> SavedOptimizer:
    first = saved[0].optimizers[number]
    whole = SavedOptimizer(
        kind=first.kind,
        encoding=next((e for each in saved if (e := each.optimizers[number].encoding) != "exact"), "exact"),
        encoded_steps=first.encoded_steps,
        options=first.options,
        rest=first.rest,
        groups=first.groups,
        parameters=[],
        buckets=[],
        sharded=[],
    )
    wholes = saved[0].wholes[number]
    part_of: dict[tuple[int, Box], int] = {}
    for each in saved:
        mine = each.wholes[number]
        if [(p.name, p.shape) for p in mine] != [(p.name, p.shape) for p in wholes]:
            raise SwapError(
                f"optimizer {number} of rank {each.rank} does not have the parameters of that of rank 0; ranks that "
                "save one checkpoint together have parts of the same"
            )
    for position, p in enumerate(wholes):
        described = SavedWhole(
            name=p.name,
            shape=p.shape,
            stride=p.stride,
            dtype=first.parameters[position].dtype,
            parts=[],
            split=sorted(set().union(*(each.wholes[number][position].split for each in saved))),
        )
        for each in saved:
            box = each.wholes[number][position].box
            if (position, box) in part_of and each.optimizers[number].parameters[position].small is not None:
                whole.parameters[part_of[position, box]].small = each.optimizers[number].parameters[position].small
            if (position, box) in part_of or not (box.numel or 0 in p.shape) or (0 in p.shape and described.parts):
                continue
            part_of[position, box] = len(whole.parameters)
            described.parts.append(len(whole.parameters))
            parameter = each.optimizers[number].parameters[position]
            parameter.offsets = list(box.offsets)
            if (name := model.tied.get(p.name, p.name)) in model.sharded:
                parameter.name = part_name(name, box)
            whole.parameters.append(parameter)
        _check_parts(
            p.name or f"parameter {position} of optimizer {number}",
            [box for (of, box) in part_of if of == position],
            p.shape,
        )
        whole.sharded.append(described)
    for each in saved:
        for bucket in each.optimizers[number].buckets:
            for i, segment in enumerate(bucket.segments):
                if isinstance(segment, SavedSegment):
                    part = part_of.get((segment.parameter, each.wholes[number][segment.parameter].box))
                    if part is None:  # It has no elements.
                        bucket.segments[i] = SavedHole(hole=True, tie_bits=segment.tie_bits)
                    else:
                        encodings = each.optimizers[number].parameters[segment.parameter].encodings
                        if encodings != whole.parameters[part].encodings:  # Ranks choose what they pack.
                            segment.encodings = encodings
                        segment.parameter = part
            whole.buckets.append(bucket)
    if saved[0].annex is None:  # Else a reader chooses, who knows what it reaches.
        drop_doubles(whole)
    return whole
