"""`ParameterSwapper`: a model whose parameters are on disk and come when they are used.

[Note: three ways to the values] A module's own forward is hooked: its parameters are attached before it and let go
after it. What autograd saved is packed as a place in a record and looked up in backward. Any other use of a parameter
that is away goes through `EvictedParameter`. So what the hooks did not foresee is slower, and never wrong.

[Note: letting go] A use is one `_Hold`. It adds itself to its records and to the parameters that it attaches, and to
`_over` when it is over. To do so again changes nothing, and so does letting go of what was never attached. So whatever
an exception or Ctrl-C cut off is done by whoever comes next.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from swapper.errors import ConfigError, SwapError
from swapper.finalizers import finalizer
from swapper.io.checksums import checksum
from swapper.parameter.access_order import Order, Use
from swapper.parameter.cache import Held, ParameterCache, State, finalize
from swapper.parameter.forward_hooks import Forward, ForwardHooks
from swapper.parameter.mapped_copies import MappedCopies
from swapper.parameter.records import (
    ParameterPlace,
    ParameterRecord,
    first_of,
    least_bytes,
    modules_with_parameters,
    plan_parameter_records,
    summary_of_what_stays,
    used_by,
    where,
)
from swapper.parameter.saved_tensors import in_transform, refuse_in_transform, saves_places, saving_places
from swapper.sizes import format_bytes
from swapper.storage.buffers import BufferPool, PoolExhausted
from swapper.storage.store import RecordKey, TensorStore
from swapper.tensors.evicted import EvictedParameter, evict, refuse_copy, restore, restore_for_good
from swapper.tensors.grad_modes import modes_kept, set_grad_mode
from swapper.tensors.homes import Home, home_of

__all__ = ["ParameterSwapper"]

log = logging.getLogger(__name__)

_living: weakref.WeakSet[ParameterSwapper] = weakref.WeakSet()
"""Those whose parameters a forked child must find evicted."""


_Parts = Iterable[tuple[Held, tuple[int, ...]]]
"""Records, and the places in them of some of their parameters."""


class _Hold:
    """One use of parameters. See [Note: letting go]."""

    __slots__ = ("parts",)

    def __init__(self, parts: _Parts) -> None:
        self.parts = tuple(parts)


class _Running:
    """A forward that is running."""

    __slots__ = ("hold", "hooks", "module")

    def __init__(self, module: torch.nn.Module, hold: _Hold) -> None:
        self.module = module
        self.hold = hold
        self.hooks: torch.autograd.graph.saved_tensors_hooks | None = None


class _PlaceHome:
    """Where the values of one parameter come from. See `homes.Home`.

    The parameter has this, and its record has the parameter. So this knows the record by its number only, and a
    parameter that nobody uses any more is freed at once, not when the garbage collector comes.
    """

    __slots__ = ("_index", "_number", "stride", "swapper")

    def __init__(self, swapper: ParameterSwapper, held: Held, index: int) -> None:
        self.swapper = weakref.ref(swapper)
        self.stride = held.plan.places[index].stride
        self._number = held.number
        self._index = index

    def _held(self) -> tuple[ParameterSwapper, Held]:
        swapper = self.swapper()
        if swapper is None:
            raise SwapError("the values of this parameter are gone: its swapper was closed")
        return swapper, swapper._all[self._number]

    @property
    def owner(self) -> object:
        return id(self.swapper)  # The reference, which all of one swapper share, also when it is dead.

    @property
    def temporary(self) -> bool:
        swapper = self.swapper()
        return swapper is not None and swapper.temporary

    @property
    def viewed(self) -> bool:
        return self._held()[1].foreign_uses()

    def forget(self, parameter: torch.nn.Parameter) -> None:
        swapper, held = self._held()
        swapper._surrender(held, parameter)

    def deepcopy(self, parameter: torch.nn.Parameter, memo: dict[int, Any]) -> torch.nn.Parameter:
        swapper = self.swapper()
        if swapper is None:
            refuse_copy()
        return swapper._deepcopy(parameter, memo)

    @property
    def keeper(self) -> object:
        return self.swapper()

    def stay(self, parameter: torch.nn.Parameter) -> None:
        swapper, held = self._held()
        swapper._stay(held, parameter)

    def mapped_copy(self) -> torch.Tensor:
        swapper, held = self._held()
        return swapper._mapped_copy(held, held.plan.places[self._index])

    def present(self, homes: Iterable[Home]) -> contextlib.AbstractContextManager[None]:
        return self._held()[0]._used(_parts_of(homes))

    def gather(self, homes: Iterable[Home]) -> contextlib.AbstractContextManager[None]:
        return self._held()[0]._gathered(_parts_of(homes))


class ParameterSwapper(ParameterCache):
    """Keeps the parameters of `model` on disk, and brings each record in when it is used, ahead where it can.

    Lives as long as a module of the model, or an optimizer that was offloaded with it; then its files are deleted.

    Args:
        model: its parameters are taken away, its modules hooked. Only a weak reference is kept.
        owner: number of this swapper among those of the process; part of every record's key.
        bucket_bytes: see `plan_parameter_records`.
        budget_bytes: the most of the pool that records may hold.
        leave_bytes: the part of it that others can make better use of; left to them as far as records can do without.
        resident_bytes: the part of it for records that stay, the first in order of registration.
        step_in_backward: records of the last bucket that was stepped stay beside those that backward uses.
        pool, store: where buffers come from and records go.
        release: called once, when this is closed or dies.

    Raises:
        ConfigError: the budget is too small for two of the largest record, or for what a module uses at once.
        SwapIOError: the records could not be written. The model is as it was.
    """

    temporary = False
    """Whether another swapper may take parameters over; see `swapper.nursery`."""

    stays: dict[str, str]
    """The parameters that stay in memory, by name, and why."""

    def __init__(
        self,
        model: torch.nn.Module,
        owner: int,
        bucket_bytes: int,
        budget_bytes: int,
        leave_bytes: int,
        resident_bytes: int,
        step_in_backward: bool,
        pool: BufferPool,
        store: TensorStore,
        release: Callable[[], None],
    ) -> None:
        records, self.stays = plan_parameter_records(model, bucket_bytes)
        resident = first_of(records, resident_bytes)
        self._least = least_bytes(model, records, resident, step_in_backward)
        budget_bytes = self._budget(budget_bytes, leave_bytes, pool)
        count = len(records)
        evaluation = [Use("evaluation", i) for i in range(count)]
        forward = [Use("forward", i) for i in range(count)]
        backward = [Use("backward", i) for i in reversed(range(count))]
        step = [Use("step", i) for i in range(count)]
        order = Order([*evaluation, *forward, *backward, *step], start=len(evaluation))
        held = [
            Held(record, RecordKey(owner, "param", record.number), resident=record in resident) for record in records
        ]
        super().__init__(held, order, budget_bytes, pool, store)
        self._threads = threading.local()
        self._over: deque[_Hold] = deque()
        self._letting_go = False
        self._awaiting: dict[torch.nn.Parameter, _Hold] = {}  # attached until their gradient is accumulated
        self._model = weakref.ref(model)
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        # The modules have these, and these have the swapper: it goes with the last of them.
        self._forwards: weakref.WeakSet[Forward] = weakref.WeakSet()
        self._forward_hooks: weakref.WeakSet[ForwardHooks] = weakref.WeakSet()
        self._home: dict[torch.nn.Parameter, Held] = {}
        self._copies = MappedCopies(store)
        self._former: dict[torch.nn.Parameter, Home] = {}  # who had them, until all are taken over
        if summary := summary_of_what_stays(model, records, self.stays):
            log.warning("%s\n  model.swapper.stays has the reason for each parameter", summary)
        store.plan({held.key: held.plan.file_bytes for held in self._all})
        _living.add(self)
        try:
            for each in self._all:
                self._adopt(each)
            self._install(model)
        except BaseException:
            self._give_everything_back()
            raise
        self._finalizer = finalizer(self, finalize, self._all, self._dropped, store, release, self._pid)
        formers, self._former = self._former, {}
        keepers = dict.fromkeys(former.keeper for former in formers.values())
        for parameter, former in formers.items():
            former.forget(parameter)
        for keeper in keepers:
            assert isinstance(keeper, ParameterSwapper)
            keeper._end_surrender()

    def _budget(self, budget_bytes: int, leave_bytes: int, pool: BufferPool) -> int:
        needed, why = self._least
        if needed > budget_bytes:
            raise ConfigError(
                f"pool_bytes: {format_bytes(budget_bytes)} are left for parameters, and {why} are needed; set "
                f"pool_bytes to at least {pool.capacity_bytes + needed - budget_bytes}"
            )
        return max(needed, budget_bytes - leave_bytes)

    def share_pool(self, budget_bytes: int, leave_bytes: int) -> None:
        """Others need the pool, too: hold as much of it as one that is made with these two.

        Raises:
            ConfigError: that is too little.
        """
        self._budget_bytes = self._budget(budget_bytes, leave_bytes, self._pool)

    def where(self) -> Mapping[torch.Tensor, tuple[int, int]]:
        """See `parameter_records.where`."""
        return where(held.plan for held in self._all)

    @property
    def records(self) -> list[ParameterRecord]:
        """What each record holds."""
        return [held.plan for held in self._all]

    @property
    def held_bytes_max(self) -> int:
        """The most that records will ever hold of the pool."""
        return min(self._budget_bytes, sum(held.plan.length_bytes for held in self._all))

    # --- What users call -------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write what changed and wait until it is on disk.

        Raises:
            SwapIOError: a write failed.
        """
        self._check_open()
        with self._lock:
            for held in self._all:
                if held.state is State.HERE and self._is_newer(held):
                    self._write(held)
            for held in self._all:
                self._settle_write(held)

    def settled_records(self) -> list[Held]:
        """The records that have the values of all their parameters, in their files.

        Raises:
            SwapIOError: a write failed.
        """
        self.flush()
        return [
            held
            for held in self._all
            if all(self._home.get(place.parameter) is held and home_of(place.parameter) for place in held.plan.places)
        ]

    @property
    def store(self) -> TensorStore:
        """Where the records are."""
        return self._store

    @contextmanager
    def present(self, records: Iterable[Held], phase: str = "") -> Iterator[None]:
        """Within it the parameters of `records` have their values. Changes are kept.

        Args:
            records: of this swapper.
            phase: for what, to know the use by in the next round; "" finds it out.
        """
        with self._holding(_whole(records), phase):
            yield

    @contextmanager
    def _holding(self, parts: _Parts, phase: str = "") -> Iterator[None]:
        """As `present`, for the parameters in `parts`. The records stay, whether any is attached or not."""
        self._check_open()
        hold = _Hold(parts)
        try:
            self._attach(hold, phase or _phase())
            yield
        finally:
            self._over.append(hold)
            self._let_go()

    @contextmanager
    def _used(self, parts: _Parts) -> Iterator[None]:
        """As `_holding`, for an operation outside of what is hooked: autograd would save the parameter itself."""
        parts = tuple(parts)
        parameters = [held.plan.places[index].parameter for held, indices in parts for index in indices]
        if in_transform():
            refuse_in_transform(parameters)
        with self._holding(parts), saving_places(parameters) or contextlib.nullcontext():
            yield

    @contextmanager
    def _gathered(self, parts: _Parts) -> Iterator[None]:
        """As `_used`, for as long as the user likes."""
        parts = tuple(parts)
        together = {*(held for held, _ in parts), *(held for held in self._all if held.holds)}
        needed_bytes = sum(held.plan.length_bytes for held in together)
        if needed_bytes > self._budget_bytes:
            raise PoolExhausted(
                f"the records of the parameters to be gathered are {format_bytes(needed_bytes)} together, and the pool "
                f"has {format_bytes(self._budget_bytes)} for parameters; gather fewer at a time, or set pool_bytes to "
                f"at least {self._pool.capacity_bytes + needed_bytes - self._budget_bytes}"
            )
        with self._used(parts):
            yield

    def records_of(self, parameters: Iterable[torch.nn.Parameter]) -> list[Held]:
        """The records that hold `parameters`, each once; those that stay in memory have none."""
        return list(dict.fromkeys(self._home[p] for p in parameters if p in self._home))

    @contextmanager
    def stepping(self, parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
        """Within it `parameters` have their values and are changed; afterwards they are written behind."""
        parts = _parts_of(home_of(p) for p in parameters if p in self._home)
        if not parts:  # All of them are in memory, as after `close(keep_values=True)`.
            yield
            return
        with self._holding(parts, "step"):
            with self._lock:
                for held, _ in parts:
                    held.changed = True
            yield

    def staying(
        self, parameters: Iterable[torch.nn.Parameter], following: Iterable[torch.nn.Parameter]
    ) -> contextlib.AbstractContextManager[None]:
        """Within it the records stay that hold some of `parameters`, which are there, and some of `following`."""
        here = set(self.records_of(parameters))
        staying = [held for held in self.records_of(following) if held in here]
        return self._holding([(held, ()) for held in staying], "step") if staying else contextlib.nullcontext()

    def close(self, *, keep_values: bool = False) -> None:
        """Undo everything: remove the hooks, delete the files, give the memory back. Idempotent.

        Args:
            keep_values: bring all parameters back into memory of their own, where the optimizer goes on stepping them;
                else their values are gone, and any use of them raises.

        Raises:
            SwapIOError: with `keep_values`, a record could not be read; everything is as it was but for the parameters
                that are in memory already.
        """
        if self._closed or os.getpid() != self._pid:
            return
        with self._lock:
            if keep_values:
                for held in self._all:
                    self._restore_values(held)
                self._home.clear()
            self._closed = True
            self._remove_hooks()
            if (model := self._model()) is not None and vars(model).get("swapper") is self:
                object.__delattr__(model, "swapper")
            self._finalizer()

    # --- Taking over the model -------------------------------------------------------------------------------------

    def _adopt(self, held: Held) -> None:
        """Write the values of a record, and take them from the parameters."""
        try:
            self._fill(held)
        except PoolExhausted:  # A value that is on disk already needs room too, and the pool may be in pieces.
            while self._pool.reclaim():
                pass
            self._fill(held)
        self._write(held)
        for index, place in enumerate(held.plan.places):
            if (former := home_of(place.parameter)) is not None:
                self._former[place.parameter] = former
            self._home[place.parameter] = held
            evict(place.parameter, _PlaceHome(self, held, index))

    def _fill(self, held: Held) -> None:
        """Copy the values of a record into a buffer for it. After an exception it has none."""
        self._make_room(held)
        assert held.lease is not None
        header = held.plan.layout.header(0)
        held.lease.tensor[: len(header)].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        self._open(held)
        filling = object()
        try:
            held.holds.add(filling)
            for place, values in zip(held.plan.places, held.values, strict=True):
                source = place.parameter.detach()
                with torch._C.DisableTorchFunctionSubclass():  # Of one that nothing has filled yet, nothing is copied.
                    values.as_strided(place.shape, place.stride).copy_(source)
                del source  # The buffer that it lies in may be needed for the next.
        except BaseException:
            self._release(held)
            raise
        finally:
            held.holds.discard(filling)

    def _restore_values(self, held: Held) -> None:
        """Give the parameters of a record memory of their own; those that have it are left alone."""
        away = [place.parameter for place in held.plan.places if home_of(place.parameter) is not None]
        if not away:
            return
        with self.present([held]):
            copies = [p.detach().clone(memory_format=torch.preserve_format) for p in away]
        for parameter, copy in zip(away, copies, strict=True):
            restore_for_good(parameter, copy)

    def _give_everything_back(self) -> None:
        """After a failed construction: the values of what was taken over are in the pool or on the drive."""
        for parameter, former in self._former.items():
            evict(parameter, former)
        for held in self._all:
            mine = [i for i, p in enumerate(_parameters(held)) if p in self._home and p not in self._former]
            if mine:
                with self._lock:
                    held.holds.add(self)
                    self._bring(held, "forward")
                    for place, values in [(held.plan.places[i], held.values[i]) for i in mine]:
                        copy = values.as_strided(place.shape, place.stride).clone(memory_format=torch.preserve_format)
                        restore_for_good(place.parameter, copy)
        self._closed = True
        self._remove_hooks()
        finalize(self._all, self._dropped, self._store, lambda: None, self._pid)

    def _install(self, model: torch.nn.Module) -> None:
        wanted = dict.fromkeys(module for _, module in modules_with_parameters(model))
        wanted.setdefault(model, None)
        encoders = [module for module in model.modules() if isinstance(module, torch.nn.TransformerEncoder)]
        layers = [module for module in model.modules() if isinstance(module, torch.nn.TransformerEncoderLayer)]
        wanted.update(dict.fromkeys((*encoders, *layers)))
        without_hooks = {module for layer in layers for module in layer.modules()}
        for module in wanted:
            if isinstance(module, torch.jit.ScriptModule):  # Its parameters stay, and it takes no hooks.
                continue
            hooks = ForwardHooks(self, _parts_of(home_of(p) for p in used_by(module) if p in self._home))
            self._forward_hooks.add(hooks)
            if module in without_hooks:
                self._forwards.add(Forward(module, hooks))
                continue
            self._hooks.append(module.register_forward_pre_hook(hooks.before, prepend=True))
            self._hooks.append(module.register_forward_hook(hooks.after, always_call=True))
        for held in self._all:
            for place in held.plan.places:
                if place.parameter.requires_grad and not _is_contiguous(place):
                    self._watch_gradient(held, place.parameter)

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for forward in list(self._forwards):
            forward.remove()

    def _watch_gradient(self, held: Held, parameter: torch.nn.Parameter) -> None:
        """Have a parameter there when its gradient is accumulated, because autograd gives that the same strides."""
        self_ref, parameter_ref, number = weakref.ref(self), weakref.ref(parameter), held.number

        def before(gradient: torch.Tensor) -> None:
            swapper, parameter = self_ref(), parameter_ref()
            if swapper is None or parameter is None:
                return
            held = swapper._all[number]
            if swapper._home.get(parameter) is held:
                with swapper._lock:
                    hold = swapper._awaiting.setdefault(parameter, _Hold(_parts_of([home_of(parameter)])))
                    swapper._attach(hold, "backward")

        def after(parameter: torch.Tensor) -> None:
            if (swapper := self_ref()) is not None:
                assert isinstance(parameter, torch.nn.Parameter)
                with swapper._lock:
                    if (hold := swapper._awaiting.get(parameter)) is not None:
                        swapper._over.append(hold)
                        del swapper._awaiting[parameter]
                        swapper._let_go()

        self._hooks.append(parameter.register_hook(before))  # type: ignore[no-untyped-call]
        self._hooks.append(parameter.register_post_accumulate_grad_hook(after))  # type: ignore[no-untyped-call]

    # --- Forward ---------------------------------------------------------------------------------------------------

    def _attach(self, hold: _Hold, phase: str) -> None:
        """Bring the records of `hold` and attach its parameters. After an exception it must be let go of all the same.

        What uses them may change the values, and change them back later. So no write goes on meanwhile: the file would
        have some of the values of between, and nothing would show it.
        """
        if self._over:
            self._let_go()
        with self._lock:
            for held, _ in hold.parts:
                held.holds.add(hold)
            for held, _ in hold.parts:
                self._bring(held, phase)
            for held, _ in hold.parts:
                self._settle_write(held)
            for held, indices in hold.parts:
                if indices and not held.attached:
                    self.metrics.begin_use(held.key)
                for index in indices:
                    if (holds := held.attached.get(index)) is not None:
                        holds.add(hold)
                        continue
                    place = held.plan.places[index]
                    if home_of(place.parameter) is None:  # It is in memory for good, after a `close` that failed.
                        continue
                    held.attached[index] = {hold}
                    restore(place.parameter, held.values[index].as_strided(place.shape, place.stride))

    def _let_go(self) -> None:
        """Let go of what is `_over`. See [Note: letting go].

        Raises:
            SwapError: a parameter was given data that do not fit it; all was let go of.
            SwapIOError: a write of what was changed could not be started; it will be, before the values go.
        """
        if self._closed:
            self._over.clear()
            return
        with self._lock:
            if self._letting_go:
                return  # The garbage collector ended a use within what follows, which will come to it.
            try:
                self._letting_go = True
                while self._over:
                    hold = self._over[0]
                    try:
                        with contextlib.ExitStack() as all_of_them:
                            for held, indices in hold.parts:
                                all_of_them.callback(self._let_go_of, hold, held, indices)
                    except Exception:
                        self._over.popleft()
                        raise
                    self._over.popleft()
            finally:
                self._letting_go = False

    def _let_go_of(self, hold: _Hold, held: Held, indices: tuple[int, ...]) -> None:
        refused = ""
        for index in indices:
            holds = held.attached.get(index)
            if holds is None or hold not in holds:
                continue
            if len(holds) > 1:
                holds.discard(hold)
                continue
            parameter = held.plan.places[index].parameter
            if type(parameter) is not EvictedParameter:  # Ctrl-C may have struck before it was attached.
                refused = self._keep_data(held, index) or refused
                if (home := home_of(parameter)) is not None:  # It may not be ours any more.
                    evict(parameter, home)
            del held.attached[index]
        if indices and not held.attached:
            self.metrics.end_use(held.key)
        held.holds.discard(hold)
        if held.changed and not held.holds and held.state is State.HERE:
            self._write(held)
        if refused:
            raise SwapError(refused)

    def _keep_data(self, held: Held, index: int) -> str:
        """If the user gave an attached parameter other values, have them in the record. Returns what is wrong."""
        place, values = held.plan.places[index], held.values[index]
        p = place.parameter
        same = p.shape == place.shape and p.dtype == place.dtype and p.device == values.device
        if same and p.stride() == place.stride and p.data_ptr() == values.data_ptr():
            return ""
        if not (same and p.stride() == place.stride) and self._lets_go(held):
            return ""
        of_record = p.untyped_storage()._cdata == values.untyped_storage()._cdata
        viewed = torch._C._storage_Use_Count(values.untyped_storage()._cdata) > 2 + of_record
        given = f"{tuple(p.shape)} x {p.dtype} on {p.device} with strides {p.stride()}"
        if same and not viewed:
            data = p.detach().clone() if of_record else p.detach()
            values.as_strided(place.shape, place.stride).copy_(data)
            return ""
        restore(p, values.as_strided(place.shape, place.stride))
        if same:
            return (
                f"{place.name} was given other data while views of its former data are kept, which would change with "
                "it; keep a clone of them, or write with copy_"
            )
        return (
            f"{place.name} was {tuple(place.shape)} x {place.dtype} and was given data of {given}; convert, resize or "
            "move the model before swapper.offload"
        )

    def _enter(self, module: torch.nn.Module, parts: _Parts) -> None:
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
        entered = _Running(module, _Hold(parts))
        running.append(entered)
        try:
            self._attach(entered.hold, _phase())
            entered.hooks = saving_places(module._parameters.values())
            if entered.hooks is not None:
                entered.hooks.__enter__()
        except BaseException:
            self._leave(module)
            raise

    def _leave(self, module: torch.nn.Module) -> None:
        running = self._running_here()
        if not any(entered.module is module for entered in running):
            return  # Its `_enter` failed.
        while True:
            entered = running[-1]
            if entered.hooks is not None and saves_places():
                entered.hooks.__exit__()
            entered.hooks = None
            self._over.append(entered.hold)
            running.pop()
            self._let_go()
            if entered.module is module:
                return

    def _running_here(self) -> list[_Running]:
        """The forwards that this thread is in, the innermost last."""
        if not hasattr(self._threads, "running"):
            self._threads.running = []
        running: list[_Running] = self._threads.running
        return running

    def _unwind(self, running: list[_Running]) -> None:
        while running:
            self._leave(running[0].module)
        with self._lock:
            self._over.extend(self._awaiting.values())
            self._awaiting.clear()
        self._let_go()

    def _mapped_copy(self, held: Held, place: ParameterPlace) -> torch.Tensor:
        index = held.plan.places.index(place)

        def fill(copy: torch.Tensor) -> None:
            with self.present([held]), modes_kept():
                set_grad_mode(False)
                copy.copy_(held.values[index].as_strided(place.shape, place.stride))

        self._check_open()
        with self._lock:
            now = checksum(held.values[index]) if held.state is State.HERE else held.checksums[index]
            return self._copies.get(place, now, fill)

    def _lets_go(self, held: Held) -> bool:
        """Whether a record is given up whose parameter was given data that do not fit it."""
        return False

    def _surrender(self, held: Held, parameter: torch.nn.Parameter) -> None:
        """Another swapper took over `parameter`."""
        raise AssertionError("only a nursery gives up parameters")

    def _end_surrender(self) -> None:
        """Another swapper took over all that it wanted."""
        raise AssertionError("only a nursery gives up parameters")

    def _stay(self, held: Held, parameter: torch.nn.Parameter) -> None:
        """Let `parameter` be an ordinary one, where its values are now."""
        raise AssertionError("only a nursery gives up parameters")

    def _deepcopy(self, parameter: torch.nn.Parameter, memo: dict[int, Any]) -> torch.nn.Parameter:
        refuse_copy()


def _evict_in_child() -> None:
    """The pool does not exist in a forked child: a parameter that was in use there would be a crash."""
    for swapper in _living:
        for held in swapper._all:
            for index in held.attached:
                parameter = held.plan.places[index].parameter
                if (home := home_of(parameter)) is not None:
                    evict(parameter, home)


os.register_at_fork(after_in_child=_evict_in_child)


def _parts_of(homes: Iterable[Home | None]) -> list[tuple[Held, tuple[int, ...]]]:
    """Those of our `homes`, all of one swapper."""
    indices: dict[Held, dict[int, None]] = {}
    for home in homes:
        if isinstance(home, _PlaceHome):
            indices.setdefault(home._held()[1], {})[home._index] = None
    return [(held, tuple(those)) for held, those in indices.items()]


def _whole(records: Iterable[Held]) -> list[tuple[Held, tuple[int, ...]]]:
    return [(held, tuple(range(len(held.plan.places)))) for held in records]


def _parameters(held: Held) -> list[torch.nn.Parameter]:
    return [place.parameter for place in held.plan.places]


def _is_contiguous(place: ParameterPlace) -> bool:
    return torch.empty_strided(place.shape, place.stride, device="meta").is_contiguous()


def _phase() -> str:
    if torch._C._current_graph_task_id() != -1:
        return "backward"
    return "forward" if torch.is_grad_enabled() else "evaluation"
