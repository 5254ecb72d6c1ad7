"""`prepare`: a model and optimizers for accelerate, swapped; and what the Trainer needs of the same."""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.optim import Optimizer

from swapper.api import offload
from swapper.api.arguments import ConfigLike, as_config, check_is_model
from swapper.config import OffloadConfig
from swapper.errors import ConfigError
from swapper.gradient.swapper import GradientSwapper
from swapper.optimizer.plan import parameters_of
from swapper.parameter.swapper import ParameterSwapper
from swapper.storage.agreement import agreed
from swapper.strategy.ddp_sync import ddp_arguments
from swapper.strategy.swapping import swapper_of
from swapper.tensors.sharded import is_sharded

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]

__all__ = ["prepare", "shards", "swap", "swap_when_sharded"]

_ModelT = TypeVar("_ModelT", bound=torch.nn.Module)


def prepare(
    accelerator: Accelerator, model: _ModelT, optimizer: Any, config: ConfigLike, *others: Any
) -> tuple[Any, ...]:
    """`accelerator.prepare(model, optimizer, *others)`, of a model and optimizers that are offloaded first.

    Everything else stays as accelerate has it: `backward`, accumulation, `clip_grad_norm_`, `save_state`, `load_state`.
    Clipping leaves gradients that are evicted where they are.

    Args:
        accelerator: an `accelerate.Accelerator`; of those that shard one that does so by FSDP2, and none on XLA.
        model: not prepared yet. With FSDP2 it is offloaded when it is sharded: each rank has its shards on its drive.
        optimizer: of parameters of the model, not prepared yet; or several in a list or tuple.
        config: see `swapper.wrap_optimizer`.
        others: data loaders, schedulers and other models, as for `accelerator.prepare`.

    Returns:
        The prepared objects in the order of the arguments: model, optimizer (or each of them), others.

    Raises:
        ConfigError: the config cannot work with this model and optimizer, or with what `accelerator` is; or what is
            given is no accelerator, model or optimizer.
        SwapIOError: the drive failed, or has too little free space. Model and optimizer are then as they were, or as
            accelerate has prepared them, if it shards.
    """
    if not hasattr(accelerator, "distributed_type"):
        raise ConfigError(
            f"swapper.hf.prepare: {type(accelerator).__name__} is not an accelerate.Accelerator; it comes first"
        )
    in_shards = shards(accelerator)
    check_is_model(model)
    optimizers: Sequence[Any] = optimizer if isinstance(optimizer, Sequence) else [optimizer]
    if not optimizers:
        raise ConfigError("swapper.hf.prepare: no optimizer is given; for a model alone call swapper.offload")
    with agreed(accelerator.num_processes > 1):
        settings = as_config(config)
    if in_shards:
        return tuple(_prepare_sharded(accelerator, accelerator.prepare, settings, model, *optimizers, *others))
    swap(accelerator, model, optimizers, settings)
    return tuple(accelerator.prepare(model, *optimizers, *others))


def shards(accelerator: Accelerator) -> bool:
    """True if accelerate shards a model by FSDP2 when it prepares it; False if a process has whole parameters.

    Raises:
        ConfigError: neither, as with DeepSpeed.
    """
    kind = str(accelerator.distributed_type.value)
    if kind == "FSDP" and getattr(accelerator, "is_fsdp2", False):
        return True
    if kind == "FSDP":
        raise ConfigError("accelerate shards by the first FSDP, which cannot be swapped; set fsdp_version to 2")
    if kind != "NO" and not kind.startswith("MULTI_"):  # Of those, clipping is torch's own.
        raise ConfigError(f"accelerate runs as {kind}, which keeps parameters and state in its own way")
    return False


def swap_when_sharded(accelerator: Accelerator, settings: OffloadConfig) -> None:
    """Have what `accelerator.prepare` shards from now on offloaded when it is: `fully_shard` takes whole parameters."""
    plain = accelerator.prepare
    if isinstance(plain, partial) and plain.func is _prepare_sharded:
        plain = plain.args[1]
    accelerator.prepare = partial(_prepare_sharded, accelerator, plain, settings)


def _prepare_sharded(
    accelerator: Accelerator, plain: Callable[..., Any], settings: OffloadConfig, *objects: Any, **named: Any
) -> Any:
    """`accelerator.prepare`, after which a model and its optimizers are offloaded.

    A model that was prepared before, as by the first of two `Trainer.train`, is sharded. Of it accelerate would find
    the optimizer's parameters by their addresses again, and what is evicted has none.
    """
    models = [each for each in objects if isinstance(each, torch.nn.Module)]
    if not models or not any(isinstance(each, Optimizer) for each in objects):
        return plain(*objects, **named)
    if getattr(models[0], "_is_accelerate_prepared", False):
        places = named.get("device_placement") or [None] * len(objects)
        if len(places) != len(objects):
            return plain(*objects, **named)  # It refuses them, and says why.
        prepared = tuple(_prepare_one(accelerator, plain, *each) for each in zip(objects, places, strict=True))
        own = {*models[0].parameters()}  # After an evaluation those of the outermost module are whole.
        found = (p for each in prepared if isinstance(each, Optimizer) for p in parameters_of(each))
        if any(not is_sharded(p) and p not in own for p in found):
            raise ConfigError(
                "the model is sharded already, and an optimizer has parameters that are not its own, as those from "
                "before it was sharded; make the optimizer of model.parameters() as they are now"
            )
    else:
        prepared = plain(*objects, **named)
    (model,) = (each for each in prepared if isinstance(each, torch.nn.Module))
    swap(accelerator, model, [each for each in prepared if isinstance(each, Optimizer)], settings)
    return prepared


