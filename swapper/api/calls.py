"""The functions of `swapper`: `wrap_optimizer`, `offload`, `init`, `check` and others. Wires everything together."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, ValuesView
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar, overload

import torch
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer

from swapper.api.arguments import ConfigLike, as_config, check_is_model, check_is_optimizer, optimizers_of, tensors_of
from swapper.api.from_files import OWNERS, check_from_files, offload_from_files, refuse_fixed, refuse_others
from swapper.api.wrapped import of
from swapper.check import CheckReport, check_direct, make_report, staging_bytes, state_goes_direct
from swapper.config import OffloadConfig
from swapper.errors import ConfigError
from swapper.files.model_weights import match_weights
from swapper.files.weights import load_weights
from swapper.gradient.records import needs_of as gradient_needs_of
from swapper.gradient.swapper import GradientSwapper
from swapper.io.devices import is_accelerator
from swapper.optimizer.alike import compare
from swapper.optimizer.encoding_choice import choose_encoding
from swapper.optimizer.plan import OptimizerPlan, parameters_of, plan_to_show, swaps_state_of
from swapper.optimizer.probe import refuse_lazy, refuse_unsupported, try_sharded
from swapper.optimizer.step_device import warn_of_for_loop
from swapper.optimizer.swapper import OptimizerSwapper
from swapper.parameter.building import ModelBuilder, device_of, initialisers_of
from swapper.parameter.candidates import swapped_tensors
from swapper.parameter.fsdp import prepare_groups, sharded_parameters
from swapper.parameter.kept_owners import drop_unused_owners, forget_failed_backward
from swapper.parameter.records import ParameterPlan, check_devices, check_torch, plan_parameters
from swapper.parameter.swapper import ParameterSwapper
from swapper.process.warnings import warn_once
from swapper.session import Shared, drive_speeds, is_done_by_all, made, pool_of_parameters
from swapper.sizes import PAGE_BYTES
from swapper.storage.agreement import agreed
from swapper.storage.budget import OptimizerNeeds, PoolBudget
from swapper.storage.buffers import BufferPool
from swapper.storage.growing_pool import GrowingPool
from swapper.tensors import homes
from swapper.tensors.evicted import let_viewed_stay
from swapper.tensors.grad_modes import outside_of_inference
from swapper.tensors.memory_overlap import check_memory, refuse_foreach_on_one_memory
from swapper.tensors.sharded import check_not_flattened, is_sharded

__all__ = ["check", "gathered", "init", "load_safetensors", "materialize", "offload", "wrap_optimizer"]

log = logging.getLogger(__name__)

_OptimizerT = TypeVar("_OptimizerT", bound=Optimizer)
_OptimizersT = TypeVar("_OptimizersT", bound=Optimizer | Sequence[Optimizer] | None)
_ModelT = TypeVar("_ModelT", bound=torch.nn.Module)


def wrap_optimizer(optimizer: _OptimizerT, config: ConfigLike) -> _OptimizerT:
    """Keep the state of `optimizer` where `config.offload_optimizer.device` says, and give the same object back.

    The object is converted in place: its class, `param_groups`, hooks, schedulers and `state_dict` format stay torch's;
    `optimizer.step()` brings the state in, bucket by bucket, and the result has the same bits as without swapping.
    State that it has already is moved out at once. `optimizer.swapper` has `stats()`, `flush()`, `close()` and more.

    Args:
        optimizer: any per-parameter `torch.optim.Optimizer`, over parameters on the CPU or on one accelerator. There,
            `offload_optimizer.step_device` says where the step is computed. Parameters may be DTensors, as after
            `fully_shard`: each rank swaps the state of its own elements, and all ranks make this call.
        config: an `OffloadConfig`, or what makes one: the path of a YAML or JSON file, or a mapping. Optimizers that
            are given the same `OffloadConfig` object share one pool, and on each drive one engine and run directory.

    Returns:
        `optimizer`.

    Raises:
        ConfigError: the config cannot work with this optimizer; the message says which field and why.
        SwapIOError: the drive failed, or has too little free space. The optimizer is then as it was.

        Where several ranks make the call, what one of them raises is raised on all, with its rank.
    """
    check_is_optimizer(optimizer)
    settings = as_config(config, [optimizer], waited_for="drive")
    kept = settings.offload_param.device == "cpu" and any(is_accelerator(p.device) for p in parameters_of(optimizer))
    if settings.offload_param.device == "nvme" or kept:
        raise ConfigError(
            f"offload_param.device: {settings.offload_param.device} needs the model too: call "
            "swapper.offload(model, optimizer, config) instead of wrap_optimizer"
        )
    with outside_of_inference():  # What is made here is used outside of that mode too.
        together = is_done_by_all(settings, parameters_of(optimizer))
        with agreed(together):
            try_sharded(optimizer)
        with agreed(together):
            plans = _plan([optimizer], settings, {})
            check_direct(plans, None, settings)
            budget = _budget(plans, settings, None, Shared.existing(settings))
            budget.check()
        if together:
            compare([optimizer], plans)
        try:
            with agreed(together):
                _wrap(optimizer, plans[0], budget.optimizers[0], settings)
        except BaseException:
            _unwrap([optimizer])
            raise
    return optimizer


@overload
def offload(model: _ModelT, optimizer: _OptimizersT, config: ConfigLike) -> tuple[_ModelT, _OptimizersT]: ...
@overload
def offload(
    model: _ModelT, optimizer: Iterator[Optimizer] | Set[Optimizer] | ValuesView[Optimizer], config: ConfigLike
) -> tuple[_ModelT, list[Optimizer]]: ...
@overload
def offload(
    model: _ModelT,
    *,
    config: ConfigLike,
    weights: str | os.PathLike[str] | None = None,
    device: torch.device | str | int | None = None,
) -> tuple[_ModelT, None]: ...
def offload(
    model: _ModelT,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    config: ConfigLike | None = None,
    *,
    weights: str | os.PathLike[str] | None = None,
    device: torch.device | str | int | None = None,
) -> tuple[_ModelT, Optimizer | Iterable[Optimizer] | None]:
    """Put on disk what `config` names: optimizer state, gradients, parameters. Gives the same objects back.

    All are converted in place: parameters stay the objects they are and keep their shape, dtype and strides; their
    values come when they are used, ahead of it where the order of use is known, and the bits of every result are those
    of the plain model. `model.swapper` is the `ParameterSwapper`, `optimizer.swapper` the `OptimizerSwapper`.

    Args:
        model: with its parameters on the CPU, or on one accelerator: they are then copied up as they are needed, and
            take `offload_param.device_bytes` of its memory. Buffers of 64 KiB and more go to the drive too, and what is
            inside of quantised tensors that have `__tensor_flatten__`. Parameters of other tensor subclasses, of
            ScriptModules, and those that share memory with others stay in memory, and so do small buffers.
            One log line says how many bytes stay and why; `model.swapper.stays` has the names. A model that is
            offloaded already, with the same `OffloadConfig` object, stays so: that is for new optimizers.
        optimizer: of parameters of the model: one that `wrap_optimizer` takes, or several in any iterable. None, or an
            empty list: only the parameters are offloaded, as for evaluation.
        config: see `wrap_optimizer`.
        weights: safetensors files that the parameters stay in, for inference: a file, an index of several, a directory,
            or a model in Hugging Face's cache. Nothing is copied or written; a read-only mount will do. The model is in
            memory or on the meta device, whose parameters are replaced; without an optimizer. Parameters of less than
            64 KiB, those that would stay otherwise, and small buffers are read once. A parameter that is changed later
            is an error, or with `offload_param.copy_on_write` in the run directory from then on. So are files that are.
        device: with `weights`: where the model computes, the CPU or an accelerator. What it has elsewhere comes there,
            as new tensors. None: where it is; of a model on the meta device torch's default device.

    Returns:
        `model`, and `optimizer` as it was given: the optimizer, the sequence, or None. Of an iterable that is no
        sequence, such as a generator, a list of the optimizers.

    Raises:
        ConfigError: the config cannot work with this model and optimizer; the message says which field and why. A
            model of which not one byte of parameters can be moved is refused, and so are DTensors that FSDP2 has not.
        SwapIOError: the drive failed, or has too little free space. Model and optimizers are then as they were.
        SwapError: `weights` do not fit the model, or are no safetensors; the message names file and tensor.
    """
    if config is None:
        raise ConfigError("config: none is given; call swapper.offload(model, optimizer, config)")
    optimizers, given = optimizers_of(optimizer)
    shards = _shards_and_others(model)
    settings = as_config(config, optimizers, shards, waited_for="drive" if weights is None else "always")
    check_is_model(model)
    refuse_others(weights, optimizers, device)
    forget_failed_backward()
    drop_unused_owners()  # Their parts of the pool are free then.
    with outside_of_inference():  # What is made here is used outside of that mode too.
        if weights is not None:
            offload_from_files(model, settings, lambda: match_weights(model, weights), next(OWNERS), device)
        else:
            _offload(model, optimizers, settings)
    return model, given


def _offload(model: torch.nn.Module, optimizers: Sequence[Optimizer], settings: OffloadConfig) -> None:
    # First all plans, of parameters before optimizers: buckets of state follow the records of parameters. Up to the
    # `try` below nothing is made and nothing changes, so there is nothing to undo.
    stepped = (p for each in optimizers if isinstance(each, Optimizer) for p in parameters_of(each))
    together = is_done_by_all(settings, (*stepped, *_shards_and_others(model)))
    with agreed(together):
        for optimizer in optimizers:
            check_is_optimizer(optimizer)
            if swaps_state_of(optimizer, settings):
                try_sharded(optimizer)
    with agreed(together):
        existing = _parameters_on(model, settings)
        if _moves_parameters(model, settings) and existing is None:
            _check_can_be_offloaded(model)
            let_viewed_stay(model.parameters())  # First: the plan counts those of `swapper.init` with views as staying.
        parameters = _plan_parameters(model, settings)
        if settings.offload_optimizer.step_in_backward:
            tensors = dict([*model.named_parameters(), *model.named_buffers()])
            check_memory(tensors, [p for each in optimizers for p in parameters_of(each)])
        plans = _plan(optimizers, settings, {} if parameters is None else parameters.where())
        check_direct(plans, parameters, settings)
        stored = parameters if settings.offload_param.device == "nvme" else None  # Others have a pool of their own.
        budget = _budget(plans, settings, stored, Shared.existing(settings))
        budget.check()
    if together:
        compare(optimizers, plans)
    try:
        with agreed(together):
            _convert(model, existing, parameters, optimizers, plans, budget, settings)
    except BaseException:
        if existing is None and isinstance(swapper := vars(model).get("swapper"), ParameterSwapper):
            swapper.close(keep_values=True)  # Another rank failed.
        _unwrap(optimizers)
        raise


def _convert(
    model: torch.nn.Module,
    swapper: ParameterSwapper | None,
    parameters: ParameterPlan | None,
    optimizers: Sequence[Optimizer],
    plans: Sequence[OptimizerPlan],
    budget: PoolBudget,
    settings: OffloadConfig,
) -> None:
    """Move what was planned. After an exception optimizers may be wrapped: see `_unwrap`; the model is as it was."""
    staging = 0 if parameters is None or swapper is not None else staging_bytes(parameters, settings)
    room = None if parameters is None else parameters.room(settings.offload_param.device_bytes, staging)
    # State and gradients leave memory before parameters do: an optimizer that sets itself up then finds parameters
    # in memory, and does not read each of them from the drive.
    for optimizer, plan, needs in zip(optimizers, plans, budget.optimizers, strict=True):
        _wrap(optimizer, plan, needs, settings)
    for optimizer in optimizers:
        if isinstance(gradients := of(optimizer).gradients, GradientSwapper):
            gradients.watch(_shards_and_others(model))  # Before parameters are hooked, so that their hooks come after.
    shares = budget.shares()
    if parameters is not None:
        if swapper is not None:
            swapper.share_pool(budget)
        else:
            number, device = next(OWNERS), None if room is None else room.device
            pool, store, release = pool_of_parameters(settings, device, parameters.kept_bytes)
            if room is not None and staging:
                memory, release = Shared.of(settings, device).staging(staging, room.device, release)
                room = room._replace(staging=memory)
            # The last step that can fail. It then gives all values back itself.
            swapper = made(
                lambda: ParameterSwapper(model, number, parameters, shares.parameters, pool, store, release, room),
                release,
            )
            object.__setattr__(model, "swapper", swapper)
            swapper.share_pool(budget)
            swapper.made_with = settings
    # Now the swappers get to know each other: until here none depended on one that comes later.
    for optimizer, needs in zip(optimizers, budget.optimizers, strict=True):
        each = of(optimizer)
        if parameters is not None:
            each.attach(parameters=swapper)
        if needs.state is not None:
            each.share_pool(shares.state)
        if needs.gradients is not None and isinstance(each.gradients, GradientSwapper):
            each.gradients.share_pool(needs.gradients.pool_bytes + shares.spare)


def _plan(
    optimizers: Sequence[Optimizer], settings: OffloadConfig, records: Mapping[torch.Tensor, tuple[int, int]]
) -> list[OptimizerPlan]:
    """Plan the state of each optimizer. Changes nothing.

    Raises:
        ConfigError: one cannot be wrapped.
    """
    plans: list[OptimizerPlan] = []
    asked = settings.offload_optimizer
    for number, optimizer in enumerate(optimizers):
        if getattr(optimizer, "swapper", None) is not None or any(each is optimizer for each in optimizers[:number]):
            raise ConfigError("this optimizer is wrapped already; call swapper.unwrap_optimizer(optimizer) first")
        refuse_fixed(optimizer)
        refuse_lazy(optimizer)
        on_accelerator = any(is_accelerator(p.device) for p in parameters_of(optimizer))
        for name, what in ("offload_gradient", "gradients"), ("offload_param", "parameters"):
            if getattr(settings, name).device == "cpu" and not on_accelerator:
                text = f"{name}.device: cpu is the same as none for a model on the CPU: its {what} are there"
                warn_once(log, text)
        swaps_state = swaps_state_of(optimizer, settings)
        if swaps_state:
            refuse_unsupported(optimizer)
            refuse_foreach_on_one_memory(optimizer)
        plan = OptimizerPlan(optimizer, settings, next(OWNERS), records, swaps_state=swaps_state)
        if plan.device.type == "meta":
            raise ConfigError("the parameters are on the meta device and have no values; give the model memory first")
        if on_accelerator and not swaps_state and settings.offload_param.device != "none":
            warn_of_for_loop(optimizer)
        elif plan.on_accelerator and asked.device == "none" and swaps_state:
            why = "master_weights, step_in_backward or gradients that are offloaded"
            warn_once(log, f"offload_optimizer.device: none is the same as cpu on {plan.device} with {why}")
        plans.append(plan)
    return choose_encoding(optimizers, plans, settings, records, OWNERS, drive_speeds)


def _plan_parameters(model: torch.nn.Module, settings: OffloadConfig) -> ParameterPlan | None:
    """Plan the parameters that leave their device's memory, unless they did already; None if they stay."""
    if not _moves_parameters(model, settings):
        return None
    if (swapper := _parameters_on(model, settings)) is not None:
        return swapper.plan
    kept, in_backward = settings.offload_param, settings.offload_optimizer.step_in_backward
    return plan_parameters(model, settings.bucket_bytes, kept.resident_bytes, kept.device_resident_bytes, in_backward)


