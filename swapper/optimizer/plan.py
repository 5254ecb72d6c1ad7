"""`OptimizerPlan`: the parameters of an optimizer, the cuts of their state, and the memory that it needs.

It knows everything before anything is allocated. `PlanFollower` then gives it room, and has it follow `param_groups`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from swapper.config import OffloadConfig
from swapper.errors import ConfigError
from swapper.io.devices import is_accelerator
from swapper.optimizer.encodings import check_keys, encoder_of, first_index_of, note_if_none
from swapper.optimizer.group_probe import refuse_group
from swapper.optimizer.probe import (
    LOW_PRECISION,
    StateSpec,
    is_elementwise,
    keeps_bits,
    learn_state,
    refuse_broken_fused,
    refuse_lazy,
    refuse_parameter,
    refuse_unsupported,
    same_bits_for_strides,
)
from swapper.optimizer.segments import (
    DEVICE_SEGMENT_NUMEL,
    SEGMENT_NUMEL,
    Bucket,
    OptimizerParameter,
    Segment,
    grouped,
    plan_buckets,
    plan_segments,
)
from swapper.optimizer.single_settings import Settings, settings_of
from swapper.optimizer.step_device import device_of, has_room, may_step_on_device, step_bytes
from swapper.optimizer.step_function import has_step_of_torch
from swapper.sizes import PAGE_BYTES, round_up
from swapper.storage.budget import IN_FLIGHT, Schedule, plan_schedule
from swapper.tensors.sharded import local_of

__all__ = ["OptimizerPlan", "parameters_of", "plan_to_show", "swaps_state_of"]

log = logging.getLogger(__name__)


class OptimizerPlan:
    """The buckets of one optimizer.

    Args:
        optimizer: the user's. Not kept.
        config: `bucket_bytes` and `offload_optimizer` count here.
        owner: number of this optimizer among those of the process; part of every record's key.
        records: see `plan_buckets`.
        swaps_state: False for `device: none`: nothing is planned, and the state stays in `optimizer.state`.

    Attributes:
        buckets: in the order in which they are stepped.
        device: of the parameters.
        on_accelerator: it is one.
        on_device: buckets are stepped on the accelerator that the parameters are on.
        remote: they are stepped on the CPU, on copies.
        threads: `torch.get_num_threads()` that the cuts are right for.
        scratch_count: scratch buffers that a step holds. Of a `remote` one, one is copied into while the other is in
            use. On an accelerator scratch is its own.
        gradient_accumulation_steps: gradients that each parameter gets before a step.
        step_in_backward: buckets are stepped as their gradients arrive. `native_step`: see `NativeSteps`.
        encodings: names of those that state may have but "exact", with commas; `encodes`: there are some; `rounds`:
            some of them are lossy. See [Note: encoded state] in `encodings`. `encoding_reason`: see `choose_encoding`.
        counts_steps: state or gradients are rounded, by bits that depend on the number of the step.

    Raises:
        ConfigError: the optimizer, or a parameter of it, cannot be swapped.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        config: OffloadConfig,
        owner: int,
        records: Mapping[torch.Tensor, tuple[int, int]] | None = None,
        *,
        swaps_state: bool = True,
    ) -> None:
        self.swaps_state = swaps_state
        self.config = config
        self._owner = owner
        self._records: Mapping[torch.Tensor, tuple[int, int]] = records or {}
        self.threads = torch.get_num_threads()
        parameters = list(parameters_of(optimizer)) if swaps_state else []
        self.device = device_of(parameters)
        self.on_accelerator = is_accelerator(self.device)
        self.gradient_accumulation_steps = config.gradient_accumulation_steps
        state = config.offload_optimizer
        self.step_in_backward, self.native_step = state.step_in_backward, state.native_step
        asked, wanted = state.step_device, [p for p in parameters if p.requires_grad]
        self.encodings, self.encodes, self.rounds = state.encodings, state.encodes, state.rounds
        self.counts_steps = self.rounds or config.offload_gradient.encoding != "exact"
        self.encoding_reason = ""
        on_device = swaps_state and may_step_on_device(asked, self.device, self.encodes)
        try:
            self._plan_for(optimizer, wanted, on_device)
            scratch_bytes = max((bucket.scratch_bytes for bucket in self.buckets), default=0)
            if not on_device or asked != "auto" or has_room(self.device, self.slot_bytes, scratch_bytes):
                return
        except (ConfigError, torch.OutOfMemoryError) as error:  # A trial step failed, on the device or anyway.
            if not on_device or asked != "auto":
                raise
            log.warning(
                "steps are made on the CPU, with its bits, because a trial on %s failed: %s", self.device, str(error)
            )
        self._plan_for(optimizer, wanted, False)

    def _plan_for(self, optimizer: Optimizer, wanted: Sequence[torch.nn.Parameter], on_device: bool) -> None:
        """Plan `wanted`, and nothing else, for steps on the device of the parameters, or on the CPU."""
        self.on_device = on_device
        self.remote = self.on_accelerator and not on_device
        self.scratch_count = 0 if on_device else 2 if self.remote else 1
        self._segmented: dict[tuple[Any, ...], bool] = {}
        self._strides_may_differ: dict[tuple[Any, ...], bool] = {}
        self._specs: dict[tuple[Any, ...], tuple[StateSpec, ...]] = {}
        self._parameters: dict[int, OptimizerParameter] = {}  # by `id`; `of` compares the object
        self._dropped: list[Bucket] = []  # for `drop_gone`
        self._next_index = 0
        self.moved: OptimizerParameter | None = None  # is in a group, and on another device than it was planned on
        self._is_wasteful = False  # more than half of all elements in the buckets are of parameters that are gone
        self.buckets: list[Bucket] = []
        self.extend(optimizer, wanted)

    # --- Parameters ------------------------------------------------------------------------------------------------

    def of(self, parameter: torch.Tensor) -> OptimizerParameter | None:
        """The plan's own object of a parameter; None if it is not planned."""
        known = self._parameters.get(id(parameter))
        return known if known is not None and known.refers_to(parameter) else None

    def planned(self) -> list[OptimizerParameter]:
        """Each parameter that is planned and not gone, in a group or not."""
        return [known for known in self._parameters.values() if not known.is_gone]

    def with_state(self) -> list[torch.nn.Parameter]:
        """The parameters that have state, in a group or not."""
        return [known.parameter for known in self.planned() if known.has_state]

    def segments_of(self, parameter: torch.nn.Parameter) -> tuple[Segment, ...]:
        """The parameter's segments in order; () if it is not planned."""
        known = self.of(parameter)
        return () if known is None else known.segments

    def is_planned(self, parameter: torch.nn.Parameter) -> bool:
        """True if the buckets have segments of the parameter."""
        return bool(self.segments_of(parameter))

    def check_unchanged(self, parameter: torch.nn.Parameter) -> None:
        """Raise `SwapError` if the size, dtype or order in memory of a parameter has changed since it was planned."""
        if (known := self.of(parameter)) is not None:
            known.check_unchanged(parameter)

    def check_not_moved(self) -> None:
        """Raise `SwapError` if a parameter in a group is not on the device that it was planned on: it is not stepped.

        Its state can be saved and loaded all the same: a Trainer moves a model to the CPU when it has trained it.
        """
        if self.moved is not None:
            raise self.moved.changed(self.moved.parameter)

    # --- Changes ---------------------------------------------------------------------------------------------------

    def follow(self, optimizer: Optimizer) -> tuple[list[torch.nn.Parameter], bool]:
        """Note which group each parameter is in now.

        Returns:
            Parameters in groups that are not planned, whether or not they are to be; and whether any that is planned
            has come to a group, or left all of them.

        Raises:
            ConfigError: one is in the groups more than once, or has `fused=True` by now, whose step is broken.
            SwapError: the size, dtype or order in memory of one has changed since it was planned.
        """
        unknown = []
        self.moved = None
        members: dict[OptimizerParameter, int] = {}
        seen: set[int] = set()
        for number, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                if id(p) in seen:
                    raise ConfigError(
                        f"a parameter of shape {tuple(p.shape)} is more than once in optimizer.param_groups, so that "
                        "plain PyTorch steps it as often, and a swapped optimizer could not; leave it in one group"
                    )
                seen.add(id(p))
                known = self.of(p)
                if known is None:
                    unknown.append(p)
                    continue
                known.check_unchanged(p)
                members[known], known.number = number, len(seen) - 1
                if p.device != known.device:
                    self.moved = known
                known.fused = bool(group.get("fused"))
                if known.fused and not (self.on_device or self.config.offload_optimizer.master_weights):
                    refuse_broken_fused(optimizer, known.dtype)
        came = any(known.group is None for known in members)
        left = [known for known in self._parameters.values() if known.group is not None and known not in members]
        for known in left:
            known.group = None
            known.unhook()
            known.arrived = 0
        for known, number in members.items():
            known.group = number
        return unknown, came or bool(left)

    def reason_to_cut_anew(self) -> str | None:
        """The reason why the cuts, or the records, must not stay as they are; None if there is none."""
        if self.threads != torch.get_num_threads() and any(each.cut_by_chunks for each in self._parameters.values()):
            return "torch.set_num_threads was called, and the bits of a step in parts depend on it"
        planned = self.planned()
        sparse = [known for known in planned if not known.segments[0].whole and known.has_sparse_gradient]
        for known in sparse:
            known.keeps_whole = True
        if sparse:
            return "a sparse gradient came, which cannot be cut"
        if any(known.cut_for_fused and not known.fused and known.cut_by_chunks for known in planned):
            return "fused was switched off, and the bits of a step in parts depend on it"
        if self._is_wasteful:
            return "more than half of its records is of parameters that are gone"
        return None

    def extend(self, optimizer: Optimizer, parameters: Iterable[torch.nn.Parameter]) -> list[Bucket]:
        """Plan what of `parameters` is not planned, by groups; last, with options of a new group, those in none.

        Returns:
            The buckets made for them.
        """
        wanted = {id(p): p for p in parameters if not self.is_planned(p)}
        self._forget_gone()  # Others may have their ids.
        made: list[OptimizerParameter] = []
        groups = [*enumerate(optimizer.param_groups), (None, {**optimizer.defaults, "params": list(wanted.values())})]
        positions = itertools.count()
        settings = settings_of(optimizer)
        for number, group in groups:
            options = _options_of(group)
            refuse_group(optimizer, group, wanted, self.config)
            for p, position in zip(group["params"], positions, strict=False):
                if wanted.pop(id(p), None) is None:
                    continue
                known = self.of(p) or OptimizerParameter(p)
                known.group, known.number = number, position
                known.fused = known.cut_for_fused = bool(group.get("fused"))
                known.stride = tuple(local_of(p).stride())
                known.segments = tuple(self._plan_parameter(optimizer, group, options, p, known, settings.get(id(p))))
                made.append(known)
        if self.encodes:
            keys = (spec.key for spec in itertools.chain(*self._specs.values()))
            check_keys(self.config.offload_optimizer.stored_encoding, type(optimizer).__name__, keys)
            if not self.buckets:
                note_if_none(type(optimizer).__name__, (s.is_encoded for known in made for s in known.segments))
        buckets = plan_buckets(
            self._owner,
            self._next_index,
            [segment for known in made for segment in known.segments],
            self.config.bucket_bytes,
            self.remote,
            self.moves_gradients,
            lambda p: self._records.get(local_of(p)),
        )
        for known in made:
            known.buckets = ()
            self._parameters[id(known.parameter)] = known
        for bucket in buckets:
            for known in grouped(bucket.segments):
                known.buckets += (bucket,)
        self._next_index += len(buckets)
        self.buckets += buckets
        return buckets

    def withdraw(self, buckets: Sequence[Bucket]) -> None:
        """Undo the `extend` that made `buckets`."""
        undone = {known for bucket in buckets for known in grouped(bucket.segments)}
        for known in undone:
            known.unhook()
        withdrawn = set(buckets)
        self.buckets = [bucket for bucket in self.buckets if bucket not in withdrawn]
        self._parameters = {number: known for number, known in self._parameters.items() if known not in undone}

    def plan_again(self, optimizer: Optimizer, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Plan `parameters`, and nothing else, anew. If it fails, nothing is planned."""
        self.buckets, self._is_wasteful = [], False
        for known in self._parameters.values():
            known.segments = ()
        try:
            self.extend(optimizer, parameters)
        finally:
            for known in self._parameters.values():
                if not known.segments:
                    known.unhook()
            self._parameters = {number: known for number, known in self._parameters.items() if known.segments}

    def drop_gone(self) -> list[Bucket]:
        """Forget parameters that are gone. Returns the buckets that held nothing else, which are buckets no more."""
        self._forget_gone()
        dropped, self._dropped = self._dropped, []
        return dropped

    def _forget_gone(self) -> None:
        gone = [number for number, known in self._parameters.items() if known.is_gone]
        for number in gone:
            for segment in self._parameters.pop(number).segments:
                segment.vacate()
        if gone:
            holes = (bucket for bucket in self.buckets if all(segment.is_hole for segment in bucket.segments))
            empty = dict.fromkeys(holes)
            self._dropped += empty
            self.buckets = [bucket for bucket in self.buckets if bucket not in empty]
            segments = [segment for bucket in self.buckets for segment in bucket.segments]
            holes_numel = sum(segment.numel for segment in segments if segment.is_hole)
            self._is_wasteful = 2 * holes_numel > sum(segment.numel for segment in segments)

    # --- Needs -----------------------------------------------------------------------------------------------------

    def strides_may_differ(self, segment: Segment) -> bool:
        """True if the class computes the same bits with a gradient that has other strides than the parameter.

        Measured: true of the fp32 and fp64 kernels of the CPU that are not fused. For a device it is measured there.
        """
        if self.on_device:
            return segment.of.strides_may_differ
        return not segment.of.fused and (bool(segment.master) or segment.of.dtype not in LOW_PRECISION)

    @property
    def moves_gradients(self) -> bool:
        """True if gradients leave the memory that autograd puts them in; on the CPU, `device: cpu` is that already."""
        device = self.config.offload_gradient.device
        return device == "nvme" or (device == "cpu" and self.on_accelerator)

    def gradient_parts(self) -> list[tuple[int, torch.nn.Parameter, int, int]]:
        """Each bucket's part of each gradient: its number, the parameter, from and to in elements of memory order."""
        return [
            (number, known.parameter, segments[0].start, segments[-1].stop)
            for number, bucket in enumerate(self.buckets)
            for known, segments in grouped(bucket.segments).items()
            if known.group is not None
        ]

    @property
    def scratch_bytes(self) -> int:
        """Bytes of each scratch buffer."""
        return round_up(max((bucket.scratch_bytes for bucket in self.buckets), default=0), PAGE_BYTES)

    @property
    def slot_bytes(self) -> int:
        """Bytes of each slot on the device for a bucket's record and, if they are evicted, gradients; else 0."""
        if not self.on_device:
            return 0
        return max((bucket.slot_bytes(self.moves_gradients) for bucket in self.buckets), default=0)

    @property
    def step_device_bytes(self) -> int:
        """Device memory that a step takes, at most; 0 where it is on the CPU."""
        return step_bytes(self.slot_bytes, self.scratch_bytes) if self.on_device else 0

    @property
    def stored_bytes(self) -> int:
        """Bytes of all records at their longest."""
        return sum(bucket.length_bytes for bucket in self.buckets)

    @property
    def wanted_bytes(self) -> int:
        """The most of a pool that it can use: all records at their longest, and the scratch of a step."""
        return self.stored_bytes + self.scratch_bytes * self.scratch_count

    @property
    def open_bytes_max(self) -> int | None:
        """The most bytes of records that a step has in use at once: others of the pool count on the rest.

        None if all stay in the pool for good.
        """
        if self.config.offload_optimizer.device == "cpu":
            return None
        return (IN_FLIGHT - 1) * max((bucket.length_bytes for bucket in self.buckets), default=0)

    def schedule(self) -> Schedule:
        """The order of staging, and what it needs of the pool."""
        return plan_schedule(
            [bucket.length_bytes for bucket in self.buckets],
            self.config.offload_optimizer.resident_bytes,
            self.scratch_bytes * self.scratch_count,
        )

    def _plan_parameter(
        self,
        optimizer: Optimizer,
        group: dict[str, Any],
        options: str,
        p: torch.nn.Parameter,
        known: OptimizerParameter,
        settings: Settings | None,
    ) -> list[Segment]:
        refuse_parameter(optimizer, p, self.config, self.remote)
        known.collective = known.sharded and not is_elementwise(optimizer)
        if self.counts_steps:
            known.first_index = first_index_of(p, type(optimizer).__name__, known.collective, self.rounds)
        master = ""
        if self.config.offload_optimizer.master_weights and p.dtype in LOW_PRECISION:
            master = "split" if p.dtype is torch.bfloat16 else "stored"
        dtype = torch.float32 if master else p.dtype
        # Fused kernels split among threads at multiples of 64 bytes. A class of the user's may call `pow`: see `cuts`.
        known.has_uneven_tails = dtype in LOW_PRECISION or not has_step_of_torch(optimizer)
        low_precision = known.has_uneven_tails and not group.get("fused")
        device = self.device if self.on_device else torch.device("cpu")
        if known.fused and not self.on_device:
            refuse_broken_fused(optimizer, dtype)
        # Options decide what the state is; the numbers of groups say nothing, for groups come and go too.
        # Dimensions do where the class may look at them: a segment has one.
        dims = 1 if has_step_of_torch(optimizer) else max(known.local.dim(), 1)
        key = (options, dtype, low_precision, self.threads, dims)
        if key not in self._segmented:
            self._segmented[key] = (
                dtype.is_floating_point
                and is_elementwise(optimizer)
                and keeps_bits(optimizer, group, dtype, self.threads, low_precision, device, dims)
            )
        if self.on_device and key not in self._strides_may_differ:
            may = self._segmented[key] and same_bits_for_strides(optimizer, group, dtype, device)
            self._strides_may_differ[key] = may
        known.strides_may_differ = self._strides_may_differ.get(key, False)
        stepped = p if known.collective else known.local
        shapes = tuple(stepped.shape), stepped.stride(), known.local.shape, known.local.stride()
        like = (options, repr(settings), dtype, *shapes)
        if like not in self._specs:
            self._specs[like] = learn_state(optimizer, group, stepped, dtype, device, settings)
        return plan_segments(
            known,
            self._specs[like],
            # Whether its bits may be cut with settings of its own was not tried.
            segmented=self._segmented[key] and not known.keeps_whole and settings is None,
            low_precision=low_precision,
            threads=self.threads,
            master=master,
            bucket_bytes=self.config.bucket_bytes,
            remote=self.remote,
            moves_gradient=self.moves_gradients,
            encode=encoder_of(self.config.offload_optimizer.stored_encoding, p, [s.key for s in self._specs[like]]),
            numel_max=DEVICE_SEGMENT_NUMEL if self.on_device else SEGMENT_NUMEL,
        )


def _options_of(group: Mapping[str, Any]) -> str:
    """The options of a group that may decide what the state is."""
    return repr(
        sorted(
            (key, (value.dtype, value.shape) if isinstance(value, torch.Tensor) else value)
            for key, value in group.items()
            if key not in ("params", "param_names", "lr", "initial_lr")
        )
    )


def parameters_of(optimizer: Optimizer) -> Iterator[torch.nn.Parameter]:
    """The optimizer's parameters, in the order of its groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def swaps_state_of(optimizer: Optimizer, config: OffloadConfig) -> bool:
    """True if `optimizer` is stepped by buckets. Else its class steps all that it has, and any class can be used."""
    gradients, state = config.offload_gradient.device, config.offload_optimizer
    if state.device != "none" or state.master_weights or state.step_in_backward or gradients == "nvme":
        return True
    return gradients == "cpu" and any(is_accelerator(p.device) for p in parameters_of(optimizer))


def plan_to_show(
    optimizer: Optimizer, config: OffloadConfig, number: int, records: Mapping[torch.Tensor, tuple[int, int]]
) -> OptimizerPlan:
    """Plan the state of `optimizer`, for its size also where it stays in memory. There it is empty if that is unknown.

    Raises:
        ConfigError: the state cannot be swapped, and is to be; or a parameter has no shape yet.
    """
    refuse_lazy(optimizer)
    swaps = swaps_state_of(optimizer, config)
    try:
        refuse_unsupported(optimizer)
        return OptimizerPlan(optimizer, config, number, records)
    except ConfigError:
        if swaps:
            raise
        return OptimizerPlan(optimizer, config, number, records, swaps_state=False)
