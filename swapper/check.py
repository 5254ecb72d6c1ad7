"""`swapper.check`: the needs of a run, computed without starting it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from swapper.config import OffloadConfig
from swapper.config.settings import BUCKETS_IN_POOL
from swapper.errors import ConfigError
from swapper.gradient.records import can_leave, can_round, file_bytes
from swapper.optimizer.device_slots import SLOTS
from swapper.optimizer.plan import OptimizerPlan, parameters_of
from swapper.parameter.candidates import length_bytes, tensors_of
from swapper.parameter.records import ParameterPlan
from swapper.session import drive_speeds, why_not_direct
from swapper.sizes import format_bytes
from swapper.storage.budget import PoolBudget
from swapper.storage.mounts import check_nvme_paths, file_systems
from swapper.tensors.sharded import local_of

__all__ = [
    "CheckReport",
    "DriveReport",
    "check_direct",
    "make_report",
    "staging_bytes",
    "state_goes_direct",
]

log = logging.getLogger(__name__)

_TYPICAL_ENDURANCE_BYTES = 600 * 10**12


@dataclass(frozen=True)
class DriveReport:
    """The part of one of several drives.

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
    """The needs of a run, and what it would move, at most; from `check`. All in bytes, except counts.

    State, traffic and files count each record at its longest; what is written is up to 1.2 % less, and of packed state
    about an eighth.

    Attributes:
        parameter_numel: elements of the optimizers' parameters.
        model_bytes: parameters, buffers and gradients of the model, as far as they stay in memory.
        state_bytes: optimizer state, as stored.
        encoded_numel: elements of state, and not of parameters, that are stored in another form and lose bits.
        int8_numel: those of them that are int8; the others are bf16.
        packed_numel: elements of state that are packed on the drive, which loses nothing.
        encoding_reason: why `encoding: exact` packs them, or does not; "" where it has not to choose.
        gradient_bytes: gradients that do not stay in memory, or on the GPU, as stored.
        rounded_gradient_numel: elements of them that are rounded to bf16.
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
        device_bytes: the most that parameters take at once of the memory of an accelerator that the model is on.
        cache_token_bytes: keys and values of one token of one prompt, in the layers that keep all tokens, as far as the
            config of a model of transformers says; 0 for other models. An `OffloadedCache` has them on the drive.
        cache_tokens: how many tokens the drives have room for, beside `disk_bytes`; 0 without `nvme_path`.
        step_device_bytes: the most that steps take there besides, if they are made there: three buckets, and what the
            optimizer's class computes in between for one. Of several optimizers the most, or with `step_in_backward`
            the sum.
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
    device_bytes: int = 0
    step_device_bytes: int = 0
    cache_token_bytes: int = 0
    cache_tokens: int = 0
    encoded_numel: int = 0
    int8_numel: int = 0
    packed_numel: int = 0
    encoding_reason: str = ""
    rounded_gradient_numel: int = 0

    def __str__(self) -> str:
        rounded = {"bf16": self.encoded_numel - self.int8_numel, "int8": self.int8_numel}
        rows = [
            ("parameters", f"{self.parameter_numel:,}"),
            ("model and gradients in memory", format_bytes(self.model_bytes)),
            ("optimizer state", f"{format_bytes(self.state_bytes)} in {self.buckets} buckets"),
        ]
        if self.packed_numel:
            rows.append(("  of it packed, which takes less than said", f"{self.packed_numel:,} values"))
        if self.encoding_reason:
            rows.append(("  packed" if self.packed_numel else "  not packed", self.encoding_reason))
        for encoding, numel in rounded.items():
            if numel:
                rows.append((f"  of it rounded to {encoding}, which is lossy", f"{numel:,} values"))
        if self.parameter_bytes:
            rows.append(("parameters that are moved away", format_bytes(self.parameter_bytes)))
        if self.device_bytes:
            rows.append(("device memory that they come to", format_bytes(self.device_bytes)))
        if self.gradient_bytes:
            rows.append(("gradients that are moved away", format_bytes(self.gradient_bytes)))
        if self.rounded_gradient_numel:
            rows.append(("  of it rounded to bf16, which is lossy", f"{self.rounded_gradient_numel:,} values"))
        rows += [
            ("pool", f"{format_bytes(self.pool_bytes)} (at least {format_bytes(self.pool_needed_bytes)} needed)"),
            ("host memory, without activations", format_bytes(self.host_bytes)),
        ]
        if self.disk_free_bytes >= 0:
            free = f"{format_bytes(self.disk_bytes)} of {format_bytes(self.disk_free_bytes)} free"
            free += "" if self.disk_bytes <= self.disk_free_bytes else ": TOO LITTLE"
            rows.append(("files on the drives, by their speed" if self.drives else "files on the drive", free))
        for drive in self.drives:
            free = f"{format_bytes(drive.disk_bytes)} of {format_bytes(drive.disk_free_bytes)} free"
            rows.append((f"  {drive.path}", f"{free}, {drive.bytes_per_second / 1e6:.0f} MB/s"))
        rows += [
            ("a step reads", format_bytes(self.step_read_bytes)),
            ("a step writes", format_bytes(self.step_written_bytes)),
        ]
        if self.steps_of_endurance:
            rows.append(("steps until a drive rated 600 TBW is worn", f"{self.steps_of_endurance:,}"))
        if self.step_device_bytes:
            rows.append(("device memory of a step", format_bytes(self.step_device_bytes)))
        if self.cache_token_bytes:
            room = f"; the drive has room for {self.cache_tokens:,} tokens" if self.cache_tokens else ""
            rows.append(("keys and values of a token", f"{format_bytes(self.cache_token_bytes)}{room}"))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def make_report(
    model: torch.nn.Module,
    optimizers: Sequence[Optimizer],
    plans: Sequence[OptimizerPlan],
    parameters: ParameterPlan | None,
    budget: PoolBudget,
    settings: OffloadConfig,
) -> CheckReport:
    """See `swapper.check`."""
    check_direct(plans, parameters, settings)
    state_bytes = sum(plan.stored_bytes for plan in plans)
    all_parts = [plan.gradient_parts() if plan.moves_gradients else [] for plan in plans]
    rounds = settings.offload_gradient.encoding != "exact"
    leaving = [[(p, start, stop) for _, p, start, stop in parts if can_leave(p)] for parts in all_parts]
    gradient_bytes = [sum(file_bytes(*part, rounds) for part in parts) for parts in leaving]
    parameter_bytes = 0 if parameters is None else sum(record.file_bytes for record in parameters.records)

    device_bytes = 0
    if parameters is not None and (needs := parameters.device_needs) is not None:
        asked, staging = settings.offload_param.device_bytes, staging_bytes(parameters, settings, tries=False)
        device_bytes = needs.record_bytes(asked, staging) + needs.beside_bytes + staging
    # Slots to which records come without the pool stay. In backward all hold theirs until the step.
    stay = [state_goes_direct(plan, settings, tries=False) * SLOTS * plan.slot_bytes for plan in plans]
    go = [plan.step_device_bytes - slots for plan, slots in zip(plans, stay, strict=True)]
    together = sum(stay) + (sum(go) if settings.offload_optimizer.step_in_backward else max(go, default=0))
    state_stored = settings.offload_optimizer.device == "nvme"
    parameters_stored = parameters is not None and settings.offload_param.device == "nvme"
    gradients_stored = settings.offload_gradient.device == "nvme"
    read_bytes = written_bytes = 0
    micro_batches = settings.gradient_accumulation_steps
    if state_stored:
        # Records that stay in the pool are written and not read again.
        read_bytes = sum(each.state.moving_bytes for each in budget.optimizers if each.state is not None)
        written_bytes = state_bytes
    if gradients_stored:
        # Of the first micro-batch nothing is read to add to it, but then all for the step.
        read_bytes += sum(gradient_bytes) * micro_batches
        written_bytes += sum(gradient_bytes) * micro_batches
    if parameters is not None and parameters_stored:
        # In forward and backward of each pass, and for the step; what the pool has room for is not read again.
        read_bytes += parameter_bytes * (2 * micro_batches + 1)
        trained = [r for r in parameters.records if any(each.parameter.requires_grad for each in r.locations)]
        written_bytes += sum(record.file_bytes for record in trained)
    stored_bytes = (
        parameters_stored * parameter_bytes + state_stored * state_bytes + gradients_stored * sum(gradient_bytes)
    )
    drives, free_bytes = _check_drives(settings, stored_bytes) if stored_bytes else ((), -1)

    token_bytes = cache_token_bytes(model)
    room_bytes = free_bytes
    if token_bytes and settings.nvme_paths and not stored_bytes:
        _, room_bytes = _check_drives(settings, 0)

    # Of pools for what is not in the shared one.
    own_bytes = 0 if parameters is None or parameters_stored else parameters.kept_bytes
    for plan, each, moved_bytes in zip(plans, budget.optimizers, gradient_bytes, strict=True):
        own_bytes += 0 if each.state is not None else plan.wanted_bytes
        own_bytes += 0 if each.gradients is not None else moved_bytes
    needed_bytes, pool_bytes = budget.needed_bytes, 0
    if state_stored or gradients_stored or parameters_stored:
        pool_bytes = settings.pool_bytes
        # A config also asks for three whole buckets, though the largest of this model may be smaller, and for all that
        # may stay, though this model may have less.
        stays_bytes = settings.offload_optimizer.resident_bytes + settings.offload_param.resident_bytes
        needed_bytes = max(needed_bytes, BUCKETS_IN_POOL * settings.bucket_bytes + stays_bytes)
    swapped = {} if parameters is None else parameters.where()
    evicted = {id(p) for parts in leaving for p, _, _ in parts}
    in_memory = [tensor for tensor in tensors_of(model) if tensor not in swapped]
    in_memory += [p for p in model.parameters() if p.requires_grad and id(p) not in evicted]  # their gradients
    model_bytes = sum(length_bytes(local_of(tensor)) for tensor in in_memory)
    host_bytes = 0 if device_bytes or any(plan.on_accelerator for plan in plans) else model_bytes
    worn_bytes = written_bytes
    if drives:
        worn_bytes = written_bytes * max(drive.disk_bytes for drive in drives) // max(stored_bytes, 1)
    segments = [segment for plan in plans for bucket in plan.buckets for segment in bucket.segments]
    specs = [spec for segment in segments for spec in segment.specs]
    return CheckReport(
        parameter_numel=sum(p.numel() for optimizer in optimizers for p in parameters_of(optimizer)),
        model_bytes=model_bytes,
        state_bytes=state_bytes,
        gradient_bytes=sum(gradient_bytes),
        parameter_bytes=parameter_bytes,
        buckets=sum(len(plan.buckets) for plan in plans),
        pool_bytes=pool_bytes + own_bytes,
        pool_needed_bytes=needed_bytes + own_bytes,
        host_bytes=host_bytes + pool_bytes + own_bytes + 2 * settings.bucket_bytes,
        disk_bytes=stored_bytes,
        disk_free_bytes=free_bytes,
        step_read_bytes=read_bytes,
        step_written_bytes=written_bytes,
        steps_of_endurance=_TYPICAL_ENDURANCE_BYTES // worn_bytes if worn_bytes else 0,
        drives=drives,
        device_bytes=device_bytes,
        step_device_bytes=together,
        cache_token_bytes=token_bytes,
        cache_tokens=max(room_bytes - stored_bytes, 0) // token_bytes if token_bytes else 0,
        encoded_numel=sum(spec.numel for spec in specs if spec.is_rounded),
        int8_numel=sum(spec.numel for spec in specs if spec.encoding == "int8"),
        packed_numel=sum(spec.numel for spec in specs if spec.is_packed),
        rounded_gradient_numel=rounds * sum(b - a for parts in leaving for p, a, b in parts if can_round(p)),
        encoding_reason=next((plan.encoding_reason for plan in plans), ""),
    )


def cache_token_bytes(model: torch.nn.Module) -> int:
    """Bytes of keys and values of one token in the layers of `model` that keep all tokens, by its config.

    0 if it has none that says so: with latent attention (`kv_lora_rank`) versions of transformers differ.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return 0
    decoder = config.get_text_config(decoder=True)
    count, heads = getattr(decoder, "num_hidden_layers", None), getattr(decoder, "num_attention_heads", None)
    if not isinstance(count, int) or not isinstance(heads, int) or getattr(decoder, "kv_lora_rank", None):
        return 0
    window = getattr(decoder, "sliding_window", None) or getattr(decoder, "attention_chunk_size", None)
    kinds = (
        getattr(decoder, "layer_types", None) or ["full_attention" if window is None else "sliding_attention"] * count
    )
    growing = sum(kind in ("full_attention", "indexed_attention", "hybrid") for kind in kinds)
    key_heads = getattr(decoder, "num_key_value_heads", None) or heads
    width = getattr(decoder, "head_dim", None) or decoder.hidden_size // heads
    dtypes = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    return int(growing * key_heads * 2 * width * next(dtypes, torch.get_default_dtype()).itemsize)


