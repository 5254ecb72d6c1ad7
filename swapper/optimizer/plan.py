"""Which parameters an optimizer has, how their state is cut, and what that needs; before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from swapper.config import OffloadConfig
from swapper.errors import ConfigError, SwapError
from swapper.io.devices import is_accelerator
from swapper.optimizer.probe import StateSpec, is_elementwise, keeps_bits, learn_state
from swapper.optimizer.segments import Bucket, OptimizerParameter, Segment, grouped, plan_buckets, plan_segments
from swapper.sizes import PAGE_BYTES, round_up
from swapper.storage.schedule import Schedule, plan_schedule
from swapper.tensors.strides import is_plain

__all__ = ["OptimizerPlan"]

_LOW_PRECISION = (torch.bfloat16, torch.float16)


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
        is_wasteful: more than half of all elements in the buckets are of parameters that are gone.
        is_misfit: a parameter was cut for `fused=True`, which its group has no more.
        threads: `torch.get_num_threads()` that the cuts are right for.

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
        self._config = config
        self._owner = owner
        self._records: Mapping[torch.Tensor, tuple[int, int]] = records or {}
        self._segmented: dict[tuple[Any, ...], bool] = {}
        self._specs: dict[tuple[Any, ...], tuple[StateSpec, ...]] = {}
        self._parameters: dict[int, OptimizerParameter] = {}  # by `id`; `of` compares the object
        self._dropped: list[Bucket] = []  # for `drop_gone`
        self._next_index = 0
        self.buckets: list[Bucket] = []
        self.is_wasteful = False
        self.is_misfit = False
        self.threads = torch.get_num_threads()
        parameters = list(parameters_of(optimizer)) if swaps_state else []
        self.device = _device_of(parameters)
        self.remote = is_remote(self.device)
        self.extend(optimizer, [p for p in parameters if p.requires_grad])

    def of(self, parameter: torch.Tensor) -> OptimizerParameter | None:
        """What is known of a parameter; None if it is not planned."""
        known = self._parameters.get(id(parameter))
        return known if known is not None and known.refers_to(parameter) else None

    def planned(self) -> list[OptimizerParameter]:
        """Each parameter that is planned and still there, in a group or not."""
        return [known for known in self._parameters.values() if not known.is_gone]

    def follow(
        self, optimizer: Optimizer
    ) -> tuple[list[torch.nn.Parameter], list[OptimizerParameter], list[OptimizerParameter]]:
        """Note which group each parameter is in now.

        Returns:
            Parameters in groups that are not planned, whether or not they are to be; what is in a group again; and what
            was in one until now.

        Raises:
            ConfigError: one is in the groups more than once.
            SwapError: the size, dtype, device or order in memory of one has changed since it was planned.
        """
        unknown = []
        members: dict[OptimizerParameter, int] = {}
        seen: set[int] = set()
        self.is_misfit = False
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
                else:
                    _check_unchanged(p, known)
                    members[known] = number
                    known.fused = bool(group.get("fused"))
                    self.is_misfit |= known.cut_for_fused and not known.fused and _needs_cuts_of_chunks(known)
        came = [known for known in members if known.group is None]
        left = [known for known in self._parameters.values() if known.group is not None and known not in members]
        for known in left:
            known.group = None
        for known, number in members.items():
            known.group = number
        return unknown, came, left

    def extend(self, optimizer: Optimizer, parameters: Iterable[torch.nn.Parameter]) -> list[Bucket]:
        """Plan those of `parameters` that are not planned yet, in the order of groups.

        Those in no group come last; they are planned with the options that a new group would have.

        Returns:
            The buckets made for them.
        """
        wanted = {id(p): p for p in parameters if not self.is_planned(p)}
        self._forget_gone()  # Others may have their ids.
        made: list[OptimizerParameter] = []
        groups = [*enumerate(optimizer.param_groups), (None, {**optimizer.defaults, "params": list(wanted.values())})]
        for number, group in groups:
            options = _options_of(group)
            for p in group["params"]:
                if wanted.pop(id(p), None) is None:
                    continue
                known = self.of(p) or OptimizerParameter(p)
                known.group = number
                known.fused = known.cut_for_fused = bool(group.get("fused"))
                known.stride = tuple(p.stride())
                known.segments = tuple(self._plan_parameter(optimizer, group, options, p, known))
                made.append(known)
        segments = [segment for known in made for segment in known.segments]
        largest_record_bytes = max((length for _, length in self._records.values()), default=0)
        buckets = plan_buckets(
            self._owner,
            self._next_index,
            segments,
            self._config.bucket_bytes,
            self.remote,
            self._records.get,
            largest_record_bytes,
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
        self.buckets, self.is_wasteful = [], False
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
            self._dropped += [b for b in self.buckets if not any(segment.is_live for segment in b.segments)]
            self.buckets = [b for b in self.buckets if any(segment.is_live for segment in b.segments)]
            sizes = [(segment.numel, segment.is_live) for bucket in self.buckets for segment in bucket.segments]
            self.is_wasteful = 2 * sum(numel for numel, live in sizes if live) < sum(numel for numel, _ in sizes)

    def check_unchanged(self, parameter: torch.nn.Parameter) -> None:
        """Refuse a parameter whose size, dtype, device or order in memory has changed since it was planned.

        Raises:
            SwapError: naming what changed.
        """
        if (known := self.of(parameter)) is not None:
            _check_unchanged(parameter, known)

    def segments_of(self, parameter: torch.nn.Parameter) -> tuple[Segment, ...]:
        """The parameter's segments in order; () if it is not planned."""
        known = self.of(parameter)
        return () if known is None else known.segments

    def is_planned(self, parameter: torch.nn.Parameter) -> bool:
        """Whether the parameter has a place in the buckets."""
        return bool(self.segments_of(parameter))

    @property
    def gradient_accumulation_steps(self) -> int:
        """Gradients that each parameter gets before a step."""
        return self._config.gradient_accumulation_steps

    @property
    def step_in_backward(self) -> bool:
        """Whether buckets are stepped as their gradients arrive."""
        return self._config.offload_optimizer.step_in_backward

    @property
    def depends_on_threads(self) -> bool:
        """Whether the cuts are right for one number of threads only."""
        return any(
            not segment.whole and segment.of.dtype in _LOW_PRECISION and not segment.master
            for bucket in self.buckets
            for segment in bucket.segments
        )

    def strides_may_differ(self, segment: Segment) -> bool:
        """Whether the class pairs a gradient of other strides with its parameter in vectors as in one by one.

        Measured: true of the fp32 and fp64 kernels that are not fused.
        """
        return not segment.of.fused and (bool(segment.master) or segment.of.dtype not in _LOW_PRECISION)

    def gradient_parts(self) -> list[tuple[int, torch.nn.Parameter, int, int]]:
        """What each bucket steps on: its number, a parameter, and from where to where, in elements in memory order."""
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
    def scratch_count(self) -> int:
        """Scratch buffers that a step holds: with an accelerator, one is copied into while the other is in use."""
        return 2 if self.remote else 1

    @property
    def stored_bytes(self) -> int:
        """Bytes of all records at their longest."""
        return sum(bucket.length_bytes for bucket in self.buckets)

    def schedule(self, pool_bytes: int) -> Schedule:
        """The order of staging, for a pool of `pool_bytes`.

        Raises:
            ConfigError: the pool is too small.
        """
        return plan_schedule(
            [bucket.length_bytes for bucket in self.buckets],
            self._config.offload_optimizer.resident_bytes,
            self.scratch_bytes * self.scratch_count,
            pool_bytes,
        )

    def _plan_parameter(
        self,
        optimizer: Optimizer,
        group: dict[str, Any],
        options: str,
        p: torch.nn.Parameter,
        known: OptimizerParameter,
    ) -> list[Segment]:
        if not is_plain(p) or p.layout is not torch.strided:
            raise ConfigError(
                f"a parameter holds a {type(p.data).__name__} of layout {p.layout}; only plain strided tensors can be "
                "swapped in this version of swapper (DTensor is not there yet)"
            )
        settings = self._config.offload_optimizer
        master = ""
        if settings.master_weights and p.dtype in _LOW_PRECISION:
            master = "split" if p.dtype is torch.bfloat16 else "stored"
        dtype = torch.float32 if master else p.dtype
        # Of the fp16 and bf16 kernels, the fused ones split among threads at multiples of 64 bytes and need no more.
        low_precision = dtype in _LOW_PRECISION and not group.get("fused")
        if group.get("fused") and dtype in _LOW_PRECISION and isinstance(optimizer, torch.optim.SGD):
            raise ConfigError(
                f"SGD(fused=True) leaves {dtype} parameters on the CPU unchanged (a defect of torch 2.13), so there is "
                "nothing to be exact to; use fused=False"
            )
        # Options decide what the state is; the numbers of groups say nothing, for groups come and go too.
        key = (options, dtype, low_precision, self.threads)
        if key not in self._segmented:
            self._segmented[key] = (
                dtype.is_floating_point
                and is_elementwise(optimizer)
                and keeps_bits(optimizer, group, dtype, self.threads, low_precision)
            )
        like = (options, dtype, tuple(p.shape), p.stride())
        if like not in self._specs:
            self._specs[like] = learn_state(optimizer, group, p, dtype)
        return plan_segments(
            known,
            self._specs[like],
            segmented=self._segmented[key] and not known.keeps_whole,
            low_precision=low_precision,
            threads=self.threads,
            master=master,
            bucket_bytes=self._config.bucket_bytes,
            remote=self.remote,
        )