def _budget(
    plans: Sequence[OptimizerPlan], settings: OffloadConfig, parameters: ParameterPlan | None, shared: Shared | None
) -> PoolBudget:
    stored = settings.offload_gradient.device == "nvme"
    needs = []
    for plan in plans:
        state = plan.schedule() if settings.offload_optimizer.device == "nvme" else None
        # Without a drive nothing is shared: state and gradients each have a pool that is as large as it has to be.
        shares = plan.moves_gradients and (stored or state is not None)
        needs.append(OptimizerNeeds(state, gradient_needs_of(plan.gradient_parts(), stored) if shares else None))
    least = None if parameters is None else parameters.needs
    others_bytes, lost_bytes = (shared.held_bytes, shared.pool.abandoned_bytes) if shared else (0, 0)
    bucket_bytes = settings.following_bucket_bytes
    return PoolBudget(settings.pool_bytes, needs, least, others_bytes, lost_bytes, bucket_bytes)


def _wrap(optimizer: Optimizer, plan: OptimizerPlan, needs: OptimizerNeeds, settings: OffloadConfig) -> None:
    """Move the state of `optimizer`, and its gradients. After an exception it may be wrapped: see `_unwrap`."""
    pool: BufferPool | GrowingPool
    direct = state_goes_direct(plan, settings)
    if needs.state is not None:
        # Makes run directories, engines and the pool, if it is the first.
        shared, release = Shared.held(settings, plan.device, needs.state.held_bytes, plan.wanted_bytes)
        pool_bytes = settings.pool_bytes - shared.held_bytes + needs.state.held_bytes  # What others hold is not for it.
        pool, store = shared.pool, shared.store
    else:  # In memory, in a pool that is as large as it has to be.
        pool_bytes = plan.wanted_bytes
        pool, store = GrowingPool(pool_bytes, device=plan.device), None
        release = pool.close
    try:
        # Engines for cuFile come before the swapper, so that they end after it.
        make_slots = Shared.of(settings, plan.device).device_pools(plan.device) if direct else None
        # Plans files, moves out the state there is, and replaces `step` on the object last. If it fails before that,
        # the object is as it was, and only the hold on the pool is left to be undone.
        OptimizerSwapper(optimizer, plan, pool, pool_bytes, store, release, make_slots)
    except BaseException:
        if getattr(optimizer, "swapper", None) is None:  # Else it was wrapped already, and `unwrap` releases.
            release()
        raise
    swapper = of(optimizer)
    swapper.keep_last = settings.checkpoint.keep_last
    if plan.moves_gradients:
        # After the state: gradients are cut as its buckets are, and a step asks the optimizer's swapper for them.
        gradients = _swap_gradients(optimizer, plan, needs, settings)
        swapper.attach(gradients=gradients)
        gradients.watch(p for p in parameters_of(optimizer) if is_sharded(p))  # Empty shards, too.
        if swapper.backward_steps is not None:
            # Last: from here on a gradient that arrives goes to the steps in backward.
            gradients.deliver_to(swapper.backward_steps)


