"""Decides by measurement whether `encoding: exact` packs the state on its way to the drive.

[Note: when packing pays] A step takes as long as the slower of two that go on at once: the drive, and the processor,
which steps, packs and unpacks. Packing takes a tenth or more from the drive's time and adds to the processor's. So it
makes a step faster, and never slower, exactly where the drive is still the slower one when the state is packed. Each
side is estimated so that a doubt decides against packing:

- the drive reads and writes at once, each at the speed that it has alone, and several drives have the sum;
- what the pool can hold takes no time: it may be read in the backward before and written in the forward after;
- the class's own step is timed, though a native step is faster. Masters and checksums are a pass over as many bytes as
  the codec's, and are counted as once more its time;
- the codec is timed on one thread: other cores may have other ranks and the I/O threads to serve. On a processor that
  is busy it is slow, and not used.

Ranks decide each by itself: records are a rank's own, and checkpoints name the encoding of each.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch.optim import Optimizer

from swapper.config import OffloadConfig
from swapper.optimizer.packing import CHUNK_NUMEL, plan_packed_record
from swapper.optimizer.plan import OptimizerPlan
from swapper.optimizer.probe import is_elementwise
from swapper.optimizer.twin import Twin, seeded
from swapper.sizes import SMALL_BYTES, format_bytes
from swapper.storage.layout import Entry
from swapper.storage.speed import DriveSpeed

__all__ = ["choose_encoding", "codec_s"]

log = logging.getLogger(__name__)

LEAST_BYTES = 256 << 20
"""Below it, beyond what the pool holds, nothing is measured: it would take as long as packing saves in many steps."""

_PACKED_PART = 0.9
"""The part of a record that is left, at most, with AdamW and masters (8.5 to 8.9 bytes of 10), and others."""

_MARGIN = 1.25
"""The drive must take this many times as long as the processor."""

_CODEC_NUMEL = 3 * CHUNK_NUMEL
"""The most that one thread packs alone."""

_STEP_NUMEL = 1 << 18
_TRIALS = 5


def choose_encoding(
    optimizers: Sequence[Optimizer],
    plans: Sequence[OptimizerPlan],
    config: OffloadConfig,
    records: Mapping[torch.Tensor, tuple[int, int]],
    owners: Iterator[int],
    measure: Callable[[OffloadConfig], Sequence[DriveSpeed]],
) -> list[OptimizerPlan]:
    """Plan state that is to be exact anew, as packed, if that makes steps faster. See [Note: when packing pays].

    Args:
        optimizers: whose steps follow one another.
        plans: one for each, made with `config`.
        config: with another encoding than "exact", or a device without a drive, nothing is decided.
        records, owners: of other plans, as for `OptimizerPlan`.
        measure: gives the speed of each drive of a config. Only called where it decides.

    Returns:
        `plans`, or others in their place; each with its `encoding_reason`.

    Raises:
        NvmePathError: from `measure`.
    """
    asked = config.offload_optimizer
    if asked.device != "nvme" or asked.encoding != "exact" or not plans:
        return list(plans)
    packs, reason = False, _reason_not_to_measure(optimizers, plans, config)
    if not reason:
        packs, reason = _compare(optimizers, plans, config, measure(config))
        log.info("offload_optimizer.encoding: exact: state is %s: %s", "packed" if packs else "not packed", reason)
    chosen = list(plans)
    if packs:
        packed = config.model_copy(update={"offload_optimizer": asked.model_copy(update={"encoding": "packed"})})
        chosen = [OptimizerPlan(optimizer, packed, next(owners), records) for optimizer in optimizers]
    for plan in chosen:
        plan.encoding_reason = reason
    return chosen


def codec_s() -> float:
    """Seconds that one thread takes to pack an fp32 value, and to unpack it again, now. Takes a few milliseconds."""
    layout, packing = plan_packed_record([], [Entry("state", "F32", (_CODEC_NUMEL,), "packed")], 0)
    assert packing is not None
    data = torch.zeros(layout.length_bytes, dtype=torch.uint8, device="cpu")
    values = seeded((_CODEC_NUMEL,), torch.float32, 0)
    data[layout.offsets_bytes[-1] :][: values.nbytes] = values.view(torch.uint8)

    def there_and_back() -> None:
        packing.pack(data, 0)
        packing.unpack(data, 0)

    return _median_s(there_and_back) / _CODEC_NUMEL


def _step_s(optimizer: Optimizer) -> float:
    """Seconds that the class takes to step an fp32 element."""
    twin = Twin(optimizer, optimizer.param_groups[0], [seeded((_STEP_NUMEL,), torch.float32, 0)])
    gradients = [seeded((_STEP_NUMEL,), torch.float32, 1)]
    return _median_s(lambda: twin.step(gradients)) / _STEP_NUMEL


def _median_s(call: Callable[[], object]) -> float:
    call()  # The first touches memory, and makes state.
    times_s = []
    for _ in range(_TRIALS):
        start_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s)


def _reason_not_to_measure(
    optimizers: Sequence[Optimizer], plans: Sequence[OptimizerPlan], config: OffloadConfig
) -> str:
    """The reason why state is not packed whatever the drive's speed; "" if that decides."""
    if any(plan.on_accelerator for plan in plans):
        return "the parameters are on an accelerator"
    if config.offload_optimizer.step_in_backward:
        return "with step_in_backward the processor has the backward to compute besides"
    for optimizer in optimizers:
        if not is_elementwise(optimizer):
            return f"{type(optimizer).__name__} is not known to be elementwise, so how long it steps is not known"
    if not any(map(_packable_numel, plans)):
        return "nothing of it can be packed"
    beyond_bytes = max(_beyond_pool_bytes(plans, config))
    if beyond_bytes < LEAST_BYTES:
        return (
            f"a step moves {format_bytes(beyond_bytes)} that the pool cannot hold; "
            f"only from {format_bytes(LEAST_BYTES)} on it is measured what packing saves"
        )
    return ""