def _prepare_one(accelerator: Accelerator, plain: Callable[..., Any], each: Any, place: bool | None) -> Any:
    """Prepare one object by itself, so that accelerate does not shard it."""
    if isinstance(each, torch.nn.Module):
        return accelerator.prepare_model(each, device_placement=place)
    if isinstance(each, Optimizer):
        return accelerator.prepare_optimizer(each, device_placement=place)
    return plain(each, device_placement=[place])


def swap(accelerator: Accelerator, model: torch.nn.Module, optimizers: Sequence[Any], settings: OffloadConfig) -> None:
    """Offload `model` and those of the optimizers that are not offloaded yet; accelerate may have prepared them.

    What `accelerator` does with them later leaves on the drive what is there.
    """
    if new := [inner for inner in map(_innermost, optimizers) if swapper_of(inner) is None]:
        former = vars(model).get("swapper")
        if isinstance(former, ParameterSwapper) and former.made_with == settings:
            settings = former.made_with  # An equal config: with the same object they share its pool.
        offload(model, new, settings)
        for each in optimizers:
            if getattr(each, "scaler", None) is not None:  # Prepared: it has kept `step` of the optimizer as it was.
                each.__init__(each.optimizer, device_placement=False, scaler=each.scaler)
    _swap_clipping(accelerator, optimizers)
    for name, method in (("prepare_model", _prepare_model), ("prepare_optimizer", _prepare_optimizer)):
        plain = getattr(accelerator, name)
        if not (isinstance(plain, partial) and plain.func is method):
            setattr(accelerator, name, partial(method, accelerator, plain))


def _innermost(optimizer: Any) -> Optimizer:
    while type(optimizer).__module__.partition(".")[0] == "accelerate":
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"a {type(optimizer).__name__} is not a torch.optim.Optimizer: it cannot be swapped")
    return optimizer


def _swap_clipping(accelerator: Accelerator, optimizers: Iterable[Any]) -> None:
    """Let `clip_grad_norm_` and `clip_grad_value_` of an Accelerator leave gradients that are evicted where they are.

    Set on the object: both the Trainer and loops of users call them there. Of several swappers that evict gradients
    the one is used that has the parameters. A norm over parameters of more than one is taken by torch, which brings
    gradients into memory: the bits are the same.
    """
    former = vars(accelerator).get("clip_grad_norm_")
    if isinstance(former, partial) and former.func is _clip:  # Prepared before, with optimizers that are still used.
        former.args[2].update(map(_innermost, optimizers))
        return
    known = weakref.WeakSet(map(_innermost, optimizers))
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        setattr(accelerator, name, partial(_clip, accelerator, getattr(accelerator, name), known))


def _prepare_optimizer(
    accelerator: Accelerator, plain: Callable[..., Any], optimizer: Any, device_placement: bool | None = None
) -> Any:
    """Bring no state of a swapped optimizer to the device: that reads all of it, into the device."""
    is_swapped = swapper_of(optimizer) is not None
    return plain(optimizer, device_placement=False if is_swapped else device_placement)


def _prepare_model(
    accelerator: Accelerator, plain: Callable[..., Any], model: torch.nn.Module, *args: Any, **named: Any
) -> Any:
    """Put a model that is evicted into `DistributedDataParallel` without having all of it in memory."""
    former = accelerator.ddp_handler
    accelerator.ddp_handler = SimpleNamespace(  # Asked just before and after the constructor is called.
        to_kwargs=lambda: ddp_arguments(model, {} if former is None else former.to_kwargs()),
        register_comm_hook=lambda wrapped: None if former is None else former.register_comm_hook(wrapped),
    )
    try:
        return plain(model, *args, **named)
    finally:
        accelerator.ddp_handler = former


def _clip(
    accelerator: Accelerator,
    plain: Callable[..., Any],
    optimizers: Iterable[Optimizer],
    *args: Any,
    **named: Any,
) -> Any:
    given = inspect.signature(plain).bind(*args, **named)  # Loops name `max_norm` and `clip_value`, too.
    given.apply_defaults()
    parameters, limit, *kind = given.arguments.values()
    found: Any = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    wanted = set(map(id, found))
    concerned = [o for o in optimizers if any(id(p) in wanted for p in parameters_of(o))]
    swappers = [swapper for optimizer in concerned if (swapper := swapper_of(optimizer)) is not None]
    if any(swapper.backward_steps is not None for swapper in swappers):
        if math.isinf(limit):
            return None  # The Trainer asks for the norm alone, to log it, and takes None for "not known".
        raise ConfigError(
            "offload_optimizer.step_in_backward cannot go with clipping, for which all gradients have to be there "
            "after backward; set max_grad_norm to 0 (TrainingArguments), or step_in_backward to false"
        )
    evicting = [swapper.gradients for swapper in swappers if isinstance(swapper.gradients, GradientSwapper)]
    # With shards of several meshes, or beside them parameters that FSDP2 ignores, accelerate has a norm of its own.
    if len(evicting) != 1 or len({getattr(p, "device_mesh", None) for p in found}) > 1:
        return plain(found, limit, *kind)
    gradients: Any = evicting[0]
    accelerator.unscale_gradients()
    if plain.__name__ == "clip_grad_value_":
        return gradients.clip_grad_value_(found, limit)
    return gradients.clip_grad_norm_(found, limit, *kind, error_if_nonfinite=False, foreach=None)