def _unwrap(optimizers: Iterable[Optimizer]) -> None:
    """Undo `_wrap` of those that came so far: state and gradients are in memory again, holds on the pool released."""
    for optimizer in optimizers:
        swapper = getattr(optimizer, "swapper", None)
        if isinstance(swapper, OptimizerSwapper):
            swapper.unwrap()


def _swap_gradients(
    optimizer: Optimizer, plan: OptimizerPlan, needs: OptimizerNeeds, settings: OffloadConfig
) -> GradientSwapper:
    parts = plan.gradient_parts()
    arguments = optimizer, parts, next(OWNERS), settings.gradient_accumulation_steps
    if needs.gradients is None:  # As for state in memory, a pool that is as large as it has to be.
        own = BufferPool(max(gradient_needs_of(parts, stored=False).total_bytes, PAGE_BYTES), device=plan.device)
        return made(lambda: GradientSwapper(*arguments, own, own.capacity_bytes, None, own.close), own.close)
    kept_bytes = 0 if needs.gradients.stored else needs.gradients.total_bytes
    shared, release = Shared.held(settings, plan.device, kept_bytes, needs.gradients.total_bytes)
    # Not for gradients are what all others keep, this optimizer's state included, and the records of that in a step.
    limit_bytes = settings.pool_bytes - shared.held_bytes + kept_bytes
    if needs.state is not None:
        limit_bytes -= needs.state.pool_bytes - needs.state.held_bytes
    store = shared.store if needs.gradients.stored else None
    place_of = None if settings.offload_gradient.encoding == "exact" else of(optimizer).rounding_of
    return made(lambda: GradientSwapper(*arguments, shared.pool, limit_bytes, store, release, place_of), release)


