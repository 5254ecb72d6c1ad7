"""`ParameterSwapper`: a model whose parameters are on disk and come when they are used.

[Note: three ways to the values] A module's own forward is hooked: its parameters are attached before it and let go
after it. What autograd saved is packed as a place in a record and looked up in backward. Any other use of a parameter
that is away goes through `EvictedParameter`. So what the hooks did not foresee is slower, and never wrong.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from swapper import codec
from swapper.buffers import BufferPool, PoolExhausted
from swapper.endings import finalizer
from swapper.errors import ConfigError, SwapError
from swapper.evicted import Home, evict, home_of, refuse_copy, restore, settle
from swapper.forward_hooks import Forward, ForwardHooks
from swapper.lasting import LastingCopies
from swapper.layout import format_bytes
from swapper.modes import modes_kept, set_grad_mode
from swapper.order import Order, Use
from swapper.parameter_cache import Held, ParameterCache, State, finalize
from swapper.parameter_records import (
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
from swapper.saved_places import in_transform, refuse_in_transform, saving_places
from swapper.store import RecordKey, TensorStore

__all__ = ["ParameterSwapper"]

log = logging.getLogger(__name__)

_living: weakref.WeakSet[ParameterSwapper] = weakref.WeakSet()
"""Those whose parameters a forked child must find evicted."""


class _PlaceHome:
    """Where the values of one parameter come from. See `evicted.Home`."""

    __slots__ = ("held", "place", "swapper")

    def __init__(self, swapper: ParameterSwapper, held: Held, place: ParameterPlace) -> None:
        self.swapper = weakref.ref(swapper)
        self.held = held
        self.place = place

    @property
    def stride(self) -> tuple[int, ...]:
        return self.place.stride

    @property
    def owner(self) -> object:
        return id(self.swapper)  # The reference, which all of one swapper share, also when it is dead.

    @property
    def temporary(self) -> bool:
        swapper = self.swapper()
        return swapper is not None and swapper.temporary

    @property
    def viewed(self) -> bool:
        return self.held.foreign_uses()

    def surrender(self, parameter: torch.nn.Parameter) -> None:
        swapper = self.swapper()
        assert swapper is not None
        swapper._surrender(self.held, parameter)

    def deepcopy(self, parameter: torch.nn.Parameter, memo: dict[int, Any]) -> torch.nn.Parameter:
        swapper = self.swapper()
        if swapper is None:
            refuse_copy()
        return swapper._deepcopy(parameter, memo)

    @property
    def keeper(self) -> object:
        return self.swapper()

    def stay(self, parameter: torch.nn.Parameter) -> None:
        swapper = self.swapper()
        assert swapper is not None
        swapper._stay(self.held, parameter)

    def lasting(self) -> torch.Tensor:
        swapper = self.swapper()
        if swapper is None:
            raise SwapError("the values of this parameter are gone: its swapper was closed")
        return swapper._lasting_copy(self.held, self.place)

    def present(self, homes: Iterable[Home]) -> contextlib.AbstractContextManager[None]:
        swapper = self.swapper()
        if swapper is None:
            raise SwapError("the values of this parameter are gone: its swapper was closed")
        return swapper._used({home.held: None for home in homes if isinstance(home, _PlaceHome)})

    def gather(self, homes: Iterable[Home]) -> contextlib.AbstractContextManager[None]:
        swapper = self.swapper()
        if swapper is None:
            raise SwapError("the values of this parameter are gone: its swapper was closed")
        return swapper._gathered({home.held: None for home in homes if isinstance(home, _PlaceHome)})


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
        forward = [Use("forward", i) for i in range(count)]
        backward = [Use("backward", i) for i in reversed(range(count))]
        order = Order([*forward, *backward, *(Use("step", i) for i in range(count))])
        held = [
            Held(record, RecordKey(owner, "param", record.number), resident=record in resident) for record in records
        ]
        super().__init__(held, order, budget_bytes, pool, store)
        self._threads = threading.local()
        self._awaiting: list[Held] = []  # attached until their gradient is accumulated
        self._model = weakref.ref(model)
        self._hooks: list[torch.utils.hooks.RemovableHandle | Forward] = []
        self._forward_hooks: list[ForwardHooks] = []
        self._home: dict[torch.nn.Parameter, Held] = {}
        self._lasting = LastingCopies(store)
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
            former.surrender(parameter)
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
        self._check_open()
        wanted = list(records)
        with self._lock:
            self._attach_all(wanted, phase or _phase())
        try:
            yield
        finally:
            self._detach_all(wanted)

    @contextmanager
    def _used(self, records: Iterable[Held]) -> Iterator[None]:
        """As `present`, for an operation outside of what is hooked: autograd would save the parameter itself."""
        wanted = list(records)
        parameters = [p for held in wanted for p in _parameters(held)]
        if in_transform():
            refuse_in_transform(parameters)
        with self.present(wanted), saving_places(parameters) or contextlib.nullcontext():
            yield

    @contextmanager
    def _gathered(self, records: Iterable[Held]) -> Iterator[None]:
        """As `_used`, for as long as the user likes."""
        wanted = list(records)
        together = {*wanted, *(held for held in self._all if held.attached)}
        needed_bytes = sum(held.plan.length_bytes for held in together)
        if needed_bytes > self._budget_bytes:
            raise PoolExhausted(
                f"the records of the parameters to be gathered are {format_bytes(needed_bytes)} together, and the pool "
                f"has {format_bytes(self._budget_bytes)} for parameters; gather fewer at a time, or set pool_bytes to "
                f"at least {self._pool.capacity_bytes + needed_bytes - self._budget_bytes}"
            )
        with self._used(wanted):
            yield

    def records_of(self, parameters: Iterable[torch.nn.Parameter]) -> list[Held]:
        """The records that hold `parameters`, each once; those that stay in memory have none."""
        return list(dict.fromkeys(self._home[p] for p in parameters if p in self._home))

    @contextmanager
    def stepping(self, parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
        """Within it `parameters` have their values and are changed; afterwards they are written behind."""
        records = self.records_of(parameters)
        if not records:  # All of them are in memory, as after `close(keep_values=True)`.
            yield
            return
        with self.present(records, "step"):
            with self._lock:
                for held in records:
                    held.changed = True
            yield

    def staying(
        self, parameters: Iterable[torch.nn.Parameter], following: Iterable[torch.nn.Parameter]
    ) -> contextlib.AbstractContextManager[None]:
        """Within it the records stay that hold some of `parameters`, which are there, and some of `following`."""
        here = set(self.records_of(parameters))
        staying = [held for held in self.records_of(following) if held in here]
        return self.present(staying, "step") if staying else contextlib.nullcontext()

    def end_round(self) -> None:
        """A step is over: the order of use since the last one is what to expect until the next one."""
        with self._lock:
            self._order.end_round()

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
            for hook in self._hooks:
                hook.remove()
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
        for place in held.plan.places:
            if (former := home_of(place.parameter)) is not None:
                self._former[place.parameter] = former
            self._home[place.parameter] = held
            evict(place.parameter, _PlaceHome(self, held, place))

    def _fill(self, held: Held) -> None:
        """Copy the values of a record into a buffer for it. After an exception it has none."""
        self._make_room(held)
        assert held.lease is not None
        header = held.plan.layout.header(0)
        held.lease.tensor[: len(header)].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        self._open(held)
        held.pins += 1
        try:
            for place, values in zip(held.plan.places, held.values, strict=True):
                source = place.parameter.detach()
                with torch._C.DisableTorchFunctionSubclass():  # Of one that nothing has filled yet, nothing is copied.
                    values.as_strided(place.shape, place.stride).copy_(source)
                del source  # The buffer that it lies in may be needed for the next.
        except BaseException:
            self._release(held)
            raise
        finally:
            held.pins -= 1

    def _restore_values(self, held: Held) -> None:
        """Give the parameters of a record memory of their own; those that have it are left alone."""
        away = [place.parameter for place in held.plan.places if home_of(place.parameter) is not None]
        if not away:
            return
        with self.present([held]):
            copies = [p.detach().clone(memory_format=torch.preserve_format) for p in away]
        for parameter, copy in zip(away, copies, strict=True):
            settle(parameter, copy)

    def _give_everything_back(self) -> None:
        """After a failed construction: the values of what was taken over are in the pool or on the drive."""
        for parameter, former in self._former.items():
            evict(parameter, former)
        for held in self._all:
            mine = [i for i, p in enumerate(_parameters(held)) if p in self._home and p not in self._former]
            if mine:
                with self._lock:
                    held.pins += 1
                    self._bring(held, "forward")
                    for place, values in [(held.plan.places[i], held.values[i]) for i in mine]:
                        copy = values.as_strided(place.shape, place.stride).clone(memory_format=torch.preserve_format)
                        settle(place.parameter, copy)
        self._closed = True
        for hook in self._hooks:
            hook.remove()
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
            hooks = ForwardHooks(self, self.records_of(used_by(module)))
            self._forward_hooks.append(hooks)
            if module in without_hooks:
                self._hooks.append(Forward(module, hooks))
                continue
            self._hooks.append(module.register_forward_pre_hook(hooks.before, prepend=True))
            self._hooks.append(module.register_forward_hook(hooks.after, always_call=True))
        for held in self._all:
            for place in held.plan.places:
                if place.parameter.requires_grad and not _is_contiguous(place):
                    self._watch_gradient(held, place.parameter)

    def _watch_gradient(self, held: Held, parameter: torch.nn.Parameter) -> None:
        """Have a parameter there when its gradient is accumulated, because autograd gives that the same strides."""
        self_ref = weakref.ref(self)

        def before(gradient: torch.Tensor) -> None:
            swapper = self_ref()
            if swapper is not None and swapper._home.get(parameter) is held:
                with swapper._lock:
                    swapper._attach_all([held], "backward")
                    swapper._awaiting.append(held)

        def after(parameter: torch.Tensor) -> None:
            if (swapper := self_ref()) is not None:
                with swapper._lock:
                    if held in swapper._awaiting:
                        swapper._awaiting.remove(held)
                        swapper._detach_all([held])

        self._hooks.append(parameter.register_hook(before))  # type: ignore[no-untyped-call]
        self._hooks.append(parameter.register_post_accumulate_grad_hook(after))  # type: ignore[no-untyped-call]

    # --- Forward ---------------------------------------------------------------------------------------------------

    def _attach_all(self, records: Sequence[Held], phase: str) -> None:
        """Bring `records` and attach them: all, or after an exception none.

        What uses them may change the values, and change them back later. So no write goes on meanwhile: the file would
        have some of the values of between, and nothing would show it.
        """
        attached = 0
        for held in records:
            held.pins += 1
        try:
            for held in records:
                self._bring(held, phase)
            for held in records:
                self._settle_write(held)
            for held in records:
                attached += 1
                self._attach(held)
        except BaseException:
            for held in records[:attached]:
                self._detach(held)
            for held in records:
                held.pins -= 1
            raise

    def _detach_all(self, records: Sequence[Held]) -> None:
        if self._closed:
            return
        with self._lock, contextlib.ExitStack() as all_of_them:
            for held in records:
                all_of_them.callback(self._let_go, held)

    def _let_go(self, held: Held) -> None:
        try:
            self._detach(held)
        finally:
            held.pins -= 1

    def _enter(self, module: torch.nn.Module, records: list[Held]) -> None:
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
            records = []  # Called by functional_call, with other values.
        with self._lock:
            self._attach_all(records, _phase())
        try:
            hooks = saving_places(module._parameters.values())
        except BaseException:
            self._detach_all(records)
            raise
        if hooks is not None:
            hooks.__enter__()
        running.append((module, records, hooks))

    def _leave(self, module: torch.nn.Module) -> None:
        running = self._running_here()
        if not any(entered is module for entered, _, _ in running):
            return  # Its `_enter` failed.
        while True:
            entered, records, hooks = running.pop()
            if hooks is not None:
                hooks.__exit__()
            self._detach_all(records)
            if entered is module:
                return

    def _running_here(self) -> list[tuple[torch.nn.Module, list[Held], Any]]:
        """The forwards that this thread is in, the innermost last."""
        if not hasattr(self._threads, "running"):
            self._threads.running = []
        running: list[tuple[torch.nn.Module, list[Held], Any]] = self._threads.running
        return running

    def _unwind(self, running: list[tuple[torch.nn.Module, list[Held], Any]]) -> None:
        while running:
            self._leave(running[0][0])
        with self._lock:
            awaiting, self._awaiting = self._awaiting, []
            self._detach_all(awaiting)

    def _attach(self, held: Held) -> None:
        held.attached += 1
        if held.attached == 1:
            self.metrics.begin_use(held.key)
            for place, values in zip(held.plan.places, held.values, strict=True):
                restore(place.parameter, values.as_strided(place.shape, place.stride))

    def _detach(self, held: Held) -> None:
        held.attached -= 1
        if held.attached > 0:
            return
        self.metrics.end_use(held.key)
        refused = ""
        for place, values in zip(held.plan.places, held.values, strict=True):
            p = place.parameter
            if p.data_ptr() != values.data_ptr():  # The user gave it other values: `p.data = ...`.
                same = p.shape == place.shape and p.dtype == place.dtype and p.device == values.device
                if not (same and p.stride() == place.stride) and self._lets_go(held):
                    return
                if same:
                    values.as_strided(place.shape, place.stride).copy_(p.detach())
                else:
                    refused = refused or (
                        f"{place.name} was {tuple(place.shape)} x {place.dtype} and was given data of "
                        f"{tuple(p.shape)} x {p.dtype} on {p.device}; convert, resize or move the model before "
                        "swapper.offload"
                    )
                    restore(p, values.as_strided(place.shape, place.stride))
            evict(p, p.__dict__["_swapper_home"])
        if held.changed:
            self._write(held)
        if refused:
            raise SwapError(refused)

    def _lasting_copy(self, held: Held, place: ParameterPlace) -> torch.Tensor:
        index = held.plan.places.index(place)

        def fill(copy: torch.Tensor) -> None:
            with self.present([held]), modes_kept():
                set_grad_mode(False)
                copy.copy_(held.values[index].as_strided(place.shape, place.stride))

        self._check_open()
        with self._lock:
            now = codec.checksum(held.values[index]) if held.state is State.HERE else held.checksums[index]
            return self._lasting.get(place, now, fill)

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
            if held.attached:
                for place in held.plan.places:
                    if (home := home_of(place.parameter)) is not None:
                        evict(place.parameter, home)


os.register_at_fork(after_in_child=_evict_in_child)


def _parameters(held: Held) -> list[torch.nn.Parameter]:
    return [place.parameter for place in held.plan.places]


def _is_contiguous(place: ParameterPlace) -> bool:
    return torch.empty_strided(place.shape, place.stride, device="meta").is_contiguous()


def _phase() -> str:
    return "backward" if torch._C._current_graph_task_id() != -1 else "forward"
