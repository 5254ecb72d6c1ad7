"""A model in a checkpoint that all ranks save together. See [Note: ranks] of `ranks`.

A shard, and a tensor that is no DTensor and the same as on rank 0, is written once, by one of the ranks that have it:
by a second name of its record, if it is on disk, else to a file of what is in memory. What can be linked is linked
whole: the tensors of a record are one unit.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from swapper.checkpoint.index import SavedModel, SavedShards
from swapper.checkpoint.saved_model import (
    check_can_be_saved,
    encoded_metadata,
    encoded_value,
    flat_state_dict,
    linkable_records,
    record_file,
    save_tensors,
)
from swapper.checkpoint.writer import NewCheckpoint, RecordFile, checksum_of
from swapper.errors import SwapError
from swapper.parameter.cache import Held
from swapper.parameter.swapper import ParameterSwapper
from swapper.storage.store import RecordKey
from swapper.tensors.evicted_views import viewed_by
from swapper.tensors.homes import home_of
from swapper.tensors.sharded import Box, box_of, is_sharded, local_of, part_name

__all__ = ["ShardedModel"]


class _Shard(NamedTuple):
    """The local tensor of a DTensor: of tied ones, the first."""

    name: str
    box: Box
    whole: torch.Tensor

    @property
    def local(self) -> torch.Tensor:
        """The tensor that has it, evicted or not."""
        local = local_of(self.whole)
        return local if (parameter := viewed_by(local)) is None else parameter

    @property
    def length_bytes(self) -> int:
        """Bytes of the values."""
        return self.box.numel * self.whole.element_size()


class _Unit(NamedTuple):
    """Shards that are written in one piece or not at all; with the record that has them, and nothing else, if any."""

    shards: Sequence[_Shard]
    held: Held | None

    @property
    def key(self) -> str:
        """The same on each rank that has the same shards, in a record of their own or not."""
        return repr(sorted((shard.name, shard.box) for shard in self.shards))

    @property
    def length_bytes(self) -> int:
        """Bytes of the values."""
        return sum(shard.length_bytes for shard in self.shards)


class _PlainUnit(NamedTuple):
    """Tensors that are no DTensors, of one record or one in memory, that are written in one piece or not at all.

    `names` are their first ones. `key` is the same on each rank that has the same values.
    """

    names: Sequence[str]
    key: str
    length_bytes: int


class ShardedModel:
    """This rank's shards of a model that several save together, as it is now: it may not change until it is saved.

    Args:
        model: the user's own module.
        new: the checkpoint, for what is encoded.

    Attributes:
        units: what is written in one piece or not at all, with its length in bytes; see `state_units`.
        parts: of each of its shards, what it is of which tensor.
        sums: by name what tells whether two tensors that are no DTensors, or other values, are the same.

    Raises:
        SwapError: something cannot be saved.
        SwapIOError: a record that was changed could not be written, or one could not be read.
    """

    def __init__(self, model: torch.nn.Module, new: NewCheckpoint) -> None:
        self._model, self._new = model, new
        self._state = flat_state_dict(model)
        firsts = {id(value): (name, value) for name, value in reversed(self._state.items()) if is_sharded(value)}
        self._shards = {name: _Shard(name, box_of(value), value) for name, value in firsts.values()}
        for shard in self._shards.values():
            check_can_be_saved(shard.name, shard.local)
        self._units = self._cut()
        names: dict[int, str] = {}
        for name, value in self._state.items():
            if isinstance(value, torch.Tensor) and not is_sharded(value):
                names.setdefault(id(value), name)
        linked = [*linkable_records(model, {name: self._state[name] for name in names.values()})]
        self.sums = self._sums_of_others(names, linked)
        self._plain_units = self._cut_others(names, linked)
        self.units = [(unit.key, unit.length_bytes) for unit in self._units]
        self.units += [(unit.key, unit.length_bytes) for unit in self._plain_units]
        self.parts = [_part(shard) for shard in self._shards.values()]

    def _cut(self) -> list[_Unit]:
        units = []
        left = dict(self._shards)
        swapper = vars(self._model).get("swapper")
        for held in swapper.flushed_records() if isinstance(swapper, ParameterSwapper) else ():
            found = [left.get(location.name) for location in held.plan.locations]
            shards = [shard for shard in found if shard is not None]
            if held.plan.sharded and len(shards) == len(found) and _is_linkable(held, shards):
                units.append(_Unit(shards, held))
                for shard in shards:
                    del left[shard.name]
        return [*units, *(_Unit([shard], None) for shard in left.values())]

    def sums_of_parts(self, wanted: Container[str]) -> dict[str, tuple[str, int]]:
        """The name and the CRC-32C of those of `parts` that are wanted and have elements.

        Raises:
            SwapIOError: a record could not be read.
        """
        found = {}
        for unit in self._units:
            for position, shard in enumerate(unit.shards):
                if shard.box.numel and (part := _part(shard)) in wanted:
                    known = unit.held is not None and shard.local.is_contiguous()
                    crc = unit.held.checksums[position] if unit.held is not None and known else checksum_of(shard.local)
                    found[part] = (shard.name, crc)
        return found

    def _cut_others(self, names: Mapping[int, str], linked: Sequence[Held]) -> list[_PlainUnit]:
        records = [[location.name for location in held.plan.locations] for held in linked]
        in_records = {name for record in records for name in record}
        return [
            _PlainUnit(unit, repr([(name, self.sums[name]) for name in unit]), sum(self._state[n].nbytes for n in unit))
            for unit in (*records, *([name] for name in names.values() if name not in in_records))
        ]

    def _sums_of_others(self, names: Mapping[int, str], linked: Sequence[Held]) -> dict[str, object]:
        known = {
            id(location.parameter): crc
            for held in linked
            for location, crc in zip(held.plan.locations, held.checksums, strict=True)
            if location.parameter.is_contiguous()
        }
        found: dict[str, object] = {}
        for name, value in self._state.items():
            if not isinstance(value, torch.Tensor):
                found[name] = self._new.summed(encoded_value(value, name, self._new), f"model.{name}.")
                self._new.drop_values(f"model.{name}.")
            elif not is_sharded(value):
                check_can_be_saved(name, value)
                crc = known[id(value)] if id(value) in known else checksum_of(value)
                found[name] = (crc, value.dtype, tuple(value.shape), names[id(value)])
        return found

    def save(self, rank: int, mine: Container[str], own: Collection[str]) -> SavedModel:
        """Put what this rank writes into the checkpoint: records by a second name, else written.

        Args:
            rank: of this process.
            mine: those of `units` that it writes.
            own: names of tensors that are no DTensors, and of other values, that differ from those of rank 0.

        Raises:
            SwapError: a tensor of the model has the name of a part.
            SwapIOError: the drive failed or is full.
        """
        saved = SavedModel(tensors={}, tied={}, values={})
        first_names = {id(shard.whole): shard.name for shard in self._shards.values()}
        for name, value in self._state.items():
            if is_sharded(value) and (first := first_names[id(value)]) != name:
                saved.tied[name] = first
            elif is_sharded(value):
                saved.sharded[name] = SavedShards(shape=list(value.shape), parts={})
        memory: dict[str, torch.Tensor] = {}
        files: dict[RecordKey, RecordFile] = {}
        for unit in filter(lambda unit: unit.key in mine, self._units):
            if unit.held is not None:
                files[unit.held.key] = record_file(unit.held, self._new, saved.tensors)
            for shard in unit.shards:
                if not shard.box.numel and shard.whole.numel():
                    continue
                piece = _free_name(part_name(shard.name, shard.box), self._state)
                saved.sharded[shard.name].parts[piece] = list(shard.box.offsets)
                if unit.held is None:
                    # Evicted it stays so, until it is written: what it is detached to would keep its record in memory.
                    memory[piece] = shard.local if home_of(shard.local) is not None else shard.local.detach()
        if files:
            self._new.add_records(vars(self._model)["swapper"].store, files)
        plain = {name: value for name, value in self._state.items() if not is_sharded(value)}
        # A unit that has something of this rank's own has another key than that of rank 0, which is written.
        units = [each for each in self._plain_units if each.key in mine and not {*each.names} & {*own}]
        written = {id(plain[name]) for unit in units for name in unit.names}
        others = {
            name: value
            for name, value in plain.items()
            if (id(value) in written if isinstance(value, torch.Tensor) else rank == 0) and name not in own
        }
        for name in own:
            if not isinstance(plain[name], torch.Tensor):
                saved.own_values[name] = {str(rank): encoded_value(plain[name], name, self._new)}
                continue
            piece = _free_name(f"{name}@r{rank}", self._state)
            memory[piece] = plain[name]
            saved.own[name] = {str(rank): piece}
        whole = save_tensors(others, self._new, self._model, memory)
        whole.sharded, whole.own, whole.own_values = saved.sharded, saved.own, saved.own_values
        whole.metadata = encoded_metadata(self._state, self._new) if rank == 0 else None
        whole.tied |= saved.tied
        whole.tensors |= saved.tensors
        return whole


def _is_linkable(held: Held, shards: Sequence[_Shard]) -> bool:
    """True if the record's file has the shards of the state dict, as they were cut when it was laid out."""
    return all(
        shard.local is location.parameter
        and shard.box.sizes == tuple(location.shape)
        and part_name(shard.name, shard.box) == entry.name
        for shard, location, entry in zip(shards, held.plan.locations, held.plan.layout.entries, strict=True)
    )


def _part(shard: _Shard) -> str:
    return repr((shard.name, shard.box))


def _free_name(piece: str, state: Mapping[str, Any]) -> str:
    if piece in state:
        raise SwapError(
            f"{piece} is the name of a tensor of the model, and a part of another would have it in the files; rename it"
        )
    return piece
