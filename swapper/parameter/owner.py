"""`ParameterOwner`: parameters that are evicted, and attached while they are used.

[Note: three ways to the values] A module's own forward is hooked: its parameters are attached before it and released
after it. A tensor that autograd saved is packed as a location in a record and looked up in backward. Any other use of
an evicted parameter goes through `EvictedParameter`. So a use that no hook foresaw is slower, and never wrong.

[Note: releasing] A use is one `ParameterUse`. It adds itself to its records and to the parameters that it attaches, and
to `_ended` when it is over. To do so again changes nothing, nor does releasing what was never attached. So whatever an
exception or Ctrl-C cut off is done by the next use.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from swapper.errors import SwapError
from swapper.io.checksums import checksum
from swapper.parameter.cache import Held, ParameterCache, finalize
from swapper.parameter.candidates import modules_with_tensors, used_by
from swapper.parameter.device_tier import DeviceTier
from swapper.parameter.forward_hooks import Copies, Forward, ForwardHooks
from swapper.parameter.fsdp import SwappedGroups
from swapper.parameter.home import MappedCopies, ParameterHome, follow_shape, parts_of
from swapper.parameter.kept_owners import keep_while_used
from swapper.parameter.records import DeviceRoom, ParameterLocation
from swapper.parameter.saved_tensors import in_transform, refuse_in_transform, saves_locations, saving_locations
from swapper.process.finalizers import finalizer
from swapper.sizes import format_bytes
from swapper.storage.access_order import AccessOrder
from swapper.storage.buffers import BufferPool, Lease, PoolExhausted
from swapper.storage.growing_pool import GrowingPool
from swapper.storage.spans import RecordStore
from swapper.tensors.dispatch_modes import outside_of_dispatch_modes, refuse_fake_tensors
from swapper.tensors.dynamo import not_compiled
from swapper.tensors.evicted import evict, is_evicted, restore, restore_for_good
from swapper.tensors.grad_modes import modes_kept, outside_of_inference, set_grad_mode
from swapper.tensors.homes import TemporaryHome, home_of
from swapper.tensors.inner import has_own_class
from swapper.tensors.other_tensors import is_shared
from swapper.tensors.own_saving import let_evicted_be_saved
from swapper.tensors.sharded import is_sharded, local_of
from swapper.tensors.strides import same_order

__all__ = ["ParameterOwner", "ParameterUse", "Parts"]

_living: weakref.WeakSet[ParameterOwner] = weakref.WeakSet()
"""Owners whose parameters a forked child must find evicted."""

Parts = Iterable[tuple[Held, tuple[int, ...]]]
"""Records, and the positions in them of some of their parameters."""


class ParameterUse:
    """One use of parameters; with `on_host` of what the pool has of those of an accelerator. See [Note: releasing]."""

    __slots__ = ("on_host", "parts")

    def __init__(self, parts: Parts, *, on_host: bool = False) -> None:
        self.parts = tuple(parts)
        self.on_host = on_host


@dataclass(eq=False, slots=True)
class _Running:
    """A forward that is running."""

    module: torch.nn.Module
    use: ParameterUse
    hooks: torch.autograd.graph.saved_tensors_hooks | None = None


class ParameterOwner(ParameterCache):
    """Evicts parameters into records, attaches them while they are used, and hooks the modules that use them.

    Lives as long as a module that it hooked, or an optimizer that was offloaded with it; then its files are deleted.

    Args:
        records: of the parameters, none in memory.
        order: in which they are used.
        budget_bytes: the most of the pool that records may hold.
        pool, store: give buffers, and keep the records; without a store, of a model on an accelerator, the pool does.
        release: called once, when this is closed or dies.
        room: what records may have of the accelerator that the parameters are on; None for the CPU.
    """

    home_type: type[ParameterHome] = ParameterHome

    def __init__(
        self,
        records: list[Held],
        order: AccessOrder,
        budget_bytes: int,
        pool: BufferPool | GrowingPool,
        store: RecordStore | None,
        release: Callable[[], None],
        room: DeviceRoom | None = None,
    ) -> None:
        direct = room is not None and room.staging is not None  # Then the pool's records have an order of their own.
        super().__init__(records, AccessOrder() if direct else order, budget_bytes, pool, store)
        if room is not None:
            self._tier = DeviceTier(self, self._cache, records, order, AccessOrder(), room, store)
        self._release_pool = release
        self._reference = weakref.ref(self)
        self._threads = threading.local()
        self._uses: dict[ParameterUse, None] = {}  # that have begun, and are not released
        self._ended: deque[ParameterUse] = deque()
        self._releasing = False
        self._awaiting: dict[torch.Tensor, ParameterUse] = {}  # attached until their gradient is accumulated
        self._model: Callable[[], torch.nn.Module | None] = lambda: None
        self._groups = SwappedGroups()
        self._hooks: list[torch.utils.hooks.RemovableHandle | Copies] = []
        # The modules have these, and these have the owner: it goes with the last of them.
        self._forwards: weakref.WeakSet[Forward] = weakref.WeakSet()
        self._forward_hooks: weakref.WeakSet[ForwardHooks] = weakref.WeakSet()
        self._home: dict[torch.Tensor, Held] = {}
        self._former: dict[torch.Tensor, TemporaryHome] = {}  # their homes until all are taken over
        self._copies = None if store is None else MappedCopies(store)
        _living.add(self)

    def _begin(self) -> None:
        """All is taken over: from now on the death of this deletes the files and releases the pool."""
        ended = self._here, self._caches, self._store, self._release_pool, self._pid
        self._finalizer = finalizer(self, finalize, *ended)

    def close(self, *, keep_values: bool = False) -> None:
        """Undo everything: remove the hooks, delete the files, give the memory back. Idempotent.

        Args:
            keep_values: bring all parameters back into memory of their own, where the optimizer goes on stepping them;
                else their values are gone, and any use of them raises.

        Raises:
            SwapIOError: with `keep_values`, a record could not be read, or the device failed; everything is as it was
                but for the parameters that are in memory already.
        """
        if self._closed or os.getpid() != self._pid:
            return
        with self._lock, outside_of_inference():  # What comes back is trained outside of that mode.
            if keep_values:
                for held in self._all:
                    self._restore_values(held)
                if self._tier is not None:
                    self._tier.wait()
                self._home.clear()
            self._closed = True
            self._remove_hooks()
            if (model := self._model()) is not None and vars(model).get("swapper") is self:
                object.__delattr__(model, "swapper")
            self._finalizer()

    def __del__(self) -> None:
        """Live on while somebody has a parameter. See `kept_owners`."""
        finalizer = vars(self).get("_finalizer")  # None: construction failed.
        if finalizer is not None and finalizer.alive and not self._closed:
            keep_while_used(self)

    @property
    def locations(self) -> Iterator[ParameterLocation]:
        """Of the parameters of all records."""
        return (location for held in self._all for location in held.plan.locations)

    @property
    def tables(self) -> list[dict[torch.Tensor, Any]]:
        """The dictionaries by parameter, with one reference to each. Only they and locations refer to those.

        The first has the parameters whose values this has.
        """
        return [self._home, self._awaiting, self._former]

    def _restore_values(self, held: Held) -> None:
        """Give the parameters of a record memory of their own; those that have it are left alone.

        Where somebody has views of the values, that is the memory that these are in now, as the parameters would else
        no longer be what the views show. The pool leaves it to them.
        """
        evicted = [each for each in held.plan.locations if each.parameter in self._home and home_of(each.parameter)]
        if not evicted:
            return
        with self.present([held]):
            is_viewed = held.has_views()
            values = [each.parameter.detach() for each in evicted]
            if not is_viewed:
                values = [each.clone(memory_format=torch.preserve_format) for each in values]
        for location, each in zip(evicted, values, strict=True):
            for tensor in location.tensors:
                restore_for_good(tensor, each)

    # --- Taking parameters over ------------------------------------------------------------------------------------

    def _adopt(self, held: Held) -> None:
        """Write the values of a record, and take them from the parameters."""
        try:
            lease = self._fill(held)
        except PoolExhausted:  # A value that is on disk already needs room too, and the pool may be in pieces.
            while self._pool.reclaim():
                pass
            lease = self._fill(held)
        # The write starts before the parameters are evicted: until then they have the values should it fail.
        held.checksums = held.pack(lease)
        self._cache.put(held.key, held.plan.file_bytes)
        for position, location in enumerate(held.plan.locations):
            former = home_of(location.parameter)
            if former is not None and (temporary := former.temporary) is not None:
                self._former[location.parameter] = temporary
            self._home[location.parameter] = held
            for tensor in location.tensors:
                evict(tensor, self.home_type(self._reference, held, position))

    def _fill(self, held: Held) -> Lease:
        """Copy the values of a record into a buffer for it. After an exception it has none."""
        lease, _ = self._cache.take(held.key, held.length_bytes)
        try:
            header = held.plan.layout.header(0)
            lease.tensor[: len(header)].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
            held.open(lease, self, arrived=False)
            for location, values in zip(held.plan.locations, held.opened, strict=True):
                source = location.parameter.detach()
                with torch._C.DisableTorchFunctionSubclass():  # Of one that nothing has filled yet, nothing is copied.
                    location.view(values).copy_(source)
                del source  # It may keep a buffer that the next one needs.
            return lease
        except BaseException:
            self._cache.release(held.key)
            raise

    def _install(self, model: torch.nn.Module) -> None:
        """Hook the modules of `model`, and the gradients whose strides depend on those of the parameter."""
        let_evicted_be_saved((*model.parameters(), *model.buffers()))
        owning = [module for _, module in modules_with_tensors(model)]
        # One that has nothing but buffers that stay can be copied: it gets no hooks.
        wanted = {m: None for m in owning if not all(map(is_sharded, m.parameters(recurse=False))) or self._uses_of(m)}
        if not all(held.plan.sharded for held in self._all):
            wanted.setdefault(model, None)
        encoders = [module for module in model.modules() if isinstance(module, torch.nn.TransformerEncoder)]
        layers = [module for module in model.modules() if isinstance(module, torch.nn.TransformerEncoderLayer)]
        wanted.update(dict.fromkeys((*encoders, *layers)))
        # These take another path, with other bits, if they or a module below them have hooks.
        without_hooks = {module for layer in layers for module in layer.modules()}
        for module in wanted:
            if isinstance(module, torch.jit.ScriptModule):  # Its parameters stay, and it takes no hooks.
                continue
            self._hooks.append(Copies(module, self))
            hooks = ForwardHooks(self, parts_of(map(home_of, self._uses_of(module))))
            self._forward_hooks.add(hooks)
            if module in without_hooks:
                self._forwards.add(Forward(module, hooks))
                continue
            self._hooks.append(module.register_forward_pre_hook(hooks.before, prepend=True))
            self._hooks.append(module.register_forward_hook(hooks.after, always_call=True))
        for held in self._all:
            for location in held.plan.locations:
                if location.parameter.requires_grad and not location.is_contiguous:
                    self._watch_gradient(held, location.parameter)

    def _uses_of(self, module: torch.nn.Module) -> list[torch.Tensor]:
        found = ((tensor, self._home.get(tensor)) for tensor in used_by(module))
        return [tensor for tensor, held in found if held is not None and not held.plan.sharded]

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for forward in list(self._forwards):
            forward.remove()
        self._groups.restore()

    def _watch_gradient(self, held: Held, parameter: torch.Tensor) -> None:
        """Attach a parameter while its gradient is accumulated, because autograd gives that the same strides."""
        self_ref, parameter_ref, number = self._reference, weakref.ref(parameter), held.plan.number

        def before(gradient: torch.Tensor) -> None:
            owner, parameter = self_ref(), parameter_ref()
            if owner is None or parameter is None:
                return
            held = owner._all[number]
            if owner._home.get(parameter) is held:
                with owner._lock:
                    use = owner._awaiting.setdefault(parameter, ParameterUse(parts_of([home_of(parameter)])))
                    owner._attach(use, "backward")

        def after(parameter: torch.Tensor) -> None:
            if (owner := self_ref()) is not None:
                assert isinstance(parameter, torch.nn.Parameter)
                with owner._lock:
                    if (use := owner._awaiting.get(parameter)) is not None:
                        owner._ended.append(use)  # First: else Ctrl-C here would leave it attached.
                        del owner._awaiting[parameter]
                        owner._release_ended()

        self._hooks.append(parameter.register_hook(not_compiled(before)))  # type: ignore[no-untyped-call]
        self._hooks.append(parameter.register_post_accumulate_grad_hook(not_compiled(after)))  # type: ignore[no-untyped-call]

    # --- Uses ------------------------------------------------------------------------------------------------------

    def present(self, records: Iterable[Held]) -> contextlib.AbstractContextManager[None]:
        """Attach the parameters of `records`, of this owner, within it. Changes are kept."""
        return self._holding([(held, tuple(range(len(held.plan.locations)))) for held in records])

    @contextmanager
    def _holding(self, parts: Parts, phase: str = "", *, on_host: bool = False) -> Iterator[None]:
        """As `present`, for the parameters in `parts`. The records stay, whether any is attached or not.

        Args:
            phase: of training, to know the use by in the next round; "" finds it out.
            on_host: none is attached: the values of an accelerator's parameters are in the pool, to be changed.
        """
        self._check_open()
        use = ParameterUse(parts, on_host=on_host)
        try:
            self._attach(use, phase or _phase())
            yield
        finally:
            self._ended.append(use)
            self._release_ended()

    def parts_with(self, parameters: Iterable[torch.Tensor]) -> list[tuple[Held, tuple[int, ...]]]:
        """The records, and positions, of those of `parameters` that this has; of a DTensor, of its local tensor."""
        return parts_of(home_of(local) for p in parameters if (local := local_of(p)) in self._home)

    def use_of(self, parameters: Iterable[torch.Tensor]) -> ParameterUse:
        """A use of those of `parameters` that this has, for `begin` and `end`."""
        return ParameterUse(self.parts_with(parameters))

    def begin(self, use: ParameterUse) -> None:
        """Attach the parameters of `use`. After an exception too it must be ended."""
        self._check_open()
        self._attach(use, _phase())

    def end(self, use: ParameterUse) -> None:
        """Release what `begin` attached. Changes are kept."""
        self._ended.append(use)
        self._release_ended()

    @contextmanager
    def used(self, parts: Parts) -> Iterator[None]:
        """As `_holding`, for an operation outside of what is hooked: autograd would save the parameter itself."""
        parts = tuple(parts)
        parameters = [held.plan.locations[position].parameter for held, positions in parts for position in positions]
        if in_transform():
            refuse_in_transform(parameters)
        with self._holding(parts), saving_locations(parameters) or contextlib.nullcontext():
            yield

    @contextmanager
    def gathered(self, parts: Parts) -> Iterator[None]:
        """As `used`, for as long as the user likes.

        Raises:
            PoolExhausted: there is no room for all of them beside the records in use.
        """
        parts = tuple(parts)
        together = [*{held for held, _ in (*parts, *(part for use in list(self._uses) for part in use.parts))}]
        self._check_device_room(together)
        needed_bytes = sum(held.plan.length_bytes for held in together)
        if self._tier is None and needed_bytes > self._budget_bytes:
            raise PoolExhausted(
                f"the records of the parameters to be gathered are {format_bytes(needed_bytes)} together, and the pool "
                f"has {format_bytes(self._budget_bytes)} for parameters; gather fewer at a time, or set pool_bytes to "
                f"at least {self._policy.pool_bytes_for(needed_bytes, self._pool.capacity_bytes, self._budget_bytes)}"
            )
        with self.used(parts):
            yield

    def mapped_copy(self, number: int, position: int) -> torch.Tensor:
        """A copy of one parameter in a mapped file; one for all who want it."""
        held = self._all[number]
        location = held.plan.locations[position]

        def fill(copy: torch.Tensor) -> None:
            with self.present([held]):
                _copy(copy, location.view(held.values[position]))

        self._check_open()
        if (tier := self._tier_of(held)) is not None:
            with self._lock, tier.reading(held):
                values = location.view(held.opened[position])
                if self._copies is None:  # It stays where it is in the pool.
                    return values
                return self._copies.get(location, checksum(held.opened[position]), lambda copy: _copy(copy, values))
        assert self._copies is not None
        with self._lock:
            with self.present(() if held.values or held.checksums else (held,)):  # What is in files may not have come.
                now = checksum(held.values[position]) if held.values else held.checksums[position]
            return self._copies.get(location, now, fill)

    def _attach(self, use: ParameterUse, phase: str) -> None:
        """Bring the records of `use` and attach its parameters. After an exception it must be released all the same.

        A user may change the values, and change them back later. So no write goes on meanwhile: the file would have
        some of the values of between, and nothing would show it.
        """
        refuse_fake_tensors()
        if self._ended:
            self._release_ended()
        with outside_of_dispatch_modes(), self._lock:
            if use.on_host:
                assert self._tier is not None
                self._tier.use_on_host([held for held, _ in use.parts], use, phase)
                return
            self._uses[use] = None
            for held, _ in use.parts:  # All of them before the first is brought, which could evict another.
                held.holds.add(use)
            for held, _ in use.parts:
                self._bring(held, phase)
            for held, _ in use.parts if self._tier is None else ():
                self._cache.wait(held.key)
            for held, positions in use.parts:
                if positions and not held.attached:
                    self.metrics.begin_use(held.key)
                for position in positions:
                    if (uses := held.attached.get(position)) is not None:
                        uses.add(use)
                        continue
                    location = held.plan.locations[position]
                    if location.parameter not in self._home or not home_of(location.parameter):
                        continue  # In memory for good, or another's: it was let go, or a `close` failed.
                    held.attached[position] = {use}
                    for tensor in location.tensors:
                        restore(tensor, location.view(held.values[position]))

    def _release_ended(self) -> None:
        """Release the uses that are over. See [Note: releasing].

        Raises:
            SwapError: a parameter was given data that do not fit it; all was released.
            SwapIOError: a write of what was changed could not be started; it will be, before the values go.
        """
        if self._closed:
            self._ended.clear()
            return
        with outside_of_dispatch_modes(), self._lock:
            if self._releasing:
                return  # The garbage collector ended a use within the loop below, which will come to it.
            try:
                self._releasing = True
                while self._ended:
                    use = self._ended[0]
                    try:
                        with contextlib.ExitStack() as all_of_them:
                            all_of_them.callback(self._uses.pop, use, None)  # Comes last.
                            for held, positions in use.parts:
                                all_of_them.callback(self._release_part, use, held, positions)
                    except Exception:
                        self._ended.popleft()
                        raise
                    self._ended.popleft()  # Last: after Ctrl-C in the loop it is released again, which changes nothing.
            finally:
                self._releasing = False

    def _release_part(self, use: ParameterUse, held: Held, positions: tuple[int, ...]) -> None:
        if use.on_host:
            assert self._tier is not None
            self._tier.release_on_host(held, use)
            return
        refused = ""
        for position in positions:
            uses = held.attached.get(position)
            if uses is None or use not in uses:
                continue
            if len(uses) > 1:
                uses.discard(use)
                continue
            for tensor in held.plan.locations[position].tensors:
                if not is_evicted(tensor):  # Ctrl-C may have struck before it was attached.
                    refused = self._keep_data(held, position, tensor) or refused
                    if (home := home_of(tensor)) is not None:  # It may not be ours any more.
                        evict(tensor, home)
            del held.attached[position]
        if positions and not held.attached:
            self.metrics.end_use(held.key)
        held.holds.discard(use)
        self._write_back(held)
        if refused:
            raise SwapError(refused)

    def _keep_data(self, held: Held, position: int, p: torch.Tensor) -> str:
        """Copy to the record other values that the user gave an attached tensor. Returns an error's text, or ""."""
        if has_own_class(p):
            follow_shape(held, position, p)
        location, values = held.plan.locations[position], held.values[position]
        same = p.shape == location.shape and p.dtype == location.dtype and p.device == values.device
        same = same and same_order(p.shape, p.stride(), location.stride)  # In another order torch computes other bits.
        if same and p.stride() == location.stride and p.data_ptr() == values.data_ptr():
            return ""
        of_record = p.untyped_storage()._cdata == values.untyped_storage()._cdata
        ours = sum(t is not p and position in held.attached and not is_evicted(t) for t in location.tensors)
        viewed = is_shared(values, ours=1 + of_record + ours)
        if not (same and p.stride() == location.stride and not viewed) and self._lets_go(held, position, p, of_record):
            return ""
        given = f"{tuple(p.shape)} x {p.dtype} on {p.device} with strides {p.stride()}"
        if same and not viewed:
            location.view(values).copy_(p.detach().clone() if of_record else p.detach())
            location.given += 1
            return ""
        restore(p, location.view(values))
        if same:
            return (
                f"{location.name} was given other data while views of its former data are kept, which would change "
                "with it; keep clones, write with copy_, or do it and drop them in `with swapper.gathered([parameter])`"
            )
        before = f"{tuple(location.shape)} x {location.dtype} on {values.device} with strides {location.stride}"
        what = "convert, resize or move the model before swapper.offload, or write with copy_"
        return f"{location.name} was {before} and was given data of {given}; {what}"

    def _lets_go(self, held: Held, position: int, p: torch.Tensor, of_record: bool) -> bool:
        """Called when a record cannot take what `p` was given, or is viewed. Returns True if `p` leaves it."""
        return False

    # --- Forward ---------------------------------------------------------------------------------------------------

    def enter(self, module: torch.nn.Module, parts: Parts) -> None:
        """Attach `parts`: `module` begins its forward."""
        self._check_open()
        if torch._C._is_tracing():
            raise SwapError(
                "torch.jit.trace of a model whose parameters are swapped would record them while they are away; trace "
                "it before swapper.offload"
            )
        running = self._running_here()
        if module is self._model() and (running or (self._awaiting and torch._C._current_graph_task_id() == -1)):
            self._unwind(running)  # A forward that Ctrl-C cut off did not leave: torch calls no hooks then.
        if in_transform():
            refuse_in_transform(used_by(module))
            parts = ()  # Called by functional_call, with other values.
        entered = _Running(module, ParameterUse(parts))
        running.append(entered)
        try:
            self._attach(entered.use, _phase())
            # After the parameters are attached: bringing them is none of what autograd shall save as locations.
            entered.hooks = saving_locations(module._parameters.values())
            if entered.hooks is not None:
                entered.hooks.__enter__()
        except BaseException:
            self.leave(module)
            raise

    def leave(self, module: torch.nn.Module) -> None:
        """Release what `enter` attached: `module` ended its forward, well or not. And those that it ran and cut off."""
        running = self._running_here()
        if not any(entered.module is module for entered in running):
            return  # Its `enter` failed.
        while True:
            entered = running[-1]
            if entered.hooks is not None and saves_locations():
                entered.hooks.__exit__()
            entered.hooks = None
            self._ended.append(entered.use)
            running.pop()
            self._release_ended()
            if entered.module is module:
                return

    def _running_here(self) -> list[_Running]:
        """The forwards that this thread is in, the innermost last."""
        running: list[_Running] = vars(self._threads).setdefault("running", [])
        return running

    def _unwind(self, running: list[_Running]) -> None:
        while running:
            self.leave(running[0].module)
        with self._lock:
            self._ended.extend(self._awaiting.values())
            self._awaiting.clear()
        self._release_ended()


def _evict_in_child() -> None:
    """The pool does not exist in a forked child: a parameter that was in use there would be a crash."""
    for owner in _living:
        for held in owner._all:
            for position in held.attached:
                for tensor in held.plan.locations[position].tensors:
                    if (home := home_of(tensor)) is not None:
                        evict(tensor, home)


os.register_at_fork(after_in_child=_evict_in_child)


def _copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    with modes_kept():
        set_grad_mode(False)
        destination.copy_(source)


def _phase() -> str:
    in_backward = torch._C._current_graph_task_id() != -1
    return "backward" if in_backward else "forward" if torch.is_grad_enabled() else "evaluation"
