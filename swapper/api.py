"""What users call: `wrap_optimizer`, `unwrap_optimizer`, `of`, `check`. Wires everything together."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer

from swapper import evicted
from swapper.buffers import BufferPool
from swapper.config import OffloadConfig
from swapper.errors import ConfigError, SwapError
from swapper.gradient import GradientSwapper
from swapper.gradient_records import can_leave, check_room, gradient_bytes, gradient_pool_bytes
from swapper.handle import AsyncIOHandle
from swapper.layout import PAGE_BYTES
from swapper.nursery import Nursery, initialisers_of
from swapper.optimizer import OptimizerSwapper, UnswappedOptimizer
from swapper.optimizer_plan import OptimizerPlan, parameters_of
from swapper.parameter import ParameterSwapper
from swapper.parameter_records import plan_parameter_records
from swapper.runs import check_nvme_paths, file_systems
from swapper.schedule import IN_FLIGHT, READ_AHEAD, format_bytes
from swapper.speed import measure_speeds
from swapper.store import TensorStore
from swapper.trial import refuse_unsupported
from swapper.weights import load_weights

__all__ = [
    "CheckReport",
    "DriveReport",
    "check",
    "gathered",
    "init",
    "load_safetensors",
    "materialize",
    "of",
    "offload",
    "unwrap_optimizer",
    "wrap_optimizer",
]

log = logging.getLogger(__name__)

_OptimizerT = TypeVar("_OptimizerT", bound=Optimizer)
_ModelT = TypeVar("_ModelT", bound=torch.nn.Module)
ConfigLike = OffloadConfig | str | os.PathLike[str] | Mapping[str, Any]

_owners = itertools.count()
_TYPICAL_ENDURANCE_BYTES = 600 * 10**12


def wrap_optimizer(optimizer: _OptimizerT, config: ConfigLike) -> _OptimizerT:
    """Keep the state of `optimizer` where `config.offload_optimizer.device` says, and give the same object back.

    The object is converted in place: its class, `param_groups`, hooks, schedulers and `state_dict` format stay torch's;
    `optimizer.step()` brings the state in, bucket by bucket, and the result has the same bits as without swapping.
    State that it has already is moved out at once. `optimizer.swapper` has `stats()`, `flush()`, `close()` and more.

    Args:
        optimizer: any per-parameter `torch.optim.Optimizer`, over parameters on the CPU or on one CUDA device. With
            CUDA the step is computed on the CPU: the state never visits the device.
        config: an `OffloadConfig`, or what makes one: the path of a YAML or JSON file, or a mapping. Optimizers that
            are given the same `OffloadConfig` object share one pool, and on each drive one engine and run directory.

    Returns:
        `optimizer`.

    Raises:
        ConfigError: the config cannot work with this optimizer; the message says which field and why.
        SwapIOError: the drive failed, or has too little free space. The optimizer is then as it was.
    """
    settings = _as_config(config)
    if settings.offload_param.device == "nvme":
        raise ConfigError(
            f"offload_param.device: {settings.offload_param.device} needs the model too: call "
            "swapper.offload(model, optimizer, config) instead of wrap_optimizer"
        )
    return _wrap(optimizer, settings)


def _wrap(
    optimizer: _OptimizerT, settings: OffloadConfig, records: Mapping[int, tuple[int, int]] | None = None
) -> _OptimizerT:
    _check_is_optimizer(optimizer)
    if getattr(optimizer, "swapper", None) is not None:
        raise ConfigError("this optimizer is wrapped already; call swapper.unwrap_optimizer(optimizer) first")
    device = settings.offload_optimizer.device
    refuse_unsupported(optimizer)
    moves_gradients = settings.offload_gradient.device == "nvme"
    if settings.offload_gradient.device == "cpu":
        moves_gradients = any(p.device.type == "cuda" for p in parameters_of(optimizer))
        if not moves_gradients:
            _say_once(
                "offload_gradient.device: cpu is the same as none for a model on the CPU: its gradients are there"
            )
    if settings.offload_param.device == "cpu":
        if any(p.device.type == "cuda" for p in parameters_of(optimizer)):
            raise ConfigError(
                "offload_param.device: cpu is not there yet for a model on a GPU in this version of swapper; use none"
            )
        _say_once("offload_param.device: cpu is the same as none for a model on the CPU: its parameters are there")
    asked = settings.offload_optimizer
    asks_more = asked.master_weights or asked.step_in_backward or moves_gradients
    if device == "none" and not asks_more:
        UnswappedOptimizer(optimizer)
        return optimizer
    plan = OptimizerPlan(optimizer, settings, next(_owners), records)
    if plan.device.type == "meta":
        raise ConfigError("the parameters are on the meta device and have no values; give the model memory first")
    if device == "nvme":
        plan.schedule(settings.pool_bytes)  # Refuses what cannot work before anything is made.
        shared = _Shared.of(settings, plan.device.type == "cuda")
        pool_bytes = settings.pool_bytes - shared.held_bytes
        release = shared.hold(plan.schedule(pool_bytes).held_bytes)
        pool, store = shared.pool, shared.store
    else:
        if device == "none" and plan.remote:
            raise ConfigError(
                "offload_optimizer.device: none can neither keep master weights nor step gradients that are offloaded "
                "for a model on a GPU; use device: cpu"
            )
        pool_bytes = plan.stored_bytes + plan.scratch_bytes * plan.scratch_count
        pool, store = BufferPool(max(pool_bytes, PAGE_BYTES), cuda=plan.device.type == "cuda"), None
        release = pool.close
    try:
        OptimizerSwapper(optimizer, plan, pool, pool_bytes, store, release)
    except BaseException:
        if getattr(optimizer, "swapper", None) is None:  # Else Ctrl-C struck when it was wrapped already.
            release()
        raise
    if moves_gradients:
        swapper = of(optimizer)
        try:
            gradients = _swap_gradients(plan, settings)
            swapper.attach(gradients=gradients)
            if swapper.backward_steps is not None:
                gradients.deliver_to(swapper.backward_steps)
        except BaseException:
            swapper.unwrap()
            raise
    return optimizer


def _swap_gradients(plan: OptimizerPlan, settings: OffloadConfig) -> GradientSwapper:
    parts = plan.gradient_parts()
    total_bytes, _ = gradient_bytes(parts)
    stored = settings.offload_gradient.device == "nvme"
    state_stored = settings.offload_optimizer.device == "nvme"
    owner, steps = next(_owners), settings.gradient_accumulation_steps
    if not stored and not state_stored:  # As for state with device: cpu, a pool of the size that is needed.
        own = BufferPool(max(total_bytes, PAGE_BYTES), cuda=plan.device.type == "cuda")
        try:
            return GradientSwapper(parts, owner, steps, own, own.capacity_bytes, None, own.close)
        except BaseException:
            own.close()
            raise
    shared = _Shared.of(settings, plan.device.type == "cuda")
    limit_bytes = settings.pool_bytes - shared.held_bytes
    if state_stored:
        schedule = plan.schedule(settings.pool_bytes)
        limit_bytes -= schedule.pool_bytes - schedule.held_bytes
    release = shared.hold(0 if stored else total_bytes)
    try:
        return GradientSwapper(parts, owner, steps, shared.pool, limit_bytes, shared.store if stored else None, release)
    except BaseException:
        release()
        raise


def offload(model: _ModelT, optimizer: _OptimizerT, config: ConfigLike) -> tuple[_ModelT, _OptimizerT]:
    """Put on disk what `config` names: optimizer state, gradients, parameters. Gives the same two objects back.

    Both are converted in place: parameters stay the objects they are and keep their shape, dtype and strides; their
    values come when they are used, ahead of it where the order of use is known, and the bits of every result are those
    of the plain model. `model.swapper` is the `ParameterSwapper`, `optimizer.swapper` the `OptimizerSwapper`.

    Args:
        model: with its parameters on the CPU. Parameters of integer or quantised dtype, of ScriptModules, and those
            that share memory with others stay in memory, named in a log line with the reason.
        optimizer: of parameters of the model; any that `wrap_optimizer` takes.
        config: see `wrap_optimizer`.

    Returns:
        `model` and `optimizer`.

    Raises:
        ConfigError: the config cannot work with this model and optimizer; the message says which field and why.
        SwapIOError: the drive failed, or has too little free space. Model and optimizer are then as they were.
    """
    settings = _as_config(config)
    _check_is_model(model)
    records = None
    if settings.offload_param.device == "nvme":
        _check_can_be_offloaded(model)
        evicted.let_viewed_stay(model.parameters())
        planned, _ = plan_parameter_records(model, settings.bucket_bytes)
        records = {id(place.parameter): (r.number, r.length_bytes) for r in planned for place in r.places}
    _wrap(optimizer, settings, records)
    try:
        _offload(model, optimizer, settings)
    except BaseException:
        swapper = getattr(optimizer, "swapper", None)
        if isinstance(swapper, OptimizerSwapper):
            swapper.unwrap()
        raise
    return model, optimizer


def _offload(model: torch.nn.Module, optimizer: Optimizer, settings: OffloadConfig) -> None:
    """Parameters, after the optimizer's state and the gradients."""
    swapper = of(optimizer)
    gradients: GradientSwapper | None = None
    parameters: ParameterSwapper | None = None
    free_bytes, record_bytes, gradient_bytes = settings.pool_bytes, 0, 0
    if settings.offload_optimizer.device == "nvme":  # Else it takes nothing from this pool.
        schedule = swapper._plan.schedule(settings.pool_bytes)
        free_bytes -= schedule.pool_bytes
        record_bytes = schedule.largest_bytes
    if isinstance(swapper.gradients, GradientSwapper):
        gradients = swapper.gradients
        gradients.watch(model.parameters())
        free_bytes -= gradients.reserved_bytes
        gradient_bytes = gradients.reserved_bytes // IN_FLIGHT
    if settings.offload_param.device == "nvme":
        shared = _Shared.of(settings, False)
        free_bytes -= shared.pool.abandoned_bytes
        release = shared.hold(0)
        try:
            parameters = ParameterSwapper(
                model,
                next(_owners),
                settings.bucket_bytes,
                free_bytes,
                min(free_bytes // 2, READ_AHEAD * (record_bytes + gradient_bytes)),
                settings.offload_param.resident_bytes,
                settings.offload_optimizer.step_in_backward,
                shared.pool,
                shared.store,
                release,
            )
        except BaseException:
            release()
            raise
        swapper.attach(parameters=parameters)
        object.__setattr__(model, "swapper", parameters)
        free_bytes -= parameters.held_bytes_max
    # Beside what each needs at least. Of the three in flight one is in use.
    if settings.offload_optimizer.device == "nvme":
        swapper.share_pool((IN_FLIGHT - 1) * record_bytes + free_bytes // 2)
    if gradients is not None:
        gradients.share_pool(gradients.reserved_bytes + free_bytes // 2)


_said: set[str] = set()


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        log.warning("%s", text)


def _check_can_be_offloaded(model: torch.nn.Module) -> None:
    if isinstance(vars(model).get("swapper"), ParameterSwapper):
        raise ConfigError("this model is offloaded already; call model.swapper.close(keep_values=True) first")
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            raise ConfigError(f"parameter {name} is on the meta device and has no values; give the model memory first")
        if parameter.device.type != "cpu":
            raise ConfigError(
                f"offload_param.device: nvme cannot work for parameter {name} on {parameter.device} in this version of "
                "swapper; keep the model on the CPU, or use offload_param.device: none"
            )


def _check_is_model(model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        name = model.__name__ if isinstance(model, type) else type(model).__name__
        raise ConfigError(f"{name} is not a torch.nn.Module; call swapper.offload(model, optimizer, config)")


@contextmanager
def init(config: ConfigLike) -> Iterator[None]:
    """Build a model that does not fit in memory: `with swapper.init(config): model = GPT(...)`.

    Each parameter of 16 KiB or more goes to the drive as soon as its module is registered in its parent, or sooner if
    more than `bucket_bytes` of parameters wait for that. What the constructor does with one afterwards (another
    initialisation, `self.apply(...)`, tied weights, a conversion) stages it. So the model has the bits it would have
    without this. The random numbers are drawn in the same order.

    Give the model to `swapper.offload` afterwards: it takes the parameters over. One that is never given to it works
    as it is, slowly. The files go when the model dies.

    Args:
        config: `offload_param.device` must be nvme. With the same `OffloadConfig` object `offload` shares the pool,
            engines and run directory; with another one the pools of both exist until it is done.

    Raises:
        ConfigError: the pool is too small for one of the parameters, or nothing is to go to a drive.
        SwapError: used within itself.
        SwapIOError: the drive failed, or has too little free space.
    """
    with _nursery(_as_config(config)).building():
        yield


def materialize(
    model: _ModelT, config: ConfigLike, initialiser: Callable[[torch.nn.Module], object] | None = None
) -> _ModelT:
    """Give a model on the meta device values on the drive, module by module: it need not fit in memory.

    What it is then is as after `init`. Its parameters on the meta device are replaced by new ones, with the attributes
    of the old; tied ones stay tied. So make the optimizer afterwards. Buffers get memory and stay there.

    Args:
        model: of which some or all parameters and buffers are on the meta device. The others stay as they are.
        config: as for `init`.
        initialiser: called for each module that has tensors on the meta device itself, in order of registration, once
            they have memory, with undefined content. None: the module's own `reset_parameters()`.

    Returns:
        `model`. After an exception it is of no use.

    Raises:
        ConfigError: a module has no `reset_parameters` and there is no `initialiser`; nothing is changed then. And as
            for `init`.
        SwapIOError: the drive failed, or has too little free space.
    """
    initialisers = initialisers_of(model, initialiser)
    nursery = _nursery(_as_config(config))
    with nursery.building():
        nursery.materialize(model, initialisers)
    return model


def load_safetensors(model: torch.nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> _IncompatibleKeys:
    """Load weights from safetensors files into any model, swapped or not, within `init` or after it.

    As `model.load_state_dict(...)` does, with its hooks and its casts to the model's dtypes; but of the files only one
    tensor is in memory at a time. Shows its progress on a terminal.

    Args:
        model: with memory, or on the drive: see `materialize`.
        path: a .safetensors file; an index (`model.safetensors.index.json`) of several; or a directory with either.
        strict: all of the model's names must be in the files, and no others. A parameter that has several names needs
            to be there under one of them.

    Returns:
        What `load_state_dict` returns: `missing_keys` and `unexpected_keys`.

    Raises:
        SwapError: the files do not fit the model, or one is no safetensors file. The message names file and tensor.
            What did fit is loaded.
        SwapIOError: a file could not be read, or is cut off; or the model's drive failed.
        ConfigError: the model is on the meta device.
    """
    return load_weights(model, path, strict)


def gathered(
    parameters: torch.nn.Module | torch.nn.Parameter | Iterable[torch.nn.Parameter],
) -> AbstractContextManager[object]:
    """Plain access: `with swapper.gathered(module): ...` has all its parameters in memory, as ordinary ones.

    Within it they are of class `torch.nn.Parameter`, `p.data`, `p.numpy()` and pointers to them included; what is
    changed is kept. Without it any use works too, but stages parameters for each operation anew. Of parameters that
    are not swapped this does nothing.

    Args:
        parameters: a module, with those below it, or some parameters.

    Raises:
        PoolExhausted: on entering, with the sum: they do not fit the pool together.
        SwapIOError: the drive failed.
    """
    if isinstance(parameters, torch.nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, torch.nn.Parameter):
        parameters = [parameters]
    return evicted.gathered(parameters)


def _nursery(settings: OffloadConfig) -> Nursery:
    if settings.offload_param.device != "nvme":
        raise ConfigError(
            f"offload_param.device: {settings.offload_param.device} leaves parameters in memory; set it to nvme, or "
            "build the model without swapper"
        )
    shared = _Shared.of(settings, False)
    release = shared.hold(0)
    try:
        return Nursery(next(_owners), settings.bucket_bytes, settings.pool_bytes, shared.pool, shared.store, release)
    except BaseException:
        release()
        raise


def unwrap_optimizer(optimizer: _OptimizerT, *, drop_masters: bool = False) -> _OptimizerT:
    """Bring all state back into memory and make `optimizer` the plain optimizer it was.

    Args:
        optimizer: from `wrap_optimizer`.
        drop_masters: needed where there are master weights, which a plain optimizer has no place for: their precision
            beyond that of the parameters is lost, and the state is cast to the parameters' dtype.

    Raises:
        SwapError: it is not wrapped; or there are masters and `drop_masters` is False.
    """
    swapper = of(optimizer)
    if swapper.has_masters and not drop_masters:
        raise SwapError(
            "unwrapping would lose the fp32 master weights; save optimizer.state_dict(), or pass drop_masters=True"
        )
    swapper.unwrap()
    return optimizer


def of(optimizer: Optimizer) -> OptimizerSwapper:
    """The `OptimizerSwapper` of a wrapped optimizer: `optimizer.swapper`, typed.

    Raises:
        SwapError: it is not wrapped.
    """
    swapper = getattr(optimizer, "swapper", None)
    if not isinstance(swapper, OptimizerSwapper):
        raise SwapError("this optimizer is not wrapped; call swapper.wrap_optimizer(optimizer, config)")
    return swapper


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
        parameter_numel: elements of the optimizer's parameters.
        model_bytes: parameters and buffers of the model, and those gradients of its parameters that stay in memory.
        state_bytes: optimizer state, as stored.
        gradient_bytes: gradients that do not stay in memory, or on the GPU.
        buckets: how many records it is cut into.
        pool_bytes: size of the pool that would be allocated.
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
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def check(model: torch.nn.Module, optimizer: Optimizer, config: ConfigLike) -> CheckReport:
    """Dry run: what `wrap_optimizer` would need in memory and on the drive, and what a step would move. Prints it.

    Optimizer state and gradients are counted; parameters count as in memory.

    Allocates nothing, creates no file and leaves model and optimizer as they are. The model may be on the meta device
    if the optimizer is too. Only with several drives their speed is measured, with a temporary file of at most 32 MiB
    on each: what each would get depends on it, and is a little different at every measurement.

    Raises:
        ConfigError: what `wrap_optimizer` would refuse.
    """
    settings = _as_config(config)
    _check_is_optimizer(optimizer)
    refuse_unsupported(optimizer)
    plan = OptimizerPlan(optimizer, settings, 0)
    parts = plan.gradient_parts()
    state_stored = settings.offload_optimizer.device == "nvme"
    gradients_stored = settings.offload_gradient.device == "nvme"
    gradients_move = gradients_stored or (settings.offload_gradient.device == "cpu" and plan.remote)
    gradient_total = gradient_bytes(parts)[0] if gradients_move else 0
    scratch_bytes = plan.scratch_bytes * plan.scratch_count
    pool_bytes = settings.pool_bytes if state_stored or gradients_stored else 0
    needed_bytes = own_bytes = read_bytes = written_bytes = stored_bytes = 0
    if state_stored:
        schedule = plan.schedule(settings.pool_bytes)
        needed_bytes = schedule.pool_bytes
        read_bytes = plan.stored_bytes - (schedule.held_bytes - scratch_bytes)
        written_bytes = stored_bytes = plan.stored_bytes
    else:
        own_bytes = plan.stored_bytes + scratch_bytes
    if gradients_stored or (gradients_move and state_stored):
        check_room(parts, gradients_stored, settings.pool_bytes - needed_bytes, settings.pool_bytes)
        needed_bytes += gradient_pool_bytes(parts, gradients_stored)
    elif gradients_move:
        own_bytes += gradient_total
    if gradients_stored:
        # Of the first micro-batch nothing is read to add to it, but then all for the step.
        read_bytes += gradient_total * settings.gradient_accumulation_steps
        written_bytes += gradient_total * settings.gradient_accumulation_steps
        stored_bytes += gradient_total
    drives, free_bytes = _check_drives(settings, stored_bytes) if stored_bytes else ((), -1)
    if pool_bytes:  # A config also asks for three whole buckets, though the largest of this model may be smaller.
        needed_bytes = max(needed_bytes, 3 * settings.bucket_bytes)
    away = {id(p) for _, p, _, _ in parts if can_leave(p)} if gradients_move else set()
    tensors = [*model.parameters(), *model.buffers()]
    in_memory = [p for p in model.parameters() if p.requires_grad and id(p) not in away]
    model_bytes = sum(t.nbytes for t in tensors) + sum(p.nbytes for p in in_memory)
    worn_bytes = written_bytes
    if drives:
        worn_bytes = written_bytes * max(drive.disk_bytes for drive in drives) // max(stored_bytes, 1)
    report = CheckReport(
        parameter_numel=sum(p.numel() for group in optimizer.param_groups for p in group["params"]),
        model_bytes=model_bytes,
        state_bytes=plan.stored_bytes,
        gradient_bytes=gradient_total,
        buckets=len(plan.buckets),
        pool_bytes=pool_bytes + own_bytes,
        pool_needed_bytes=needed_bytes + own_bytes,
        host_bytes=(0 if plan.remote else model_bytes) + pool_bytes + own_bytes + 2 * settings.bucket_bytes,
        disk_bytes=stored_bytes,
        disk_free_bytes=free_bytes,
        step_read_bytes=read_bytes,
        step_written_bytes=written_bytes,
        steps_of_endurance=_TYPICAL_ENDURANCE_BYTES // worn_bytes if worn_bytes else 0,
        drives=drives,
    )
    print(report)
    return report


def _check_drives(settings: OffloadConfig, stored_bytes: int) -> tuple[tuple[DriveReport, ...], int]:
    """What each drive would get, if they are several; and how much all can take."""
    paths = settings.nvme_paths
    check_nvme_paths(paths)
    speeds = [1]
    if len(paths) > 1:
        handles = _open_handles(settings)
        try:
            speeds = [speed.bps for speed in measure_speeds(paths, handles)]
        finally:
            _close_all(handles)
    found = file_systems(paths)
    free = {i: file_system.free_bytes for file_system in found for i in file_system.members}
    total = sum(speeds)
    reports = [
        DriveReport(path, speed, stored_bytes * speed // total, free[i])
        for i, (path, speed) in enumerate(zip(paths, speeds, strict=True))
    ]
    usable = min(fs.free_bytes * total // sum(speeds[i] for i in fs.members) for fs in found)
    return tuple(reports) if len(paths) > 1 else (), usable


class _Shared:
    """The pool, engines and run directories of one `OffloadConfig` object, closed when the last optimizer lets go."""

    _all: ClassVar[weakref.WeakValueDictionary[int, _Shared]] = weakref.WeakValueDictionary()

    def __init__(self, config: OffloadConfig, cuda: bool) -> None:
        self._config = config  # Kept, so that its id stays its own.
        self._holders = 0
        self.held_bytes = 0
        self.handles = _open_handles(config)
        try:
            # The store comes first: what is wrong with a path is said before memory is taken.
            self.store = TensorStore(
                config.nvme_paths, _run_name(), _rank(), self.handles, verify=config.verify == "crc32c"
            )
            try:
                self.pool = BufferPool(config.pool_bytes, *self.handles, cuda=cuda)
            except BaseException:
                self.store.close()
                raise
        except BaseException:
            _close_all(self.handles)
            raise

    @classmethod
    def of(cls, config: OffloadConfig, cuda: bool) -> _Shared:
        """The one of this very object; made if there is none."""
        shared = cls._all.get(id(config))
        if shared is None:
            shared = cls._all[id(config)] = cls(config, cuda)
        return shared

    def hold(self, held_bytes: int) -> Callable[[], None]:
        """Count one more holder, which keeps `held_bytes` of the pool. Returns what lets go; it may be called twice."""
        self._holders += 1
        self.held_bytes += held_bytes
        done = False

        def release() -> None:
            nonlocal done
            if not done:
                done = True
                self._holders -= 1
                self.held_bytes -= held_bytes
            if self._holders == 0:
                self._close()

        return release

    def _close(self) -> None:
        if self._all.get(id(self._config)) is self:
            del self._all[id(self._config)]
        try:
            self.store.close()
            self.pool.close()
        finally:
            _close_all(self.handles)


def _open_handles(config: OffloadConfig) -> list[AsyncIOHandle]:
    """An engine for each drive, so that a slow one does not hold the queue of a fast one."""
    handles: list[AsyncIOHandle] = []
    aio = config.aio
    try:
        for _ in config.nvme_paths:
            handles.append(
                AsyncIOHandle(
                    backend=aio.backend,
                    block_bytes=aio.block_size,
                    queue_depth=aio.queue_depth,
                    threads=aio.intra_op_parallelism,
                    single_submit=aio.single_submit,
                    overlap_events=aio.overlap_events,
                )
            )
    except BaseException:
        _close_all(handles)
        raise
    return handles


def _close_all(handles: Sequence[AsyncIOHandle]) -> None:
    """Close every handle, whatever the others raise; then raise what the first did."""
    failures: list[BaseException] = []
    for handle in handles:
        try:
            handle.close()
        except BaseException as error:
            failures.append(error)
    if failures:
        raise failures[0]


def _as_config(config: ConfigLike) -> OffloadConfig:
    if isinstance(config, OffloadConfig):
        return config
    if isinstance(config, Mapping):
        return OffloadConfig.model_validate(dict(config))
    if not isinstance(config, (str, os.PathLike)):
        raise ConfigError(
            f"config: {type(config).__name__} is not a config; give a swapper.OffloadConfig, a mapping, or the path of "
            "a YAML or JSON file"
        )
    return OffloadConfig.load(config)


def _check_is_optimizer(optimizer: object) -> None:
    if not isinstance(optimizer, Optimizer):
        name = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        raise ConfigError(f"optimizer: {name} is not a torch.optim.Optimizer; wrap the one inside it")


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


def _run_name() -> str:
    """A name that no other run has; the same on all ranks, where rank 0 chooses it."""
    names = [secrets.token_hex(6)]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(names, src=0)
    return names[0]
