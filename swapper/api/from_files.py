"""`swapper.offload` of a model whose weights stay in the files that they are in."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import torch

from swapper.check import CheckReport
from swapper.config import OffloadConfig
from swapper.errors import ConfigError
from swapper.files.model_weights import ModelWeights
from swapper.files.packed_tensors import unpack_part
from swapper.files.recipe_parts import packed_parts_of, rows_of
from swapper.files.tensor_files import StoredTensor
from swapper.files.unread import Recipe, Unread, sources_of, write_values
from swapper.optimizer.plan import parameters_of
from swapper.parameter.building import device_of
from swapper.parameter.candidates import length_bytes
from swapper.parameter.conversions import Conversion, InPlace, Source
from swapper.parameter.from_files import FileParameters, FilePlan, plan_from_files
from swapper.parameter.records import check_torch
from swapper.session import Shared
from swapper.storage.agreement import agreed, rank_count
from swapper.storage.budget import PoolBudget
from swapper.storage.spans import Extent, SpanStore
from swapper.tensors.homes import home_of
from swapper.tensors.inner import awaits_codes, inner_tensors, is_wrapper
from swapper.tensors.sharded import check_not_flattened, is_sharded

__all__ = ["OWNERS", "check_from_files", "is_first_of_ranks", "offload_from_files", "refuse_fixed", "refuse_others"]

OWNERS = itertools.count()
"""Numbers of swappers of parameters, and of what else has records; each given once in a process."""


def offload_from_files(
    model: torch.nn.Module,
    settings: OffloadConfig,
    find: Callable[[], ModelWeights],
    owner: int,
    device: torch.device | str | int | None,
) -> None:
    """Let the parameters of `model` come from files. See `swapper.offload`.

    Args:
        model: in memory or on the meta device.
        find: gives what of it is in which files. Called when the model is known to be one that this can be done to.
        owner: number of the swapper that is made.
        device: as for `swapper.offload`.
    """
    param = settings.offload_param
    with agreed(is_first_of_ranks(settings)):
        on = _device_for(model, device)
        weights, plan, budget = _plan(model, settings, find, on)
        room = plan.room(param.device_bytes, 0)
    # Up to here nothing is made. Files are opened before the last look at them: what is compared is what is read later.
    shared, release = Shared.held(settings, None if room is None else on, 0, 0)
    files, release = shared.sources(weights.paths(), release)
    try:
        moved = plan.moved()
        small = [tensor for tensor in weights.tensors() if tensor not in moved]
        stays = [(each, _as_kept(each, read, on), True) for each, read in zip(small, weights.read(small), strict=True)]
        for tensor in dict.fromkeys((*model.parameters(), *model.buffers())):
            if tensor not in weights and not is_wrapper(tensor) and tensor.device != on:
                stays.append((tensor, _as_kept(tensor, tensor.detach(), on), False))
        if not weights.same_files():  # With the files open: none was changed since they were first read.
            names = ", ".join(map(str, files))
            raise ConfigError(f"weights: one of {names} was changed while it was read; wait until it is complete")
        for file in files.values():
            file.check(named=True)
        store = SpanStore(plan.spans(owner), files, shared.store)
        fixed = not param.copy_on_write
        share_bytes = budget.shares().parameters
        # The last step that can fail; it gives everything back itself, or is the model's `swapper`.
        FileParameters(model, owner, plan, share_bytes, shared.pool, store, release, stays, on, room, fixed=fixed)
    except BaseException:
        if "swapper" not in vars(model):
            release()
        raise


def check_from_files(
    model: torch.nn.Module,
    settings: OffloadConfig,
    find: Callable[[], ModelWeights],
    device: torch.device | str | int | None,
) -> CheckReport:
    """Say what `offload_from_files` would need, and what a forward would read. Prints it. See `swapper.check`.

    Of what it says `step_read_bytes` is for one forward after the first, at most: fused experts are counted whole.
    """
    on = _device_for(model, device)
    _, plan, budget = _plan(model, settings, find, on)
    device_bytes = 0
    if (on_device := plan.device_needs) is not None:
        device_bytes = on_device.record_bytes(settings.offload_param.device_bytes) + on_device.beside_bytes
    moved = plan.moved()
    room_bytes, total_bytes = budget.shares().parameters, plan.needs.total_bytes
    longest_bytes = max((record.length_bytes for record in plan.records), default=0)
    read_bytes = min(total_bytes, total_bytes - room_bytes + 2 * longest_bytes) if total_bytes > room_bytes else 0
    model_bytes = sum(length_bytes(each) for each in (*model.parameters(), *model.buffers()) if each not in moved)
    report = CheckReport(
        parameter_numel=sum(p.numel() for p in model.parameters()),
        model_bytes=model_bytes,
        state_bytes=0,
        buckets=0,
        pool_bytes=settings.pool_bytes,
        pool_needed_bytes=budget.needed_bytes,
        host_bytes=model_bytes * (on.type == "cpu") + settings.pool_bytes,
        disk_bytes=0,
        disk_free_bytes=-1,
        step_read_bytes=read_bytes,
        step_written_bytes=0,
        steps_of_endurance=0,
        parameter_bytes=sum(tensor.nbytes for tensor in moved),
        device_bytes=device_bytes,
    )
    print(report)
    return report


def is_first_of_ranks(settings: OffloadConfig) -> bool:
    """True where the config is used first, in a distributed program: all ranks then give its run one name, or wait."""
    return rank_count() > 1 and Shared.existing(settings) is None


def refuse_others(weights: object, optimizers: Sequence[object], device: object) -> None:
    """Refuse optimizers of a model whose weights stay in files, and a device for one whose weights do not.

    Raises:
        ConfigError: there are some, or one.
    """
    if weights is not None and optimizers:
        raise ConfigError("weights: an optimizer would change them; offload the model without one")
    if weights is None and device is not None:
        raise ConfigError("device: a model without weights=PATH stays where it is; move it there (model.to) instead")


def refuse_fixed(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer of parameters whose values stay in files, where its first step would fail.

    Raises:
        ConfigError: it has one that requires a gradient.
    """
    for p in parameters_of(optimizer):
        home = home_of(p) if p.requires_grad else None
        if home is not None and isinstance(home.keeper, FileParameters) and home.keeper.fixed:
            raise ConfigError(
                f"offload_param.copy_on_write: false leaves {home.name} as it is in its file, and the optimizer would "
                "change it; offload the model with copy_on_write: true, or freeze it (requires_grad_(False))"
            )