def _parameters_on(model: torch.nn.Module, settings: OffloadConfig) -> ParameterSwapper | None:
    """Give the swapper that has the parameters of `model`, if it was made with this very config."""
    swapper = vars(model).get("swapper")
    if not isinstance(swapper, ParameterSwapper):
        return None
    if swapper.store is None:
        return swapper if swapper.made_with is settings else None
    shared = Shared.existing(settings)
    return swapper if shared is not None and swapper.store is shared.store else None


def _moves_parameters(model: torch.nn.Module, settings: OffloadConfig) -> bool:
    """True if parameters of `model` leave its device's memory."""
    if settings.offload_param.device == "cpu":
        return any(is_accelerator(parameter.device) for parameter in model.parameters())
    return settings.offload_param.device == "nvme"


def _shards_and_others(model: object) -> list[torch.Tensor]:
    """The parameters of a model; of FSDP2 also the shards that it has, while modules have what it gathered."""
    return [*model.parameters(), *sharded_parameters(model)] if isinstance(model, torch.nn.Module) else []


def _check_can_be_offloaded(model: torch.nn.Module) -> None:
    if isinstance(vars(model).get("swapper"), ParameterSwapper):
        raise ConfigError("this model is offloaded already; call model.swapper.close(keep_values=True) first")
    check_not_flattened(model)
    check_devices(model)
    prepare_groups(model)