def staging_bytes(parameters: ParameterPlan, settings: OffloadConfig, *, tries: bool = True) -> int:
    """Device memory through which records of parameters come without the pool; 0 if they do not: logs why, once.

    Args:
        parameters: of a model.
        settings: where they go.
        tries: False: try no drive, and log nothing.

    Raises:
        ConfigError: they do not, and `aio.gds` is on.
    """
    needs = parameters.device_needs
    if needs is None or settings.offload_param.device != "nvme":
        return 0
    reason = needs.why_not_direct(settings.offload_param.device_bytes)
    reason = reason or why_not_direct(settings, needs.device if tries else None)
    if reason:
        _say("records of parameters go", reason, settings, tries)
    return 0 if reason else needs.staging_bytes


def state_goes_direct(plan: OptimizerPlan, settings: OffloadConfig, *, tries: bool = True) -> bool:
    """Tell if state that is stepped on a device goes there and back without the pool; logs why not, once.

    Args:
        plan: of the state.
        settings: where it goes.
        tries: False: try no drive, and log nothing.

    Raises:
        ConfigError: it does not, and `aio.gds` is on.
    """
    if not plan.on_device or settings.offload_optimizer.device != "nvme":
        return False
    reason = why_not_direct(settings, plan.device if tries else None)
    if reason:
        _say("optimizer state goes", reason, settings, tries)
    return not reason