def _device_for(model: torch.nn.Module, given: torch.device | str | int | None) -> torch.device:
    """The device, with its index, that `model` computes on. See `swapper.offload`.

    Raises:
        ConfigError: it is neither the CPU nor an accelerator; or the model is on several.
    """
    if given is not None:
        return device_of(given)
    parameters = [p for p in model.parameters() if p.device.type != "meta"]
    others = {each.device for each in (*parameters, *model.buffers()) if each.device.type not in ("cpu", "meta")}
    if len(others) > 1:
        raise ConfigError(
            f"weights: the model is on several devices ({', '.join(sorted(map(str, others)))}), which cannot work in "
            "this version of swapper; move it to one of them, or name that as device"
        )
    if others:
        return device_of(*others)
    return torch.device("cpu") if parameters else device_of(None)


def _as_kept(tensor: torch.Tensor, values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`values` on `device`, of the strides of `tensor` unless that is there and has memory of its own."""
    if tensor.device == device or tensor.layout is not torch.strided or tensor.stride() == values.stride():
        return values.to(device)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).copy_(values)


def _plan(
    model: torch.nn.Module, settings: OffloadConfig, find: Callable[[], ModelWeights], device: torch.device
) -> tuple[ModelWeights, FilePlan, PoolBudget]:
    """Plan what comes from which files, and what that needs of the pool. Makes nothing."""
    _check(model, settings, device)
    weights = find()
    extents: dict[torch.Tensor, tuple[Extent, ...] | Conversion] = {
        tensor: tuple(map(_extent_of, pieces)) for tensor, pieces in weights.stored.items()
    }
    extents.update((tensor, _conversion_of(step)) for tensor, step in weights.made.items())
    _check_others(model, weights)
    param = settings.offload_param
    plan = plan_from_files(
        model,
        extents,
        settings.bucket_bytes,
        param.resident_bytes,
        param.device_resident_bytes,
        device,
        by_parts=param.experts == "auto" and not param.copy_on_write,
    )
    existing = Shared.existing(settings)
    others_bytes, lost_bytes = (existing.held_bytes, existing.pool.abandoned_bytes) if existing else (0, 0)
    budget = PoolBudget(settings.pool_bytes, [], plan.needs, others_bytes, lost_bytes, settings.following_bucket_bytes)
    budget.check()
    return weights, plan, budget


def _check(model: torch.nn.Module, settings: OffloadConfig, device: torch.device) -> None:
    """Refuse what cannot work, before a file is looked at."""
    if "swapper" in vars(model) or any(home_of(p) is not None for p in model.parameters()):
        raise ConfigError(
            "weights: parameters of this model are on the drive already; make it on the meta device, or in memory"
        )
    asked = settings.offload_param
    if asked.device != "nvme" and "device" in asked.model_fields_set:
        raise ConfigError(
            f"weights: offload_param.device: {asked.device} leaves parameters in memory; set it to nvme or leave it "
            "out, or load them with swapper.load_safetensors"
        )
    if asked.copy_on_write and settings.nvme_path is None:
        raise ConfigError(
            "nvme_path: null is not enough for offload_param.copy_on_write: what is changed is written there; give a "
            "directory on the drive"
        )
    if settings.aio.gds == "on":
        raise ConfigError(
            "aio.gds: on asks for GPUDirect Storage, and weights that stay in files come through the pool in this "
            "version of swapper; use aio.gds: auto"
        )
    check_not_flattened(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_sharded(tensor):
            raise ConfigError(f"weights: {name} is a DTensor, and has a part of its values; offload it without them")
        if tensor.is_inference() and isinstance(tensor, torch.nn.Parameter) and tensor.device == device:
            raise ConfigError(f"weights: {name} was made in inference mode; make the model outside of it")
        inside = [inner.tensor for inner in inner_tensors(name, tensor)] if is_wrapper(tensor) else []
        unread = any(isinstance(each, Unread) for each in inside)  # Then it is made anew.
        if not unread and any(each.device != device for each in inside):
            where = "the meta device" if tensor.device.type == "meta" else str(tensor.device)
            raise ConfigError(
                f"weights: {name} is a {type(tensor).__name__} on {where}, and what is inside of it cannot be "
                f"replaced in this version of swapper; make the quantised model in memory of {device}"
            )
        if awaits_codes(tensor):
            raise ConfigError(
                f"weights: {name} is a {type(tensor).__name__}, which bitsandbytes quantises when it is moved or used, "
                f"and what its file has is not quantised; load the model and move it (model.to({str(device)!r})), then "
                "call swapper.offload without weights"
            )
    check_torch()


def _check_others(model: torch.nn.Module, weights: ModelWeights) -> None:
    """Refuse what nothing would fill."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    unfilled = [name for name, each in tensors if each.device.type == "meta" and each not in weights]
    if unfilled:
        raise ConfigError(
            f"weights: {', '.join(unfilled)} are on the meta device and in no file, as they are not persistent; make "
            "these buffers in memory, with their values, before swapper.offload"
        )


def _extent_of(stored: StoredTensor) -> Extent:
    return Extent(stored.path, stored.start_bytes, stored.stop_bytes)


def _conversion_of(recipe: Recipe) -> Conversion:
    stored = tuple(dict.fromkeys(sources_of(recipe)))
    sources = tuple(map(_source_of, stored))
    known = rows_of(recipe, 0, recipe.shape[0]) if recipe.shape else None
    rows = None if known is None else functools.partial(_rows, recipe)
    parts = packed_parts_of(recipe) or ()
    in_place = tuple(InPlace(_source_of(part), numel, functools.partial(_unpack, part)) for part, numel in parts)
    return Conversion(sources, functools.partial(_write, recipe, stored), rows, in_place)


def _source_of(stored: StoredTensor) -> Source:
    return Source(_extent_of(stored), stored.dtype, stored.shape)


def _unpack(part: StoredTensor, into: torch.Tensor, packed: torch.Tensor) -> None:
    unpack_part(part, packed, into)


def _rows(recipe: Recipe, start: int, stop: int) -> Conversion:
    rows = rows_of(recipe, start, stop)
    assert rows is not None
    return _conversion_of(rows)


def _write(
    recipe: Recipe, stored: tuple[StoredTensor, ...], into: torch.Tensor, values: Sequence[torch.Tensor]
) -> None:
    write_values(recipe, into, dict(zip(stored, values, strict=True)).__getitem__)