@contextmanager
def init(config: ConfigLike, device: torch.device | str | None = None) -> Iterator[None]:
    """Build a model that does not fit in memory: `with swapper.init(config): model = GPT(...)`.

    Each parameter of 16 KiB or more goes to the drive as soon as its module is registered in its parent, or sooner if
    more than `bucket_bytes` of parameters wait for that. What the constructor does with one afterwards (another
    initialisation, `self.apply(...)`, tied weights, a conversion) stages it. So the model has the bits it would have
    without this. The random numbers are drawn in the same order.

    Give the model to `swapper.offload` afterwards: it takes the parameters over. One that is never given to it works
    as it is, slowly. The files go when the model dies.

    Args:
        config: `offload_param.device` must be nvme; or cpu for a model on an accelerator, which is then built in memory
            of the host. With the same `OffloadConfig` object `offload` shares the pool, engines and run directory; with
            another one the pools of both exist until it is done.
        device: of the model: the CPU, or an accelerator, where its parameters come whenever they are used. What is made
            within this is made there. None: torch's default device (`torch.set_default_device`).

    Raises:
        ConfigError: the pool is too small for one of the parameters, or nothing is to go to a drive.
        SwapError: used within itself.
        SwapIOError: the drive failed, or has too little free space.
    """
    with _builder(as_config(config), on := device_of(device)).building(), nullcontext() if device is None else on:
        yield