def _compare(
    optimizers: Sequence[Optimizer],
    plans: Sequence[OptimizerPlan],
    config: OffloadConfig,
    speeds: Sequence[DriveSpeed],
) -> tuple[bool, str]:
    """Return True if packing pays, and the figures that say so."""
    read_bps, write_bps = sum(speed.read_bps for speed in speeds), sum(speed.write_bps for speed in speeds)
    read_bytes, written_bytes = _beyond_pool_bytes(plans, config)
    drive_s = _PACKED_PART * max(read_bytes / read_bps, written_bytes / write_bps)
    value_s = codec_s()
    pairs = [*zip(optimizers, plans, strict=True)]
    processor_s = sum(_step_s(each) * _numel(plan) + 2 * value_s * _packable_numel(plan) for each, plan in pairs)
    reason = (
        f"a step would take the drive {drive_s:.3g} s, which writes {write_bps / 1e6:.0f} MB/s and reads "
        f"{read_bps / 1e6:.0f} MB/s, and the processor {processor_s:.3g} s, which packs and unpacks "
        f"{4 / value_s / 1e6:.0f} MB/s on one core"
    )
    return drive_s > _MARGIN * processor_s, reason


def _beyond_pool_bytes(plans: Sequence[OptimizerPlan], config: OffloadConfig) -> tuple[int, int]:
    """Bytes that a step reads, and that it writes, beyond those that the pool can hold from one step to the next."""
    read_bytes = sum(plan.schedule().moving_bytes for plan in plans)
    written_bytes = sum(plan.stored_bytes for plan in plans)
    return max(0, read_bytes - config.pool_bytes), max(0, written_bytes - config.pool_bytes)


def _numel(plan: OptimizerPlan) -> int:
    return sum(segment.numel for bucket in plan.buckets for segment in bucket.segments)


def _packable_numel(plan: OptimizerPlan) -> int:
    """The values of the state that would be packed."""
    segments = [segment for bucket in plan.buckets for segment in bucket.segments]
    return sum(
        spec.numel
        for segment in segments
        if segment.of.numel * torch.float32.itemsize >= SMALL_BYTES
        for spec in segment.specs
        if spec.dtype is torch.float32 and spec.numel == segment.numel
    )
