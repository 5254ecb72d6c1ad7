"""`ModelBuilder`: parameters are put on disk, or in memory of the host, while their model is still being built.

A model that is larger than memory cannot be built first and taken over then. So each parameter goes to the drive, in a
record of its own, as soon as the module that has it is complete. It is then an `EvictedParameter`: whatever the rest of
the construction does with it, it stages itself for. `ParameterSwapper` later takes all of them over into its records;
until then, and where that never happens, the builder serves them.

[Note: when a module is complete] When it is registered in its parent its own `__init__` is over. Modules that wait to
be registered, as in a list that will be a `ModuleList`, would add up: so when more than a bucket of parameters wait,
they all go, complete or not. That is never wrong: one that goes too early is staged for its initialisation.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from typing import Any

import torch
from torch.nn.modules import module as module_hooks
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from swapper.errors import ConfigError, SwapError
from swapper.io.devices import is_accelerator
from swapper.parameter.cache import BY_ADDRESS, Held
from swapper.parameter.candidates import Candidate, why_not
from swapper.parameter.held_on_device import HeldOnDevice
from swapper.parameter.home import ParameterHome, copy_in_memory
from swapper.parameter.kept_owners import forget_failed_backward
from swapper.parameter.owner import ParameterOwner
from swapper.parameter.records import DeviceRoom, device_bytes_of, plan_record_of
from swapper.sizes import SMALL_BYTES, format_bytes
from swapper.storage.access_order import AccessOrder, Use
from swapper.storage.buffers import BufferPool
from swapper.storage.growing_pool import GrowingPool
from swapper.storage.malloc_trim import FreedMemory
from swapper.storage.store import RecordKey, TensorStore
from swapper.tensors.attributes import HOME
from swapper.tensors.evicted import is_ordinary, make_ordinary, refuse_copy, restore_for_good
from swapper.tensors.homes import TemporaryHome, home_of
from swapper.tensors.other_tensors import PATIENCE_S, OtherTensors, Patience
from swapper.tensors.unfilled import fill_with_nothing, has_nothing, mark_unfilled

__all__ = ["ModelBuilder", "device_of", "initialisers_of"]

_building: dict[int, ModelBuilder] = {}
"""By thread: the builder whose `building` it is in."""


class _BuilderHome(ParameterHome):
    """Brings the values of a parameter until a `ParameterSwapper` takes it over. See `homes.TemporaryHome`."""

    def _builder(self) -> tuple[ModelBuilder, Held]:
        builder = self.of_owner()
        assert isinstance(builder, ModelBuilder)
        return builder, builder._all[self.number]

    @property
    def temporary(self) -> TemporaryHome | None:
        return None if self.reference() is None else self

    @property
    def viewed(self) -> bool:
        return self._builder()[1].has_views()

    def forget(self, parameters: Iterable[torch.Tensor]) -> None:
        self._builder()[0].forget(parameters)

    def stay(self, parameter: torch.Tensor) -> None:
        builder, held = self._builder()
        builder.let_stay(held, parameter)

    def deepcopy(self, parameter: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        if self.reference() is None:
            refuse_copy("a parameter whose builder is gone")
        return self._builder()[0].deepcopy(parameter, memo)


class ModelBuilder(ParameterOwner):
    """Puts parameters on disk one by one, until a `ParameterSwapper` takes them over.

    It lives as long as a module that was built in it and still has parameters of it.

    Args:
        owner: number of this builder among the swappers of the process.
        waiting_bytes: parameters of modules that are not registered in a parent wait in memory up to this much.
        budget_bytes, pool, store: as for `ParameterOwner`. Without a store there is no budget: the pool grows.
        release: called when it has no parameters any more, and when it is closed.
        device: of the parameters that it takes; the others stay.
        device_bytes: the most that records may take at once of its memory, if that is an accelerator.
    """

    home_type = _BuilderHome

    def __init__(
        self,
        owner: int,
        waiting_bytes: int,
        budget_bytes: int,
        pool: BufferPool | GrowingPool,
        store: TensorStore | None,
        release: Callable[[], None],
        device: torch.device,
        device_bytes: int,
    ) -> None:
        room = DeviceRoom(device, device_bytes) if is_accelerator(device) else None
        super().__init__([], AccessOrder([], start=0), budget_bytes, pool, store, release, room)
        self._begin()
        self._device = device
        self._owner = owner
        self._waiting_bytes = waiting_bytes
        self._freed = FreedMemory(waiting_bytes)
        self._waiting: dict[int, tuple[weakref.ref[Any], str]] = {}
        self._added_bytes = 0  # to those that wait, since they were last looked through
        self._seen: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    # --- Building --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Within it this thread's new parameters are put on disk. After an exception the builder is closed.

        Raises:
            SwapError: this thread is within one already.
        """
        thread = threading.get_ident()
        if thread in _building:
            raise SwapError("swapper.init is used within swapper.init; build the whole model in the outer one")
        with contextlib.ExitStack() as stack:
            stack.callback(_building.pop, thread, None)
            _building[thread] = self
            mine = weakref.ref(self)

            def registered(module: torch.nn.Module, name: str, item: Any) -> None:
                builder = mine()
                if builder is not None and threading.get_ident() == thread:
                    builder._on_registration(module, name, item)

            # Before the hooks exist, and twice: Ctrl-C at the very beginning of the first would leave them for good.
            stack.callback(_remove_registration_hook, registered)
            stack.callback(_remove_registration_hook, registered)
            register_module_module_registration_hook(registered)
            register_module_parameter_registration_hook(registered)
            try:
                yield
                self._finish()
            except BaseException:
                self.close()
                raise

    def _on_registration(self, module: torch.nn.Module, name: str, item: object) -> None:
        self._seen.add(module)
        if isinstance(item, torch.nn.Module):
            self._offload_module(item)
        elif isinstance(item, torch.nn.Parameter):
            make_ordinary(item)
            self._offload_waiting()
            self._wait(item, f"{type(module).__name__}.{name}")

    def _offload_module(
        self, module: torch.nn.Module, scripted: Collection[torch.nn.Parameter] = (), patience: Patience | None = None
    ) -> None:
        """Put the parameters of `module` and of those below it on disk, except those that code besides Python has."""
        others = OtherTensors(patience)
        scripted = {*scripted, *_scripted(module)}
        for name, parameter in module.named_parameters():
            if parameter not in scripted:
                self._offload(parameter, f"{type(module).__name__}.{name}", others)
            elif (held := self._home.get(parameter)) is not None:
                with self._lock:
                    self._restore_values(held)
                    self._forget(held, parameter)

    def materialize(
        self, model: torch.nn.Module, initialisers: Sequence[tuple[torch.nn.Module, Callable[[], object]]]
    ) -> None:
        """Give the tensors of `model` on the meta device values, by `initialisers_of` it. Within `building`."""
        self._seen.add(model)
        made: dict[torch.Tensor, torch.Tensor] = {}
        names = {module: name for name, module in model.named_modules()}
        for module, initialise in initialisers:
            new: dict[torch.Tensor, str] = {}
            own: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for tensors in own:
                for name, old in tensors.items():
                    if old is not None and _is_hollow(old):
                        if old not in made:
                            made[old] = _with_memory(old, self._device)
                            new[made[old]] = f"{names[module]}.{name}".lstrip(".")
                        tensors[name] = made[old]
            versions = {tensor: tensor._version for tensor in new}
            initialise()
            unfilled = [tensor for tensor, version in versions.items() if _was_left_alone(tensor, version)]
            others = OtherTensors()
            for name, parameter in module.named_parameters(recurse=False):
                self._offload(parameter, f"{type(module).__name__}.{name}", others)
            for tensor in unfilled:
                mark_unfilled(tensor, new[tensor])

    def _wait(self, parameter: torch.Tensor, name: str) -> None:
        if home_of(parameter) is None and parameter.device == self._device and parameter.layout is torch.strided:
            self._waiting[id(parameter)] = weakref.ref(parameter), name
            self._added_bytes += parameter.nbytes

    def _offload_waiting(self, *, patience: Patience | None = None) -> None:
        """Put on disk those that wait, if they are too many; with `patience` all of them."""
        if not patience and self._added_bytes <= self._waiting_bytes:
            return  # Nor are those that are left of them, or were put on disk meanwhile, so many.
        waiting = [(p, name) for reference, name in self._waiting.values() if (p := reference()) is not None]
        if patience or sum(p.nbytes for p, _ in waiting) > self._waiting_bytes:
            self._waiting.clear()
            self._added_bytes = 0
            others = OtherTensors(patience)
            for parameter, name in waiting:
                self._offload(parameter, name, others)
        else:
            self._added_bytes = sum(p.nbytes for p, _ in waiting)
            self._waiting = {id(p): (weakref.ref(p), name) for p, name in waiting}

    def _offload(self, parameter: torch.nn.Parameter, name: str, others: OtherTensors) -> None:
        self._check_open()
        if home_of(parameter) is not None or parameter.device != self._device:
            return
        # One of a class of others may still be made another. A sparse one, which cannot be moved, has no `nbytes`.
        if not is_ordinary(parameter) or why_not(parameter) or parameter.nbytes < SMALL_BYTES:
            return
        # One made of an evicted parameter that nobody has any more is in the buffer of that one's record.
        owner, former, _ = BY_ADDRESS.get((parameter.device, parameter.data_ptr()), (None, None, 0))
        if former is not None and owner is not None and owner() is self and self._is_orphan(former):
            self._offload_now(parameter, name)
            if former.plan.locations[0].parameter in self._home:
                self._forget(former, former.plan.locations[0].parameter)
        elif others.view(parameter):  # Perhaps only a variable of the code that is making it.
            self._wait(parameter, name)
        else:
            self._offload_now(parameter, name)

    def _is_orphan(self, held: Held) -> bool:
        """True if nobody has the parameter of a record any more, as that of a module that was only copied."""
        # The references are that of the record, that of `_home`, and the argument. Autograd's are in C++.
        if held.holds or sys.getrefcount(held.plan.locations[0].parameter) > 3:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            return held.plan.locations[0].parameter._use_count() == 1  # type: ignore[attr-defined, no-any-return]

    def _forget_orphans(self) -> None:
        """Delete the records of parameters that nobody has any more."""
        for held in [held for held in self._home.values() if self._is_orphan(held)]:
            self._forget(held, held.plan.locations[0].parameter)

    def _offload_now(self, parameter: torch.nn.Parameter, name: str) -> None:
        self._waiting.pop(id(parameter), None)
        with self._lock:
            number = len(self._all)
            make = Held if self._tier is None else HeldOnDevice
            held = make(plan_record_of(number, [Candidate(name, parameter)]), RecordKey(self._owner, "param", number))
            needed_bytes = 2 * held.plan.length_bytes
            if self._store is not None and needed_bytes > self._budget_bytes:
                raise ConfigError(
                    f"pool_bytes: {format_bytes(self._budget_bytes)} are too little for {name}, a parameter of "
                    f"{format_bytes(parameter.nbytes)}, which needs its place twice; set pool_bytes to at least "
                    f"{needed_bytes}"
                )
            if self._store is not None:
                self._store.plan({held.key: held.plan.file_bytes})
            else:
                assert isinstance(held, HeldOnDevice) and self._tier is not None
                held.kept = True
                # It fits, for it is there; a `device_bytes` that does not is refused by `offload`.
                self._tier.limit_bytes = max(self._tier.limit_bytes, device_bytes_of(held.plan))
            self._all.append(held)
            try:
                self._adopt(held)
            except BaseException:
                if parameter not in self._home:  # It still has its values; else all was done.
                    held.gone = True
                    self._forget_record(held)
                raise
            self._freed.add(parameter.nbytes)

    def _finish(self) -> None:
        """The models are complete: put on disk those that wait, and hook the modules."""
        seen = list(self._seen)
        below = {child for module in seen for child in module.modules() if child is not module}
        roots = [module for module in seen if module not in below]
        # A module that was scripted may also be part of the model as it was before, with the same parameters.
        scripted = {parameter for root in roots for parameter in _scripted(root)}
        for parameter in scripted:
            self._waiting.pop(id(parameter), None)
        patience = Patience(PATIENCE_S)
        for root in roots:
            self._offload_module(root, scripted, patience)
        self._offload_waiting(patience=patience)
        self._forget_orphans()
        count = len(self._all)
        uses = [*(Use("forward", i) for i in range(count)), *(Use("backward", i) for i in reversed(range(count)))]
        self._order.expect(uses)
        if self._tier is not None:
            self._tier.expect(uses, start=0)
        for root in roots:
            self._install(root)
        if len(roots) == 1:
            self._model = weakref.ref(roots[0], forget_failed_backward)  # That would keep this.

    # --- Forgetting parameters -------------------------------------------------------------------------------------

    def forget(self, parameters: Iterable[torch.Tensor]) -> None:
        """Another owner took over `parameters`; without any left this closes itself."""
        with self._lock:
            forgotten = [(self._home[parameter], parameter) for parameter in parameters]
            for held, parameter in forgotten:
                self._forget_values(held, parameter)
            self._unhook({held for held, _ in forgotten})
            self._forget_orphans()
            if isinstance(self._pool, GrowingPool):
                self._pool.reserve(0)  # Frees what is empty.
            if not self._home:
                self.close()

    def let_stay(self, held: Held, parameter: torch.Tensor) -> None:
        """Let `parameter`, of which there are views, have its values for good where they are now, in the pool."""
        with self._lock, self.present([held]):
            values = parameter.detach()
        self._cache.wait(held.key)
        held.gone = True
        del self._home[parameter]
        self._unhook({held})
        if self._tier is not None:
            self._forget_record(held)
        else:
            self._cache.abandon(held.key)  # The memory is the views' now: the pool never gives it out again.
        restore_for_good(parameter, values)
        if not self._home:
            self.close()

    def _lets_go(self, held: Held, position: int, p: torch.Tensor, of_record: bool) -> bool:
        # The parameter was converted, as by `model.bfloat16()`: it is a new one, and waits to be put on disk.
        parameter = held.plan.locations[0].parameter
        parameter.__dict__.pop(HOME, None)
        self._forget(held, parameter)
        self._offload_waiting()
        self._wait(parameter, held.plan.locations[0].name)
        return True

    def _forget(self, held: Held, parameter: torch.Tensor) -> None:
        """Forget a parameter that is not ours any more, and its record, unless views of it are left."""
        self._forget_values(held, parameter)
        self._unhook({held})

    def _forget_values(self, held: Held, parameter: torch.Tensor) -> None:
        # Another has the values, or nobody wants them: a write of them that goes on may fail.
        if self._tier is not None or not held.has_views():
            held.gone = True
            self._forget_record(held)
        del self._home[parameter]

    def _forget_record(self, held: Held) -> None:
        if self._tier is not None:
            self._tier.forget(held)
        self._cache.forget(held.key)

    def _unhook(self, forgotten: Set[Held]) -> None:
        for hooks in self._forward_hooks:
            hooks.parts = [part for part in hooks.parts if part[0] not in forgotten]

    def deepcopy(self, parameter: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        """A parameter of its own, as modules are copied in construction."""
        copy = copy_in_memory(self.present([self._home[parameter]]), parameter, memo)
        # Modules that are copied are registered nowhere. The innermost one was noted in `memo` last.
        for item in reversed(memo.values()):
            if isinstance(item, torch.nn.Module):
                self._seen.add(item)
                break
        self._offload_waiting()
        self._wait(copy, self._home[parameter].plan.locations[0].name)
        return copy


def _remove_registration_hook(hook: Callable[..., None]) -> None:
    """Undo what registered `hook`. By the hook and not by the handle, which Ctrl-C can lose."""
    for hooks in (module_hooks._global_module_registration_hooks, module_hooks._global_parameter_registration_hooks):
        for key in [key for key, other in list(hooks.items()) if other is hook]:
            hooks.pop(key, None)


def device_of(given: torch.device | str | int | None) -> torch.device:
    """The device, with its index, that a model is built on; None is torch's default, and the CPU if that is "meta".

    Raises:
        ConfigError: it is neither the CPU nor an accelerator, or cannot be used.
    """
    try:
        device = torch.empty(0, device=given).device
    except (RuntimeError, AssertionError, ImportError, TypeError) as error:  # Of a torch without CUDA, or without HPU.
        raise ConfigError(f"device: {given} cannot be used: {str(error).splitlines()[0]}") from error
    if device.type == "cpu" or is_accelerator(device):
        return device
    if given is not None:
        raise ConfigError(f"device: {given} is neither the CPU nor an accelerator")
    return torch.device("cpu")


def initialisers_of(
    model: torch.nn.Module, initialiser: Callable[[torch.nn.Module], object] | None
) -> list[tuple[torch.nn.Module, Callable[[], object]]]:
    """The modules of `model` that have tensors on the meta device, in order, with what initialises each.

    Raises:
        ConfigError: a module has no `reset_parameters`, and there is no `initialiser`.
    """
    found: list[tuple[torch.nn.Module, Callable[[], object]]] = []
    for name, module in model.named_modules():
        hollow = [key for key, tensor in (*module._parameters.items(), *module._buffers.items()) if _is_hollow(tensor)]
        if not hollow:
            continue
        if initialiser is not None:
            found.append((module, functools.partial(initialiser, module)))
        elif callable(reset := getattr(module, "reset_parameters", None)):
            found.append((module, reset))
        else:
            raise ConfigError(
                f"initialiser: {name or 'the model'} ({type(module).__name__}) has {', '.join(hollow)} on the meta "
                "device and no reset_parameters(); pass a function that initialises such a module"
            )
    return found


def _scripted(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """The parameters of ScriptModules in `module`."""
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):
            yield from part.parameters(recurse=False)


def _is_hollow(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.device.type == "meta" and not torch.nn.parameter.is_lazy(tensor)


def _was_left_alone(tensor: torch.Tensor, version: int) -> bool:
    """True if nothing has written to `tensor` since it was made and had this version."""
    if home_of(tensor) is not None or tensor._version != version or tensor.numel() == 0:
        return False
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and has_nothing(tensor)


def _with_memory(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """As `tensor`, on `device`, with undefined content."""
    made: torch.Tensor
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    else:
        made = torch.empty_like(tensor, device=device)
    if type(made) is torch.Tensor:
        fill_with_nothing(made)
    if isinstance(tensor, torch.nn.Parameter):
        made = torch.nn.Parameter(made, tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    return made