def materialize(
    model: _ModelT,
    config: ConfigLike,
    initialiser: Callable[[torch.nn.Module], object] | None = None,
    device: torch.device | str | None = None,
) -> _ModelT:
    """Give a model on the meta device values on the drive, module by module: it need not fit in memory.

    What it is then is as after `init`. Its parameters on the meta device are replaced by new ones, with the attributes
    of the old; tied ones stay tied. So make the optimizer afterwards. Buffers get memory and stay there.

    Args:
        model: of which some or all parameters and buffers are on the meta device. The others stay as they are.
        config: as for `init`.
        initialiser: called for each module that has tensors on the meta device itself, in order of registration, once
            they have memory, with undefined content. None: the module's own `reset_parameters()`. What it leaves alone
            can be filled later, by `load_safetensors`, `load_state_dict` or in place; until then any use of it is a
            `SwapError` with its name.
        device: as for `init`.

    Returns:
        `model`. After an exception it is of no use.

    Raises:
        ConfigError: a module has no `reset_parameters` and there is no `initialiser`; nothing is changed then. And as
            for `init`.
        SwapIOError: the drive failed, or has too little free space.
    """
    check_is_model(model)
    initialisers = initialisers_of(model, initialiser)
    builder = _builder(as_config(config), device_of(device))
    with builder.building():
        builder.materialize(model, initialisers)
    return model


