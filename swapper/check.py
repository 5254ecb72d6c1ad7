"""`check`: what a run would need and move, found out without doing any of it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.optim import Optimizer

from swapper.config import OffloadConfig
from swapper.errors import ConfigError
from swapper.gradient.records import can_leave, check_room, gradient_bytes, gradient_pool_bytes
from swapper.optimizer.plan import OptimizerPlan, parameters_of
from swapper.parameter.records import (
    ParameterRecord,
    first_of,
    least_bytes,
    plan_parameter_records,
    summary_of_what_stays,
    where,
)
from swapper.session import Engines
from swapper.sizes import format_bytes
from swapper.storage.runs import check_nvme_paths, file_systems
from swapper.storage.speed import measure_speeds

__all__ = ["CheckReport", "DriveReport", "dry_run"]

log = logging.getLogger(__name__)

_TYPICAL_ENDURANCE_BYTES = 600 * 10**12


@dataclass(frozen=True)
class DriveReport:
    """What one of several drives would get.

    Attributes:
        path: as in the config.
        bytes_per_second: as measured, of as much reading as writing.
        disk_bytes: files on it, give or take a mebibyte for each drive.
        disk_free_bytes: free space there now, which directories on one file system share.
    """

    path: Path
    bytes_per_second: int
    disk_bytes: int
    disk_free_bytes: int


@dataclass(frozen=True)
class CheckReport:
    """What a run would need and move, at most; from `check`. All in bytes, except counts.

    State, traffic and files count each record at its longest; what is written is up to 1.2 % less.

    Attributes:
        parameter_numel: elements of the optimizers' parameters.
        model_bytes: parameters, buffers and gradients of the model, as far as they stay in memory.
        state_bytes: optimizer state, as stored.
        gradient_bytes: gradients that do not stay in memory, or on the GPU.
        parameter_bytes: parameters that do not stay in memory.
        buckets: how many records it is cut into.
        pool_bytes: the most that the pool would take. It takes what records and scratch need, if that is less.
        pool_needed_bytes: the least that would do.
        host_bytes: the model, the pool, and torch's scratch in a step: the peak, without
            activations and the 100 MB that the process itself may take.
        disk_bytes: files on all drives.
        disk_free_bytes: what all drives together can take now; -1 if nothing goes to a drive. Each drive gets its part,
            in proportion to its speed, so this is when the first is full, and may be less than their free space.
        step_read_bytes, step_written_bytes: moved by one step and its micro-batches.
        steps_of_endurance: steps until a drive rated 600 TB written has had them, with several the one that gets most;
            0 if nothing is written.
        drives: what each would get, if they are several; else empty.
    """

    parameter_numel: int
    model_bytes: int
    state_bytes: int
    buckets: int
    pool_bytes: int
    pool_needed_bytes: int
    host_bytes: int
    disk_bytes: int
    disk_free_bytes: int
    step_read_bytes: int
    step_written_bytes: int
    steps_of_endurance: int
    drives: tuple[DriveReport, ...] = ()
    gradient_bytes: int = 0
    parameter_bytes: int = 0

    def __str__(self) -> str:
        rows = [
            ("parameters", f"{self.parameter_numel:,}"),
            ("model and gradients in memory", format_bytes(self.model_bytes)),
            ("optimizer state", f"{format_bytes(self.state_bytes)} in {self.buckets} buckets"),
            ("pool", f"{format_bytes(self.pool_bytes)} (at least {format_bytes(self.pool_needed_bytes)} needed)"),
            ("host memory, without activations", format_bytes(self.host_bytes)),
            ("a step reads", format_bytes(self.step_read_bytes)),
            ("a step writes", format_bytes(self.step_written_bytes)),
        ]
        if self.disk_free_bytes >= 0:
            free = f"{format_bytes(self.disk_bytes)} of {format_bytes(self.disk_free_bytes)} free"
            free += "" if self.disk_bytes <= self.disk_free_bytes else ": TOO LITTLE"
            name = "files on the drives, by their speed" if self.drives else "files on the drive"
            rows[5:5] = [(name, free)] + [
                (
                    f"  {drive.path}",
                    f"{format_bytes(drive.disk_bytes)} of {format_bytes(drive.disk_free_bytes)} free, "
                    f"{drive.bytes_per_second / 1e6:.0f} MB/s",
                )
                for drive in self.drives
            ]
        if self.steps_of_endurance:
            rows.append(("steps until a drive rated 600 TBW is worn", f"{self.steps_of_endurance:,}"))
        if self.gradient_bytes:
            rows[3:3] = [("gradients that are moved away", format_bytes(self.gradient_bytes))]
        if self.parameter_bytes:
            rows[3:3] = [("parameters that are moved away", format_bytes(self.parameter_bytes))]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def dry_run(
    model: torch.nn.Module,
    optimizers: Sequence[Optimizer],
    settings: OffloadConfig,
    records: Sequence[ParameterRecord] | None = None,
) -> CheckReport:
    """See `swapper.check`.

    Args:
        records: of the model's parameters, if they are on the drive already.
    """
    if settings.offload_param.device != "nvme":
        records = ()
    elif records is None:
        records, stays = plan_parameter_records(model, settings.bucket_bytes)
        if summary := summary_of_what_stays(model, records, stays):
            log.warning("%s", summary)
    record_of = where(records)
    plans = [OptimizerPlan(optimizer, settings, number, record_of) for number, optimizer in enumerate(optimizers)]
    remote = any(plan.remote for plan in plans)
    state_stored = settings.offload_optimizer.device == "nvme"
    gradients_stored = settings.offload_gradient.device == "nvme"
    gradients_move = gradients_stored or (settings.offload_gradient.device == "cpu" and remote)
    all_parts = [plan.gradient_parts() for plan in plans]
    gradient_total = sum(gradient_bytes(parts)[0] for parts in all_parts) if gradients_move else 0
    pool_bytes = settings.pool_bytes if state_stored or gradients_stored or records else 0
    held_bytes = own_bytes = read_bytes = written_bytes = stored_bytes = 0
    moving_bytes = []  # what each optimizer needs of the pool while it steps
    for plan, parts in zip(plans, all_parts, strict=True):
        scratch_bytes = plan.scratch_bytes * plan.scratch_count
        limit_bytes = settings.pool_bytes - held_bytes
        moving_bytes.append(0)
        if state_stored:
            schedule = plan.schedule(limit_bytes)
            moving_bytes[-1] += schedule.pool_bytes - schedule.held_bytes
            held_bytes += schedule.held_bytes
            limit_bytes -= schedule.pool_bytes
            read_bytes += plan.stored_bytes - (schedule.held_bytes - scratch_bytes)
        else:
            own_bytes += plan.stored_bytes + scratch_bytes
        if gradients_stored or (gradients_move and state_stored):
            check_room(parts, gradients_stored, limit_bytes, settings.pool_bytes)
            moving_bytes[-1] += gradient_pool_bytes(parts, gradients_stored)
        elif gradients_move:
            own_bytes += gradient_bytes(parts)[0]
    # Parameters take what no optimizer needs. Without them optimizers, which step one after another, share their part.
    needed_bytes = held_bytes + (sum(moving_bytes) if records else max(moving_bytes, default=0))
    state_bytes = sum(plan.stored_bytes for plan in plans)
    if state_stored:
        written_bytes = stored_bytes = state_bytes
    if gradients_stored:
        # Of the first micro-batch nothing is read to add to it, but then all for the step.
        read_bytes += gradient_total * settings.gradient_accumulation_steps
        written_bytes += gradient_total * settings.gradient_accumulation_steps
        stored_bytes += gradient_total
    parameter_bytes = sum(record.file_bytes for record in records)
    if records:
        resident = first_of(records, settings.offload_param.resident_bytes)
        in_backward = settings.offload_optimizer.step_in_backward
        needed_bytes += least_bytes(model, records, resident, in_backward)[0]
        # In forward and backward of each pass, and for the step; what the pool has room for is not read again.
        read_bytes += parameter_bytes * (2 * settings.gradient_accumulation_steps + 1)
        trained = [r for r in records if any(place.parameter.requires_grad for place in r.places)]
        written_bytes += sum(record.file_bytes for record in trained)
        stored_bytes += parameter_bytes
        if needed_bytes > settings.pool_bytes:
            raise ConfigError(
                f"pool_bytes: {format_bytes(settings.pool_bytes)} are too few; optimizer state, gradients and "
                f"parameters together need {format_bytes(needed_bytes)}. Set pool_bytes to at least {needed_bytes}"
            )
    drives, free_bytes = _check_drives(settings, stored_bytes) if stored_bytes else ((), -1)
    if pool_bytes:  # A config also asks for three whole buckets, though the largest of this model may be smaller.
        needed_bytes = max(needed_bytes, 3 * settings.bucket_bytes)
    away = {id(p) for parts in all_parts for _, p, _, _ in parts if can_leave(p)} if gradients_move else set()
    tensors = [*(p for p in model.parameters() if p not in record_of), *model.buffers()]
    in_memory = [p for p in model.parameters() if p.requires_grad and id(p) not in away]
    model_bytes = sum(t.nbytes for t in tensors) + sum(p.nbytes for p in in_memory)
    worn_bytes = written_bytes
    if drives:
        worn_bytes = written_bytes * max(drive.disk_bytes for drive in drives) // max(stored_bytes, 1)
    return CheckReport(
        parameter_numel=sum(p.numel() for optimizer in optimizers for p in parameters_of(optimizer)),
        model_bytes=model_bytes,
        state_bytes=state_bytes,
        gradient_bytes=gradient_total,
        parameter_bytes=parameter_bytes,
        buckets=sum(len(plan.buckets) for plan in plans),
        pool_bytes=pool_bytes + own_bytes,
        pool_needed_bytes=needed_bytes + own_bytes,
        host_bytes=(0 if remote else model_bytes) + pool_bytes + own_bytes + 2 * settings.bucket_bytes,
        disk_bytes=stored_bytes,
        disk_free_bytes=free_bytes,
        step_read_bytes=read_bytes,
        step_written_bytes=written_bytes,
        steps_of_endurance=_TYPICAL_ENDURANCE_BYTES // worn_bytes if worn_bytes else 0,
        drives=drives,
    )


def _check_drives(settings: OffloadConfig, stored_bytes: int) -> tuple[tuple[DriveReport, ...], int]:
    """What each drive would get, if they are several; and how much all can take."""
    paths = settings.nvme_paths
    check_nvme_paths(paths)
    speeds = [1]
    if len(paths) > 1:
        with contextlib.closing(Engines(settings)) as engines:
            speeds = [speed.bps for speed in measure_speeds(paths, engines.handles)]
    found = file_systems(paths)
    free = {i: file_system.free_bytes for file_system in found for i in file_system.members}
    total = sum(speeds)
    reports = [
        DriveReport(path, speed, stored_bytes * speed // total, free[i])
        for i, (path, speed) in enumerate(zip(paths, speeds, strict=True))
    ]
    usable = min(fs.free_bytes * total // sum(speeds[i] for i in fs.members) for fs in found)
    return tuple(reports) if len(paths) > 1 else (), usable