def _check_unchanged(parameter: torch.nn.Parameter, known: OptimizerParameter) -> None:
    if parameter.numel() != known.numel or parameter.dtype != known.dtype or parameter.device.type != known.device_type:
        raise SwapError(
            f"a parameter was {known.numel} x {known.dtype} on {known.device_type} when its optimizer was wrapped and "
            f"is now {parameter.numel()} x {parameter.dtype} on {parameter.device.type}; move and convert the model "
            "first, then make the optimizer and wrap it"
        )
    in_memory_order = bool(known.segments) and (not known.segments[0].whole or bool(known.segments[0].master))
    if in_memory_order and not _same_order(parameter, known.stride):
        raise SwapError(
            f"a parameter had strides {known.stride} when its optimizer was wrapped and now has "
            f"{tuple(parameter.stride())}, and its state lies in the order of its memory; convert the model (its "
            "memory format) first, then make the optimizer and wrap it"
        )


def _same_order(parameter: torch.Tensor, stride: tuple[int, ...]) -> bool:
    """Whether the elements of a parameter lie in memory as with `stride`."""
    mine = tuple(parameter.stride())
    return mine == stride or (
        len(mine) == len(stride)
        and all(a == b for size, a, b in zip(parameter.shape, mine, stride, strict=True) if size > 1)
    )


def _needs_cuts_of_chunks(known: OptimizerParameter) -> bool:
    """Whether a parameter is cut, and its bits depend on the chunks of torch's threads, if it is not `fused`."""
    first = known.segments[0]
    return not first.whole and known.dtype in _LOW_PRECISION and not first.master


def _options_of(group: Mapping[str, Any]) -> str:
    """Those of a group's options that may decide what the state is."""
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


def is_remote(device: torch.device) -> bool:
    """Whether parameters there must be copied to the host for a step."""
    return is_accelerator(device)


def _device_of(parameters: Iterable[torch.Tensor]) -> torch.device:
    devices = {p.device for p in parameters}
    if not devices:
        return torch.device("cpu")
    if len(devices) > 1:
        names = ", ".join(sorted(str(device) for device in devices))
        raise ConfigError(f"the parameters are on several devices ({names}); give each device an optimizer of its own")
    device = devices.pop()
    if not is_accelerator(device) and device.type not in ("cpu", "meta"):
        raise ConfigError(f"the parameters are on {device}; swapper knows parameters on cpu and cuda")
    return device
