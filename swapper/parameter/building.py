"""`Nursery`: parameters are put on disk while their model is still being built.

A model that is larger than memory cannot be built first and taken over then. So each parameter goes to the drive, in a
record of its own, as soon as the module that has it is complete. It is then an `EvictedParameter`: whatever the rest of
the construction does with it, it stages itself for. `ParameterSwapper` later takes all of them over into its records;
until then, and where that never happens, the nursery serves them.

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
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch.nn.modules import module as module_hooks
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from swapper.errors import ConfigError, SwapError
from swapper.parameter.access_order import Use
from swapper.parameter.cache import BY_ADDRESS, Held, State
from swapper.parameter.records import OtherTensors, plan_record_of, why_not
from swapper.parameter.swapper import ParameterSwapper
from swapper.sizes import SMALL_BYTES, format_bytes
from swapper.storage.buffers import BufferPool
from swapper.storage.malloc_trim import return_free_memory
from swapper.storage.store import RecordKey, TensorStore
from swapper.tensors.evicted import make_ordinary, restore_for_good
from swapper.tensors.homes import home_of
from swapper.tensors.unfilled import fill_with_nothing, has_nothing, mark_unfilled

__all__ = ["Nursery"]

_building: dict[int, Nursery] = {}
"""By thread: the nursery whose `building` it is in."""


class Nursery(ParameterSwapper):
    """Puts parameters on disk one by one, and gives them up to a `ParameterSwapper`.

    It lives as long as a module that was built in it and still has parameters of it, and removes its files when it
    dies.

    Args:
        owner: number of this swapper among those of the process.
        waiting_bytes: parameters of modules that are not registered in a parent wait in memory up to this much.
        budget_bytes, pool, store: as for `ParameterSwapper`.
        release: called when it has no parameters any more, and when it is closed.
    """

    temporary = True

    def __init__(
        self,
        owner: int,
        waiting_bytes: int,
        budget_bytes: int,
        pool: BufferPool,
        store: TensorStore,
        release: Callable[[], None],
    ) -> None:
        super().__init__(
            torch.nn.Module(),
            owner,
            waiting_bytes,
            budget_bytes,
            resident_bytes=0,
            leave_bytes=0,
            step_in_backward=False,
            pool=pool,
            store=store,
            release=release,
        )
        self._owner = owner
        self._waiting_bytes = waiting_bytes
        self._freed_bytes = 0
        self._waiting: dict[int, tuple[weakref.ref[torch.nn.Parameter], str]] = {}
        self._seen: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    # --- Building --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Within it this thread's new parameters are put on disk. After an exception the nursery is closed.

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
                nursery = mine()
                if nursery is not None and threading.get_ident() == thread:
                    nursery._on_registration(module, name, item)

            # Before they are there, and twice, should Ctrl-C cut off the first.
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
            self.put_away(item)
        elif isinstance(item, torch.nn.Parameter):
            make_ordinary(item)
            self._put_away_waiting()
            self._wait(item, f"{type(module).__name__}.{name}")

    def put_away(self, module: torch.nn.Module, scripted: Collection[torch.nn.Parameter] = ()) -> None:
        """Put the parameters of `module` and of those below it on disk, as far as they can be.

        Args:
            module: complete.
            scripted: parameters that code which is not Python has, as those of ScriptModules in `module`.

        Raises:
            ConfigError: the pool is too small for one of them.
            SwapIOError: the drive failed or is full.
        """
        others = OtherTensors()
        scripted = {*scripted, *_scripted(module)}
        for name, parameter in module.named_parameters():
            if parameter not in scripted:
                self._put_away(parameter, f"{type(module).__name__}.{name}", others)
            elif parameter in self._home:
                self._bring_back(parameter)

    def _bring_back(self, parameter: torch.nn.Parameter) -> None:
        """Let `parameter` have memory of its own: code that is not Python has it now."""
        held = self._home[parameter]
        with self._lock:
            with self.present([held]):
                values = parameter.detach().clone(memory_format=torch.preserve_format)
            restore_for_good(parameter, values)
            self._part_from(held, parameter)

    def materialize(
        self, model: torch.nn.Module, initialisers: Sequence[tuple[torch.nn.Module, Callable[[], object]]]
    ) -> None:
        """Give the tensors on the meta device values. Within `building`.

        Args:
            model: whose they are.
            initialisers: from `initialisers_of`.
        """
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
                            made[old] = _with_memory(old)
                            new[made[old]] = f"{names[module]}.{name}".lstrip(".")
                        tensors[name] = made[old]
            versions = {tensor: tensor._version for tensor in new}
            initialise()
            unfilled = [tensor for tensor, version in versions.items() if _was_left_alone(tensor, version)]
            others = OtherTensors()
            for name, parameter in module.named_parameters(recurse=False):
                self._put_away(parameter, f"{type(module).__name__}.{name}", others)
            for tensor in unfilled:
                mark_unfilled(tensor, new[tensor])

    def _wait(self, parameter: torch.nn.Parameter, name: str) -> None:
        if home_of(parameter) is None and parameter.device.type == "cpu":
            self._waiting[id(parameter)] = weakref.ref(parameter), name

    def _put_away_waiting(self, *, all_of_them: bool = False) -> None:
        """Put away those that wait, if they are too many."""
        waiting = [(p, name) for reference, name in self._waiting.values() if (p := reference()) is not None]
        if all_of_them or sum(p.nbytes for p, _ in waiting) > self._waiting_bytes:
            self._waiting.clear()
            others = OtherTensors()
            for parameter, name in waiting:
                self._put_away(parameter, name, others)
        elif len(waiting) < len(self._waiting):
            self._waiting = {id(p): (weakref.ref(p), name) for p, name in waiting}

    def _put_away(self, parameter: torch.nn.Parameter, name: str, others: OtherTensors) -> None:
        self._check_open()
        if home_of(parameter) is not None or parameter.device.type != "cpu" or why_not(parameter):
            return
        if parameter.nbytes < SMALL_BYTES:
            return
        swapper, former, _ = BY_ADDRESS.get(parameter.data_ptr(), (None, None, 0))
        if former is not None and swapper is not None and swapper() is self and self._is_orphan(former):
            self._replace(former, parameter, name)
            return
        if others.view(parameter):  # Perhaps only a variable of the code that is making it.
            self._wait(parameter, name)
            return
        self._store_away(parameter, name)

    def _is_orphan(self, held: Held) -> bool:
        """Whether nobody has the parameter of a record any more, as that of a module that was only copied."""
        # The references are that of the place, that of `_home`, and the argument. Autograd's are in C++.
        if held.holds or sys.getrefcount(held.plan.places[0].parameter) > 3:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            return held.plan.places[0].parameter._use_count() == 1  # type: ignore[attr-defined, no-any-return]

    def _forget_orphans(self) -> None:
        """Delete the records of parameters that nobody has any more."""
        for held in [held for held in self._home.values() if self._is_orphan(held)]:
            self._part_from(held, held.plan.places[0].parameter)

    def _replace(self, former: Held, parameter: torch.nn.Parameter, name: str) -> None:
        """Put a parameter away that lies in the buffer of a record that is not needed any more."""
        self._store_away(parameter, name)
        if former.plan.places[0].parameter in self._home:
            self._part_from(former, former.plan.places[0].parameter)

    def _store_away(self, parameter: torch.nn.Parameter, name: str) -> None:
        self._waiting.pop(id(parameter), None)
        with self._lock:
            number = len(self._all)
            held = Held(plan_record_of(number, [(name, parameter)]), RecordKey(self._owner, "param", number))
            needed_bytes = 2 * held.plan.length_bytes
            if needed_bytes > self._budget_bytes:
                raise ConfigError(
                    f"pool_bytes: {format_bytes(self._budget_bytes)} are too little for {name}, a parameter of "
                    f"{format_bytes(parameter.nbytes)}, which needs its place twice; set pool_bytes to at least "
                    f"{needed_bytes}"
                )
            self._store.plan({held.key: held.plan.file_bytes})
            self._all.append(held)
            try:
                self._adopt(held)
            except BaseException:
                self._give_up(held)
                raise
            self._freed_bytes += parameter.nbytes
            if self._freed_bytes > self._waiting_bytes:
                # Small tensors that stay lie between large ones that do not: the next would not fit the holes.
                self._freed_bytes = 0
                return_free_memory()

    def _give_up(self, held: Held) -> None:
        """After a failed `_adopt`: the parameter has its values still, unless all was done."""
        parameter = held.plan.places[0].parameter
        if parameter in self._home:
            return
        if held.lease is not None:
            if held.lease.transfer is not None:
                held.lease.transfer.settle()
            self._release(held)
        held.state = State.GONE
        self._store.forget(held.key)

    def _finish(self) -> None:
        """The models are complete: put away what waits, and hook their modules so that they run as others do."""
        roots = self._roots()
        # What was scripted may be there as it was before too, with the same parameters.
        scripted = {parameter for root in roots for parameter in _scripted(root)}
        for parameter in scripted:
            self._waiting.pop(id(parameter), None)
        for root in roots:
            self.put_away(root, scripted)
        self._put_away_waiting(all_of_them=True)
        self._forget_orphans()
        count = len(self._all)
        self._order.expect(
            [*(Use("forward", i) for i in range(count)), *(Use("backward", i) for i in reversed(range(count)))]
        )
        for root in roots:
            self._install(root)
        if len(roots) == 1:
            self._model = weakref.ref(roots[0])

    def _roots(self) -> list[torch.nn.Module]:
        seen = list(self._seen)
        below = {child for module in seen for child in module.modules() if child is not module}
        return [module for module in seen if module not in below]

    # --- What becomes of the parameters ----------------------------------------------------------------------------

    def _lets_go(self, held: Held) -> bool:
        """The parameter was converted, as by `model.bfloat16()`: it is a new one."""
        parameter = held.plan.places[0].parameter
        self._part_from(held, parameter)
        self._put_away_waiting()
        self._wait(parameter, held.plan.places[0].name)
        return True

    def _surrender(self, held: Held, parameter: torch.nn.Parameter) -> None:
        with self._lock:
            self._part_from(held, parameter, keep_home=True)

    def _end_surrender(self) -> None:
        with self._lock:
            self._forget_orphans()
            if not self._home:
                self.close()

    def _stay(self, held: Held, parameter: torch.nn.Parameter) -> None:
        with self._lock, self.present([held]):
            values = parameter.detach()
        lease = held.lease
        assert lease is not None
        self._settle_write(held)
        lease.abandon()
        held.lease, held.values, held.state = None, [], State.GONE
        del BY_ADDRESS[values.data_ptr()]
        self._held_bytes -= lease.length_bytes
        self._drop(held, parameter)
        self._store.forget(held.key)
        restore_for_good(parameter, values)
        if not self._home:
            self.close()

    def _part_from(self, held: Held, parameter: torch.nn.Parameter, *, keep_home: bool = False) -> None:
        """Forget a parameter that is not ours any more, and its record, unless views of it are left."""
        if not keep_home:
            parameter.__dict__.pop("_swapper_home", None)
        if held.lease is not None:
            self._settle_write(held)
            if held.foreign_uses():
                self._drop(held, parameter)
                return
            self._release(held)
        held.state = State.GONE
        self._drop(held, parameter)
        self._store.forget(held.key)

    def _drop(self, held: Held, parameter: torch.nn.Parameter) -> None:
        del self._home[parameter]
        for hooks in self._forward_hooks:
            hooks.parts = [part for part in hooks.parts if part[0] is not held]

    def _deepcopy(self, parameter: torch.nn.Parameter, memo: dict[int, Any]) -> torch.nn.Parameter:
        """A parameter of its own, as modules are copied in construction."""
        with self.present([self._home[parameter]]), torch._C.DisableTorchFunctionSubclass():
            values = parameter.detach().clone(memory_format=torch.preserve_format)
        copy = torch.nn.Parameter(values, parameter.requires_grad)
        memo[id(parameter)] = copy
        # Modules that are copied are registered nowhere. The innermost one was noted in `memo` last.
        for item in reversed(memo.values()):
            if isinstance(item, torch.nn.Module):
                self._seen.add(item)
                break
        self._put_away_waiting()
        self._wait(copy, self._home[parameter].plan.places[0].name)
        return copy


def _remove_registration_hook(hook: Callable[..., None]) -> None:
    """Undo what registered `hook`. By the hook and not by the handle, which Ctrl-C can lose."""
    for hooks in (module_hooks._global_module_registration_hooks, module_hooks._global_parameter_registration_hooks):
        for key in [key for key, other in list(hooks.items()) if other is hook]:
            hooks.pop(key, None)


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
    """Whether nothing has written to `tensor` since it was made and had this version."""
    if home_of(tensor) is not None or tensor._version != version or tensor.numel() == 0:
        return False
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and has_nothing(tensor)


def _with_memory(tensor: torch.Tensor) -> torch.Tensor:
    """As `tensor`, on the CPU, with undefined content."""
    made: torch.Tensor
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    else:
        made = torch.empty_like(tensor, device="cpu")
    if type(made) is torch.Tensor:
        fill_with_nothing(made)
    if isinstance(tensor, torch.nn.Parameter):
        made = torch.nn.Parameter(made, tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    return made