def load_safetensors(model: torch.nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> _IncompatibleKeys:
    """Load weights from safetensors files into any model, swapped or not, within `init` or after it.

    As `model.load_state_dict(...)` does, with its hooks and its casts to the model's dtypes; but of the files only one
    tensor is in memory at a time. Shows its progress on a terminal.

    Args:
        model: with memory, or on the drive: see `materialize`.
        path: a .safetensors file; an index (`model.safetensors.index.json`) of several; or a directory with either.
        strict: all of the model's names must be in the files, and no others. A parameter that has several names needs
            to be there under one of them. A buffer that is not persistent is in no file: one that `materialize` gave
            memory must have been filled before, unless the model fills it in its forward and this is False.

    Returns:
        What `load_state_dict` returns: `missing_keys` and `unexpected_keys`.

    Raises:
        SwapError: the files do not fit the model; or one is no safetensors file, or an index that names files outside
            of its directory. The message names file and tensor. What did fit is loaded.
        SwapIOError: a file could not be read, or is cut off; or the model's drive failed.
        ConfigError: the model is on the meta device, or is none.
    """
    check_is_model(model)
    return load_weights(model, path, strict)


def gathered(
    parameters: torch.nn.Module | torch.Tensor | Iterable[torch.Tensor],
) -> AbstractContextManager[object]:
    """Plain access: `with swapper.gathered(module): ...` has all its tensors in memory, as ordinary ones.

    Within it parameters are of class `torch.nn.Parameter`, or of their own, `p.data`, `p.numpy()` and pointers to them
    included; what is changed is kept. Without it any use works too, but stages parameters for each operation anew. Of
    tensors that are not swapped this does nothing.

    Args:
        parameters: a module, with those below it, or some parameters or buffers.

    Raises:
        ConfigError: `parameters` are no module and no tensors.
        PoolExhausted: on entering, with the sum: they do not fit the pool together.
        SwapIOError: the drive failed.
    """
    if isinstance(parameters, torch.nn.Module):
        parameters = swapped_tensors(parameters)
    elif isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    return homes.gathered(tensors_of(parameters))


def _builder(settings: OffloadConfig, device: torch.device) -> ModelBuilder:
    asked = settings.offload_param.device
    if asked == "none" or (asked == "cpu" and not is_accelerator(device)):
        text = f"offload_param.device: {asked} leaves parameters on {device} in memory"
        raise ConfigError(f"{text}; set it to nvme, or build the model without swapper")
    check_torch()
    with outside_of_inference():  # What is made here is used outside of that mode too.
        number, bucket_bytes, pool_bytes = next(OWNERS), settings.bucket_bytes, settings.pool_bytes
        device_bytes = settings.offload_param.device_bytes or pool_bytes
        pool, store, release = pool_of_parameters(settings, device, 0, bucket_bytes)
        return made(
            lambda: ModelBuilder(number, bucket_bytes, pool_bytes, pool, store, release, device, device_bytes), release
        )


def check(
    model: torch.nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    config: ConfigLike | None = None,
    *,
    weights: str | os.PathLike[str] | None = None,
    device: torch.device | str | int | None = None,
) -> CheckReport:
    """Dry run: what `offload` would need in memory and on the drive, and what a step would move. Prints it.

    Allocates nothing, creates no file and leaves model and optimizers as they are. The model may be on the meta device
    if its optimizers are too. The speed of the drives is measured, with a temporary file of at most 32 MiB on each, if
    they are several, since what each would get depends on it and is a little different at every measurement, and where
    it decides whether `encoding: exact` packs.

    Args:
        model, optimizer, config, weights, device: as for `offload`; of several optimizers the sums are given.

    Raises:
        ConfigError: what `offload` would refuse.
    """
    if config is None:
        raise ConfigError("config: none is given; call swapper.check(model, optimizer, config)")
    settings = as_config(config)
    check_is_model(model)
    optimizers, _ = optimizers_of(optimizer)
    refuse_others(weights, optimizers, device)
    if weights is not None:
        return check_from_files(model, settings, lambda: match_weights(model, weights), device)
    for each in optimizers:
        check_is_optimizer(each)
    if _moves_parameters(model, settings):
        check_not_flattened(model)
    parameters = _plan_parameters(model, settings)
    if parameters is not None and parameters.summary and _parameters_on(model, settings) is None:
        log.warning("%s", parameters.summary)
    records = {} if parameters is None else parameters.where()
    plans = [plan_to_show(each, settings, number, records) for number, each in enumerate(optimizers)]
    plans = choose_encoding(optimizers, plans, settings, records, OWNERS, drive_speeds)
    budget = _budget(plans, settings, parameters if settings.offload_param.device == "nvme" else None, None)
    budget.check(as_a_whole=True)
    report = make_report(model, optimizers, plans, parameters, budget, settings)
    print(report)
    return report
