"""Which parameters an optimizer has, how their state is cut, and what that needs; before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from swapper.config import OffloadConfig
from swapper.errors import ConfigError, SwapError
from swapper.layout import PAGE_BYTES, round_up
from swapper.schedule import Schedule, plan_schedule
from swapper.segments import Bucket, Segment, plan_buckets, plan_segments
from swapper.trial import StateSpec, is_elementwise, is_plain, keeps_bits, learn_state

__all__ = ["OptimizerPlan"]

_LOW_PRECISION = (torch.bfloat16, torch.float16)


class OptimizerPlan:
    """The buckets of one optimizer.

    Args:
        optimizer: the user's. Not kept.
        config: `bucket_bytes` and `offload_optimizer` count here.
        owner: number of this optimizer among those of the process; part of every record's key.
        records: see `plan_buckets`.

    Attributes:
        buckets: in the order in which they are stepped.
        threads: `torch.get_num_threads()` that the cuts are right for.

    Raises:
        ConfigError: the optimizer, or a parameter of it, cannot be swapped.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        config: OffloadConfig,
        owner: int,
        records: Mapping[int, tuple[int, int]] | None = None,
    ) -> None:
        self._config = config
        self._owner = owner
        self._records = records or {}
        self._segmented: dict[tuple[Any, ...], bool] = {}
        self._specs: dict[tuple[Any, ...], tuple[StateSpec, ...]] = {}
        self._planned: dict[int, tuple[Segment, ...]] = {}
        self._kept_whole: set[int] = set()
        self._next_index = 0
        self._buckets_by_id: tuple[tuple[int, int], dict[int, tuple[Bucket, ...]]] = ((-1, -1), {})
        self._fused = any(group.get("fused") for group in optimizer.param_groups)
        self.buckets: list[Bucket] = []
        self.threads = torch.get_num_threads()
        self.device = _device_of(parameters_of(optimizer))
        self.remote = is_remote(self.device)
        self.extend(optimizer, [p for p in parameters_of(optimizer) if p.requires_grad])

    def extend(self, optimizer: Optimizer, parameters: Iterable[torch.nn.Parameter]) -> list[Bucket]:
        """Plan those of `parameters` that are not planned yet. Returns the buckets made for them."""
        wanted = {id(p) for p in parameters} - self._planned.keys()
        segments: list[Segment] = []
        for number, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                if id(p) in wanted:
                    made = self._plan_parameter(optimizer, number, group, p)
                    self._planned[id(p)] = tuple(made)
                    segments += made
        buckets = plan_buckets(
            self._owner, self._next_index, segments, self._config.bucket_bytes, self.remote, self._records
        )
        self._next_index += len(buckets)
        self.buckets += buckets
        return buckets

    def keep_whole(self, parameter: torch.nn.Parameter) -> None:
        """Do not cut `parameter` when it is planned the next time."""
        self._kept_whole.add(id(parameter))

    def segments_of(self, parameter: torch.nn.Parameter) -> tuple[Segment, ...]:
        """The parameter's segments in order; () if it is not planned."""
        return self._planned.get(id(parameter), ())

    def buckets_of(self, parameter: torch.nn.Parameter) -> Sequence[Bucket]:
        """The buckets that have segments of `parameter`, in order; () if it is not planned."""
        version = (self._next_index, len(self.buckets))
        if self._buckets_by_id[0] != version:
            found: dict[int, dict[Bucket, None]] = {}
            for bucket in self.buckets:
                for segment in bucket.segments:
                    found.setdefault(id(segment.parameter), {})[bucket] = None
            self._buckets_by_id = (version, {number: tuple(buckets) for number, buckets in found.items()})
        return self._buckets_by_id[1].get(id(parameter), ())

    def drop(self, ids: set[int]) -> None:
        """Forget parameters, by `id`, that the optimizer no longer has."""
        for number in ids & self._planned.keys():
            del self._planned[number]

    def is_planned(self, parameter: torch.nn.Parameter) -> bool:
        """Whether the parameter has a place in the buckets."""
        return id(parameter) in self._planned

    def planned_ids(self) -> set[int]:
        """`id` of each planned parameter."""
        return set(self._planned)

    def check_unchanged(self, parameter: torch.nn.Parameter) -> None:
        """Refuse a parameter whose size, dtype or device changed since it was planned.

        Raises:
            SwapError: naming what changed.
        """
        segments = self._planned[id(parameter)]
        numel, dtype, device_type = segments[-1].stop, segments[0].planned_dtype, self.device.type
        if parameter.numel() != numel or parameter.dtype != dtype or parameter.device.type != device_type:
            raise SwapError(
                f"a parameter was {numel} x {dtype} on {device_type} when its optimizer was wrapped and is now "
                f"{parameter.numel()} x {parameter.dtype} on {parameter.device.type}; move and convert the model "
                "first, then make the optimizer and wrap it"
            )

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
            not segment.whole and segment.planned_dtype in _LOW_PRECISION and not segment.master
            for bucket in self.buckets
            for segment in bucket.segments
        )

    def strides_may_differ(self, segment: Segment) -> bool:
        """Whether the class pairs a gradient of other strides with its parameter in vectors as in one by one.

        Measured: true of the fp32 and fp64 kernels that are not fused.
        """
        return not self._fused and (bool(segment.master) or segment.planned_dtype not in _LOW_PRECISION)

    def gradient_parts(self) -> list[tuple[int, torch.nn.Parameter, int, int]]:
        """What each bucket steps on: its number, a parameter, and from where to where, in elements in memory order."""
        parts = []
        for number, bucket in enumerate(self.buckets):
            spans: dict[int, tuple[torch.nn.Parameter, int, int]] = {}
            for segment in bucket.segments:
                p, start = segment.parameter, segment.start
                spans[id(p)] = (p, spans[id(p)][1] if id(p) in spans else start, segment.stop)
            parts += [(number, *span) for span in spans.values() if self.is_planned(span[0])]
        return parts

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
        self, optimizer: Optimizer, number: int, group: dict[str, Any], p: torch.nn.Parameter
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
        # Groups differ in options, and options decide what the state is.
        key = (number, dtype, low_precision)
        if key not in self._segmented:
            self._segmented[key] = (
                dtype.is_floating_point
                and is_elementwise(optimizer)
                and keeps_bits(optimizer, group, dtype, self.threads, low_precision)
            )
        like = (number, dtype, tuple(p.shape), p.stride())
        if like not in self._specs:
            self._specs[like] = learn_state(optimizer, group, p, dtype)
        segments = plan_segments(
            p,
            self._specs[like],
            segmented=self._segmented[key] and id(p) not in self._kept_whole,
            low_precision=low_precision,
            threads=self.threads,
            master=master,
            bucket_bytes=self._config.bucket_bytes,
            remote=self.remote,
        )
        return segments


def parameters_of(optimizer: Optimizer) -> Iterator[torch.nn.Parameter]:
    """The optimizer's parameters, in the order of its groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def is_remote(device: torch.device) -> bool:
    """Whether parameters there must be copied to the host for a step."""
    return device.type == "cuda"


def _device_of(parameters: Iterable[torch.Tensor]) -> torch.device:
    devices = {p.device for p in parameters}
    if not devices:
        return torch.device("cpu")
    if len(devices) > 1:
        names = ", ".join(sorted(str(device) for device in devices))
        raise ConfigError(f"the parameters are on several devices ({names}); give each device an optimizer of its own")
    device = devices.pop()
    if device.type not in ("cpu", "cuda", "meta"):
        raise ConfigError(f"the parameters are on {device}; swapper knows parameters on cpu and cuda")
    return device
