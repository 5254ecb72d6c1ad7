"""The encodings of an optimizer's state on the drive, and the index of an element in its parameter.

[Note: encoded state] With `encoding: packed` float32 state takes fewer bytes on the drive, and nothing else changes:
see [Note: packed records] in `packing`. All that follows is about the others.

With `bf16` it is stored as bfloat16, in half the bytes, with `int8` in a byte, and 4 more for each block of 256. A step
decodes it to scratch, the class steps that, and it is encoded again, rounded at random ([Note: stochastic rounding] in
`csrc/bf16_codec.h`, [Note: blocks of 256] in `csrc/int8_codec.h`). A native step does all three to a tile of 256
elements at a time, and has in scratch only what two of its passes need. The random bits are a
function of the number of the step, of the parameter's number among those of the groups, of the state's name and of the
element's index in the whole parameter, in the order of memory. Blocks begin at multiples of 256 of that index, so state
in int8 is cut there, and a rank's part that begins elsewhere is refused. So bits depend on nothing that only says how
the work is cut: buckets, threads, the pool, drives, ranks. The number of the step goes with state dicts and
checkpoints, and a resumed run has the bits of one that went on. State that was decoded is encoded without a change,
whatever the random bits are, so saving and loading lose nothing.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from swapper.errors import ConfigError
from swapper.optimizer.int8_codec import BLOCK_NUMEL
from swapper.optimizer.probe import StateSpec
from swapper.sizes import SMALL_BYTES
from swapper.tensors.sharded import box_of, is_sharded, local_of
from swapper.tensors.strides import contiguous_stride, is_dense, same_order

__all__ = ["STEPS", "Encoding", "check_keys", "encoder_of", "first_index_of", "note_if_none", "steps_in"]

log = logging.getLogger(__name__)

STEPS = "swapper_encoded_steps"
"""Key in a state dict: the number of steps that random bits, of gradients too, have come to. torch passes it over."""

Encoding = str | Mapping[str, str]
"""As `offload_optimizer.encoding`."""

_KEPT = {
    "sum": "it only grows, and would stop where an addition is below its last digit",
    "max_exp_avg_sq": "it is a maximum, which rounding up at random would let grow without end",
    "step_size": "steps of Rprop are compared and multiplied, and do not average out",
    "prev": "only the sign of it counts, and zero is one",
    "ax": "it is an average of the parameters, and parameters are never encoded",
    "row_var": "it is of rows, and not of elements",
    "col_var": "it is of columns, and not of elements",
}
"""State that stays exact, and why."""

_KEPT_TOGETHER = {"square_avg", "grad_avg"}
"""State of `RMSprop(centered=True)`, which takes the root of the one less the square of the other: where gradients vary
little they are nearly equal, and the difference of what is rounded comes to be below zero."""


def encoder_of(
    wanted: Encoding, parameter: torch.nn.Parameter, state: Iterable[str]
) -> Callable[[StateSpec], StateSpec]:
    """Says of each tensor of the state of `parameter` how it is stored: what comes back has that encoding.

    Args:
        state: the names of all of them.

    Returns:
        A function that raises ConfigError if blocks of int8 would depend on the number of ranks.
    """
    keeps = {*_KEPT, *(_KEPT_TOGETHER if {*state} >= _KEPT_TOGETHER else ())}
    local = local_of(parameter)
    shape = tuple(local.shape)
    stride = tuple(local.stride()) if is_dense(local) else contiguous_stride(shape)
    is_small = parameter.numel() * torch.float32.itemsize < SMALL_BYTES  # By the whole: the same on all ranks.

    def encode(spec: StateSpec) -> StateSpec:
        encoding = wanted if isinstance(wanted, str) else wanted.get(spec.key, "exact")
        if encoding == "exact" or is_small or (spec.key in keeps and encoding != "packed"):
            return spec
        if spec.dtype is not torch.float32 or spec.shape != shape or not same_order(shape, spec.stride, stride):
            return spec
        if encoding == "int8":  # Also on ranks that have nothing of it: all refuse alike.
            _check_blocks(parameter)
        if not local.numel():
            return spec
        return dataclasses.replace(spec, encoding=encoding)

    return encode


def _check_blocks(parameter: torch.nn.Parameter) -> None:
    """Raise `ConfigError` for a DTensor of which some rank's part does not begin with a block."""
    if not is_sharded(parameter):
        return
    shape = tuple(parameter.shape)
    row_numel = math.prod(shape[1:])
    # By what is the same on all ranks: the numbers of rows that some rank has, of which each sharding makes parts.
    counts = {shape[0] if shape else 1}
    for each, count in zip(parameter.placements, parameter.device_mesh.shape, strict=True):  # type: ignore[attr-defined]
        if type(each).__name__ != "Shard":
            continue
        parts = {rows: -(-rows // count) for rows in counts if rows}
        for rows, part in parts.items():
            if part < rows and part * row_numel % BLOCK_NUMEL:
                raise ConfigError(
                    f"offload_optimizer.encoding: int8 has blocks of {BLOCK_NUMEL} elements, and ranks have {part} "
                    f"rows of {row_numel} elements each of a DTensor of shape {shape}, which are no whole blocks, so "
                    "that bits would depend on the number of ranks; use bf16 for its state, or another number of ranks"
                )
        counts = {found for rows, part in parts.items() for found in (part, rows % part)}


def check_keys(wanted: Encoding, name: str, known: Iterable[str]) -> None:
    """Refuse keys that are to be encoded and cannot be.

    Args:
        name: of the optimizer's class.
        known: the names of all tensors in its state; none if it has no parameter yet.

    Raises:
        ConfigError: names the key.
    """
    keys = {} if isinstance(wanted, str) else {k: encoding for k, encoding in wanted.items() if encoding != "exact"}
    there = sorted(set(known))
    for key, encoding in keys.items():
        if encoding != "packed" and key in _KEPT:
            raise ConfigError(f"offload_optimizer.encoding: {key} is always exact: {_KEPT[key]}; leave it out")
        if encoding != "packed" and key in _KEPT_TOGETHER and {*there} >= _KEPT_TOGETHER:
            raise ConfigError(
                f"offload_optimizer.encoding: {key} of {name}(centered=True) is always exact: it takes the root of a "
                "difference that rounding would make negative; leave it out"
            )
        if there and key not in there:
            raise ConfigError(
                f"offload_optimizer.encoding: the state of {name} has no {key!r}; it has {', '.join(there)}"
            )


def note_if_none(name: str, are_encoded: Iterable[bool]) -> None:
    """Say in the log that the setting has no effect, where no parameter of an optimizer has encoded state.

    Args:
        name: of the optimizer's class.
        are_encoded: of each segment, whether some of its state is.
    """
    each = list(are_encoded)
    if each and not any(each):
        log.warning(
            "offload_optimizer.encoding: no state of %s is encoded: it is none, small, not fp32, or always exact",
            name,
        )


def steps_in(state_dict: Mapping[str, Any]) -> int:
    """Return the number of steps made when `state_dict` was saved; 0 if it does not say."""
    steps = state_dict.get(STEPS)
    return steps if type(steps) is int and steps >= 0 else 0


def first_index_of(parameter: torch.nn.Parameter, name: str, is_collective: bool, rounds_state: bool) -> int:
    """The index in all of a parameter of the first element that this rank has.

    Args:
        name: of the optimizer's class.
        is_collective: DTensors are stepped as that, with collectives.
        rounds_state: state is rounded; else only gradients are, whatever steps them.

    Raises:
        ConfigError: what this rank has is no run of elements, or its class does not step those alone.
    """
    if not is_sharded(parameter):
        return 0
    if is_collective and rounds_state:
        raise ConfigError(
            f"offload_optimizer.encoding: {name}, which is not known to be elementwise, steps DTensors with "
            "collectives, and its state is not encoded in this version of swapper; use encoding: exact"
        )
    setting, what = ("offload_optimizer", "state is") if rounds_state else ("offload_gradient", "gradients are")
    shape, box = tuple(parameter.shape), box_of(parameter)
    # By what is the same on all ranks, so that all refuse alike.
    has_rows = all(
        type(each).__name__ == "Replicate" or count == 1 or (type(each).__name__ == "Shard" and each.dim == 0)
        for each, count in zip(parameter.placements, parameter.device_mesh.shape, strict=True)  # type: ignore[attr-defined]
    )
    is_run = has_rows and same_order(shape, tuple(parameter.stride()), contiguous_stride(shape))
    if not is_run:
        raise ConfigError(
            f"{setting}.encoding: a parameter is a DTensor of shape {shape} with placements "
            f"{parameter.placements}, and {what} encoded only where ranks have whole rows, as "  # type: ignore[attr-defined]
            "Shard(0) gives them; use encoding: exact"
        )
    return box.offsets[0] * math.prod(shape[1:]) if box.offsets else 0