def check_direct(plans: Sequence[OptimizerPlan], parameters: ParameterPlan | None, settings: OffloadConfig) -> None:
    """Refuse `aio.gds: on` where no record has both ends on a device and its drive. Tries no drive.

    Raises:
        ConfigError: naming what would change that.
    """
    state = any(plan.on_device for plan in plans) and settings.offload_optimizer.device == "nvme"
    on_device = parameters is not None and parameters.device_needs is not None
    if settings.aio.gds == "on" and not state and not (on_device and settings.offload_param.device == "nvme"):
        raise ConfigError(
            "aio.gds: on moves records between the drive and an accelerator, and here none go there: that needs a "
            "model on the accelerator, and offload_param.device: nvme, or offload_optimizer: {device: nvme, "
            "step_device: device}. Set these, or use aio.gds: auto"
        )


def _say(what: str, reason: str, settings: OffloadConfig, tries: bool) -> None:
    if settings.aio.gds == "on":
        raise ConfigError(
            f"aio.gds: on asks for GPUDirect Storage, and {what} through the pool here: {reason}. Mend that, or use "
            "aio.gds: auto"
        )
    if tries:
        _say_once(what, reason)


@functools.cache
def _say_once(what: str, reason: str) -> None:
    log.info("%s between the drive and the device through the pool: %s", what, reason)


def _check_drives(settings: OffloadConfig, stored_bytes: int) -> tuple[tuple[DriveReport, ...], int]:
    """The report of each drive, if they are several; and how much all can take."""
    paths = settings.nvme_paths
    check_nvme_paths(paths)
    speeds = [1]
    if len(paths) > 1:
        speeds = [speed.bps for speed in drive_speeds(settings)]
    found = file_systems(paths)
    free = {i: file_system.free_bytes for file_system in found for i in file_system.members}
    total = sum(speeds)
    reports = [
        DriveReport(path, speed, stored_bytes * speed // total, free[i])
        for i, (path, speed) in enumerate(zip(paths, speeds, strict=True))
    ]
    usable = min(fs.free_bytes * total // sum(speeds[i] for i in fs.members) for fs in found)
    return tuple(reports) if len(paths) > 1 else (), usable
