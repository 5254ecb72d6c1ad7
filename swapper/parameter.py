"""`ParameterSwapper`: a model whose parameters are on disk and come when they are used.

[Note: three ways to the values] A module's own forward is hooked: its parameters are attached before it and let go
after it. What autograd saved is packed as a place in a record and looked up in backward. Any other use of a parameter
that is away goes through `EvictedParameter`. So what the hooks did not foresee is slower, and never wrong.

[Note: when a buffer may go] A record's buffer is given up only when no tensor but ours shares its memory: each
parameter's values have a storage of their own while they are in the pool, and its use count says whether a view of
them is left anywhere. And its bytes are compared, by checksum, with what is stored: what user code changed in place,
even behind autograd's back, is written first.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from swapper import codec
from swapper.buffers import BufferPool, Lease, PoolExhausted
from swapper.errors import ConfigError, SwapError, SwapIOError
from swapper.evicted import Home, evict, home_of, refuse_copy, restore, settle
from swapper.lasting import LastingCopies
from swapper.layout import format_bytes
from swapper.metrics import Metrics
from swapper.order import Order, Use
from swapper.parameter_records import ParameterPlace, ParameterRecord, modules_with_parameters, plan_parameter_records
from swapper.store import RecordKey, TensorStore
from swapper.transfers import AnyTransfer

__all__ = ["ParameterSwapper"]

log = logging.getLogger(__name__)

_by_address: dict[int, tuple[weakref.ref[ParameterSwapper], _Held, int]] = {}
"""Where values in buffers begin: whose they are, in which record, and which of its parameters.

Of all swappers, because of several that are in use at once only the hooks of one decide what autograd saves.
"""

_living: weakref.WeakSet[ParameterSwapper] = weakref.WeakSet()
"""Those whose parameters a forked child must find evicted."""


class _State(enum.Enum):
    """Where the values of a record are."""

    STORED = enum.auto()
    """On the drive. No buffer."""
    ARRIVING = enum.auto()
    """Being read into its buffer."""
    HERE = enum.auto()
    """In its buffer, as stored or newer; perhaps being written from there."""
    GONE = enum.auto()
    """Nowhere: it was given up."""


@dataclass(eq=False, slots=True)
class _Held:
    """A record, and what is in memory of it."""

    plan: ParameterRecord
    key: RecordKey
    state: _State = _State.STORED
    lease: Lease | None = None
    values: list[torch.Tensor] = field(default_factory=list)
    """HERE: the values of each parameter, 1-D, in storages of their own."""
    checksums: list[int] = field(default_factory=list)
    """Of each parameter as last written."""
    pins: int = 0
    attached: int = 0
    """How often it was attached; the parameters see the values while this is not 0."""
    changed: bool = False
    """Known to be newer than what is stored."""
    resident: bool = False
    """Stays in the pool once it is there. What changes is written all the same."""

    @property
    def number(self) -> int:
        return self.plan.number

    def foreign_uses(self) -> bool:
        """Whether tensors that we do not know of share the memory. See [Note: when a buffer may go]."""
        ours = 3 if self.attached else 2  # `values`, the Python object of the storage, and the parameter
        return any(torch._C._storage_Use_Count(t.untyped_storage()._cdata) > ours for t in self.values)


class _PlaceHome:
    """Where the values of one parameter come from. See `evicted.Home`."""

    __slots__ = ("held", "place", "swapper")

    def __init__(self, swapper: ParameterSwapper, held: _Held, place: ParameterPlace) -> None:
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


class _ForwardHooks:
    """What is hooked to one module. The swapper lives as long as a module that has these hooks."""

    def __init__(self, swapper: ParameterSwapper, records: list[_Held]) -> None:
        self._swapper = swapper
        self.records = records

    def before(self, module: torch.nn.Module, args: Any) -> None:
        # In training this class leaves its parameters to the modules that own them.
        alone = module.training and isinstance(module, torch.nn.TransformerEncoderLayer)
        self._swapper._enter(module, [] if alone else self.records)

    def after(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._swapper._leave(module)

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_copy()


class _Forward:
    """The `forward` of a module that, when it or one below it has hooks, takes another path with other bits."""

    def __init__(self, module: torch.nn.Module, hooks: _ForwardHooks) -> None:
        self._module = weakref.ref(module)
        self._hooks = hooks
        self._former = vars(module).get("forward")
        vars(module)["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None
        self._hooks.before(module, args)
        try:
            return self._former(*args, **kwargs) if self._former else type(module).forward(module, *args, **kwargs)
        finally:
            self._hooks.after(module, args, None)

    def remove(self) -> None:
        """Undo. Idempotent."""
        module = self._module()
        if module is None or vars(module).get("forward") is not self:
            return
        del vars(module)["forward"]
        if self._former is not None:
            vars(module)["forward"] = self._former

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_copy()


@dataclass(frozen=True, slots=True)
class _Packed:
    """A tensor that autograd saved, as a place in a record."""

    swapper: weakref.ref[ParameterSwapper]
    held: _Held
    index: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    storage_offset: int
    version: int


class _Hollow(torch.Tensor):
    """Looks like a tensor that was saved, and knows where its values are."""

    packed: _Packed

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Detached it is itself; of anything else the result is a plain tensor."""
        if func is torch.Tensor.detach:
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class ParameterSwapper:
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
        resident = _first_of(records, resident_bytes)
        needed, why = _least_bytes(model, records, resident, step_in_backward)
        if needed > budget_bytes:
            raise ConfigError(
                f"pool_bytes: {format_bytes(budget_bytes)} are left for parameters, and {why} are needed; set "
                f"pool_bytes to at least {pool.capacity_bytes + needed - budget_bytes}"
            )
        self.metrics = Metrics()
        self._pool = pool
        self._store = store
        self._budget_bytes = max(needed, budget_bytes - leave_bytes)
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._all = [
            _Held(record, RecordKey(owner, "param", record.number), resident=record in resident) for record in records
        ]
        self._held_bytes = 0
        self._dropped: list[AnyTransfer] = []
        self._threads = threading.local()
        self._awaiting: list[_Held] = []  # attached until their gradient is accumulated
        self._model = weakref.ref(model)
        self._hooks: list[torch.utils.hooks.RemovableHandle | _Forward] = []
        self._forward_hooks: list[_ForwardHooks] = []
        self._closed = False
        count = len(records)
        forward = [Use("forward", i) for i in range(count)]
        backward = [Use("backward", i) for i in reversed(range(count))]
        self._order = Order([*forward, *backward, *(Use("step", i) for i in range(count))])
        self._home: dict[torch.nn.Parameter, _Held] = {}
        self._lasting = LastingCopies(store)
        self._former: dict[torch.nn.Parameter, Home] = {}  # who had them, until all are taken over
        for name, reason in self.stays.items():
            log.warning("parameter %s stays in memory: %s", name, reason)
        store.plan({held.key: held.plan.file_bytes for held in self._all})
        pool.add_reclaimer(self._reclaim)
        _living.add(self)
        try:
            for held in self._all:
                self._adopt(held)
            self._install(model)
        except BaseException:
            self._give_everything_back()
            raise
        self._finalizer = weakref.finalize(self, _finalize, self._all, self._dropped, store, release, self._pid)
        formers, self._former = self._former, {}
        for parameter, former in formers.items():
            former.surrender(parameter)

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
                if held.state is _State.HERE and self._is_newer(held):
                    self._write(held)
            for held in self._all:
                self._settle_write(held)

    @contextmanager
    def present(self, records: Iterable[_Held], phase: str = "") -> Iterator[None]:
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
    def _used(self, records: Iterable[_Held]) -> Iterator[None]:
        """As `present`, for an operation outside of what is hooked: autograd would save the parameter itself."""
        wanted = list(records)
        parameters = [p for held in wanted for p in _parameters(held)]
        if _in_transform():
            _refuse_in_transform(parameters)
        with self.present(wanted), self._saving_places(parameters) or contextlib.nullcontext():
            yield

    @contextmanager
    def _gathered(self, records: Iterable[_Held]) -> Iterator[None]:
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

    def records_of(self, parameters: Iterable[torch.nn.Parameter]) -> list[_Held]:
        """The records that hold `parameters`, each once; those that stay in memory have none."""
        return list(dict.fromkeys(self._home[p] for p in parameters if p in self._home))

    @contextmanager
    def stepping(self, parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
        """Within it `parameters` have their values and are changed; afterwards they are written behind."""
        records = self.records_of(parameters)
        with self.present(records, "step"):
            with self._lock:
                for held in records:
                    self._settle_write(held)
                    held.changed = True
            yield

    def staying(
        self, parameters: Iterable[torch.nn.Parameter], following: Iterable[torch.nn.Parameter]
    ) -> contextlib.AbstractContextManager[None]:
        """Within it the records stay that hold some of `parameters`, which are there, and some of `following`."""
        here = set(self.records_of(parameters))
        return self.present([held for held in self.records_of(following) if held in here], "step")

    def end_round(self) -> None:
        """A step is over: the order of use since the last one is what to expect until the next one."""
        with self._lock:
            self._order.end_round()

    def close(self, *, keep_values: bool = False) -> None:
        """Undo everything: remove the hooks, delete the files, give the memory back. Idempotent.

        Args:
            keep_values: bring all parameters back into memory of their own; else their values are gone, and any use of
                them raises.

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
            self._closed = True
            for hook in self._hooks:
                hook.remove()
            if (model := self._model()) is not None and vars(model).get("swapper") is self:
                object.__delattr__(model, "swapper")
            self._finalizer()

    # --- Taking over the model -------------------------------------------------------------------------------------

    def _adopt(self, held: _Held) -> None:
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

    def _fill(self, held: _Held) -> None:
        """Copy the values of a record into a buffer for it. After an exception it has none."""
        self._make_room(held)
        assert held.lease is not None
        header = held.plan.layout.header(0)
        held.lease.tensor[: len(header)].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        self._open(held)
        held.pins += 1
        try:
            for place, values in zip(held.plan.places, held.values, strict=True):
                values.as_strided(place.shape, place.stride).copy_(place.parameter.detach())
        except BaseException:
            self._release(held)
            raise
        finally:
            held.pins -= 1

    def _restore_values(self, held: _Held) -> None:
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
        _finalize(self._all, self._dropped, self._store, lambda: None, self._pid)

    def _install(self, model: torch.nn.Module) -> None:
        wanted = dict.fromkeys(module for _, module in modules_with_parameters(model))
        wanted.setdefault(model, None)
        layers = [module for module in model.modules() if isinstance(module, torch.nn.TransformerEncoderLayer)]
        wanted.update(dict.fromkeys(layers))
        without_hooks = {module for layer in layers for module in layer.modules()}
        for module in wanted:
            if isinstance(module, torch.jit.ScriptModule):  # Its parameters stay, and it takes no hooks.
                continue
            hooks = _ForwardHooks(self, self.records_of(_used_by(module)))
            self._forward_hooks.append(hooks)
            if module in without_hooks:
                self._hooks.append(_Forward(module, hooks))
                continue
            self._hooks.append(module.register_forward_pre_hook(hooks.before, prepend=True))
            self._hooks.append(module.register_forward_hook(hooks.after, always_call=True))
        for held in self._all:
            for place in held.plan.places:
                if place.parameter.requires_grad and not _is_contiguous(place):
                    self._watch_gradient(held, place.parameter)

    def _watch_gradient(self, held: _Held, parameter: torch.nn.Parameter) -> None:
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

    def _attach_all(self, records: Sequence[_Held], phase: str) -> None:
        """Bring `records` and attach them: all, or after an exception none."""
        attached = 0
        for held in records:
            held.pins += 1
        try:
            for held in records:
                self._bring(held, phase)
            for held in records:
                attached += 1
                self._attach(held)
        except BaseException:
            for held in records[:attached]:
                self._detach(held)
            for held in records:
                held.pins -= 1
            raise

    def _detach_all(self, records: Sequence[_Held]) -> None:
        if self._closed:
            return
        with self._lock, contextlib.ExitStack() as all_of_them:
            for held in records:
                all_of_them.callback(self._let_go, held)

    def _let_go(self, held: _Held) -> None:
        try:
            self._detach(held)
        finally:
            held.pins -= 1

    def _enter(self, module: torch.nn.Module, records: list[_Held]) -> None:
        self._check_open()
        if torch.compiler.is_compiling():
            raise SwapError("torch.compile of a model whose parameters are swapped is not supported; do not compile it")
        running = self._running_here()
        if module is self._model() and (running or (self._awaiting and torch._C._current_graph_task_id() == -1)):
            self._unwind(running)  # A forward that Ctrl-C cut off did not leave: torch calls no hooks then.
        if _in_transform():
            _refuse_in_transform(_used_by(module))
            records = []  # Called by functional_call, with other values.
        with self._lock:
            self._attach_all(records, _phase())
        try:
            hooks = self._saving_places(module._parameters.values())
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

    def _running_here(self) -> list[tuple[torch.nn.Module, list[_Held], Any]]:
        """The forwards that this thread is in, the innermost last."""
        if not hasattr(self._threads, "running"):
            self._threads.running = []
        running: list[tuple[torch.nn.Module, list[_Held], Any]] = self._threads.running
        return running

    def _unwind(self, running: list[tuple[torch.nn.Module, list[_Held], Any]]) -> None:
        while running:
            self._leave(running[0][0])
        with self._lock:
            awaiting, self._awaiting = self._awaiting, []
            self._detach_all(awaiting)

    def _attach(self, held: _Held) -> None:
        held.attached += 1
        if held.attached == 1:
            self.metrics.begin_use(held.key)
            for place, values in zip(held.plan.places, held.values, strict=True):
                restore(place.parameter, values.as_strided(place.shape, place.stride))

    def _detach(self, held: _Held) -> None:
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
                        f"{tuple(p.shape)} x {p.dtype} on {p.device}; convert or move the model before swapper.offload"
                    )
                    restore(p, values.as_strided(place.shape, place.stride))
            evict(p, p.__dict__["_swapper_home"])
        if held.changed:
            self._write(held)
        if refused:
            raise SwapError(refused)

    def _lasting_copy(self, held: _Held, place: ParameterPlace) -> torch.Tensor:
        index = held.plan.places.index(place)

        def fill(copy: torch.Tensor) -> None:
            with self.present([held]), torch.no_grad():
                copy.copy_(held.values[index].as_strided(place.shape, place.stride))

        self._check_open()
        with self._lock:
            now = codec.checksum(held.values[index]) if held.state is _State.HERE else held.checksums[index]
            return self._lasting.get(place, now, fill)

    def _lets_go(self, held: _Held) -> bool:
        """Whether a record is given up whose parameter was given data that do not fit it."""
        return False

    def _surrender(self, held: _Held, parameter: torch.nn.Parameter) -> None:
        """Another swapper took over `parameter`."""
        raise AssertionError("only a nursery gives up parameters")

    def _stay(self, held: _Held, parameter: torch.nn.Parameter) -> None:
        """Let `parameter` be an ordinary one, where its values are now."""
        raise AssertionError("only a nursery gives up parameters")

    def _deepcopy(self, parameter: torch.nn.Parameter, memo: dict[int, Any]) -> torch.nn.Parameter:
        refuse_copy()

    # --- What autograd saves ---------------------------------------------------------------------------------------

    def _saving_places(self, used: Iterable[object]) -> torch.autograd.graph.saved_tensors_hooks | None:
        """Within it autograd saves parameters as places; None if nothing is saved, or others decide on it.

        Args:
            used: what is used within it; others than our parameters are of no interest.

        Raises:
            SwapError: nobody may decide, and autograd would save our parameters themselves.
        """
        if not torch.is_grad_enabled():
            return None
        if (others := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
            return self._with_checkpoint(*others) if others[0].__module__ == "torch.utils.checkpoint" else None
        if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
            if any(home_of(item) is not None for item in used):
                raise SwapError(
                    "swapped parameters are used where saved tensors hooks are disabled, and autograd could not let "
                    "them go"
                )
            return None
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _with_checkpoint(
        self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
    ) -> torch.autograd.graph.saved_tensors_hooks:
        """The hooks of activation checkpointing, which keep what is recomputed until backward has used it, as places.

        In forward they keep nothing. What they keep of a parameter when they recompute is a tensor of its shape without
        values that knows the place, and it comes out of their unpacking as the object that went in.
        """
        recomputes = "_recomputation_hook" in pack.__qualname__

        def pack_places(tensor: torch.Tensor) -> Any:
            packed = self._pack(tensor) if recomputes else tensor
            if not isinstance(packed, _Packed):
                return pack(tensor)
            hollow = torch.full((), float("nan"), dtype=tensor.dtype).expand(tensor.shape).as_subclass(_Hollow)
            hollow.packed = packed
            return pack(hollow)

        def unpack_places(saved: Any) -> torch.Tensor:
            tensor = unpack(saved)
            return self._unpack(tensor.packed) if isinstance(tensor, _Hollow) else tensor

        return torch.autograd.graph.saved_tensors_hooks(pack_places, unpack_places)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Packed:
        # Not the tensor itself: an output that its own graph holds would live as long as nobody calls backward.
        itself = tensor if tensor.grad_fn is None else tensor.detach()
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return itself
        found = _by_address.get(tensor.untyped_storage().data_ptr())
        if found is None:
            return itself
        swapper, held, index = found
        version = held.plan.places[index].parameter._version
        offset = int(tensor.storage_offset())
        return _Packed(swapper, held, index, tensor.dtype, tensor.size(), tensor.stride(), offset, version)

    def _unpack(self, packed: torch.Tensor | _Packed) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        swapper = packed.swapper()
        if swapper is None:
            raise SwapError("the values of a parameter are gone that backward needs: its swapper was closed")
        return swapper._unpack_own(packed)

    def _unpack_own(self, packed: _Packed) -> torch.Tensor:
        held = packed.held
        place = held.plan.places[packed.index]
        if place.parameter._version != packed.version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"parameter {place.name} is at version {place.parameter._version}; expected version {packed.version} "
                "instead"
            )
        self._check_open()
        with self._lock:
            held.pins += 1
            try:
                self._bring(held, "backward")
                values = held.values[packed.index]
                view = values if packed.dtype == place.dtype else values.view(packed.dtype)
                return view.as_strided(packed.size, packed.stride, packed.storage_offset)
            finally:
                held.pins -= 1

    # --- Records in and out ----------------------------------------------------------------------------------------

    def _bring(self, held: _Held, phase: str) -> None:
        """Have `held`, which is pinned, HERE. Starts to read what will be used after it."""
        self._order.note(Use(phase, held.number))
        if held.state is _State.STORED:
            self._make_room(held)
            self._read(held)
        self._read_ahead()
        if held.state is _State.ARRIVING:
            assert held.lease is not None
            assert held.lease.transfer is not None
            if held.lease.transfer.done():
                self.metrics.hits += 1
            try:
                with self.metrics.span("swapper.wait_read", "wait_read_s"):
                    held.lease.transfer.wait()
            except SwapIOError:
                self._release(held)
                raise
            held.lease.transfer = None
            self._open(held)
        elif held.lease is not None:
            self.metrics.hits += 1

    def _read(self, held: _Held) -> None:
        assert held.lease is not None
        try:
            held.lease.transfer = self._store.read(held.key, held.lease)
        except BaseException:
            self._release(held)
            raise
        held.state = _State.ARRIVING
        self.metrics.count_read(held.key, held.plan.file_bytes, held.lease.transfer)

    def _open(self, held: _Held) -> None:
        """Make the views of a buffer whose bytes are there."""
        lease = held.lease
        assert lease is not None
        held.values = []
        for index, place in enumerate(held.plan.places):
            with torch.inference_mode(False):  # They outlive that mode.
                values = lease.own_view(place.offset_bytes, place.numel, place.dtype)
            held.values.append(values)
            _by_address[values.data_ptr()] = (weakref.ref(self), held, index)
        if held.state is _State.ARRIVING:
            for place, values in zip(held.plan.places, held.values, strict=True):
                if place.offset_bytes != place.file_offset_bytes:
                    stored = _in_file(lease, place)
                    values.as_strided(place.shape, place.stride).copy_(stored.view(place.shape))
        held.state = _State.HERE

    def _is_newer(self, held: _Held) -> bool:
        """Whether the values differ from what is stored. See [Note: when a buffer may go]."""
        return held.changed or [codec.checksum(values) for values in held.values] != held.checksums

    def _write(self, held: _Held) -> None:
        """Start writing a record that is HERE."""
        self._settle_write(held)
        lease = held.lease
        assert lease is not None
        for place, values in zip(held.plan.places, held.values, strict=True):
            if place.offset_bytes != place.file_offset_bytes:
                _in_file(lease, place).view(place.shape).copy_(values.as_strided(place.shape, place.stride))
        checksums = [codec.checksum(values) for values in held.values]
        lease.transfer = self._store.write(held.key, lease, held.plan.file_bytes)
        held.checksums, held.changed = checksums, False
        self.metrics.count_write(held.key, held.plan.file_bytes, lease.transfer)

    def _settle_write(self, held: _Held) -> None:
        """Wait for the write of a record that is HERE, if one is in flight.

        Raises:
            SwapIOError: it failed. The values are still in memory, and will be written again.
        """
        if held.state is not _State.HERE or held.lease is None or held.lease.transfer is None:
            return
        try:
            with self.metrics.span("swapper.wait_write", "wait_write_s"):
                held.lease.transfer.wait()
        except SwapIOError:
            held.changed = True
            raise
        finally:
            if held.lease.transfer.done():
                held.lease.transfer = None

    def _read_ahead(self) -> None:
        """Start reading what will be used next, as far as the budget goes."""
        looked = set()
        for number in self._order.upcoming():
            if number in looked:
                continue
            looked.add(number)
            held = self._all[number]
            if held.state is not _State.STORED:
                continue
            while self._held_bytes + held.plan.length_bytes > self._budget_bytes:
                victim = self._victim(idle_only=True)
                # A victim that is needed sooner than what would take its place is not one.
                if victim is None or self._order.distance(victim.number) <= self._order.distance(number):
                    return
                self._evict(victim)
            lease = self._pool.try_acquire(held.plan.length_bytes)
            if lease is None:
                return
            held.lease = lease
            self._held_bytes += lease.length_bytes
            self._read(held)

    def _make_room(self, held: _Held) -> None:
        """Get a buffer for a record that is STORED."""
        length = held.plan.length_bytes
        while True:
            if self._held_bytes + length <= self._budget_bytes:
                lease = self._pool.try_acquire(length)
                if lease is not None:
                    break
            victim = self._victim(idle_only=True) or self._victim(idle_only=False)
            if victim is not None:
                self._evict(victim)
                continue
            if self._held_bytes + length <= self._budget_bytes:
                with self.metrics.span("swapper.wait_pool"):
                    lease = self._pool.acquire(length)
                break
            kept = [other for other in self._all if other.state is _State.HERE]
            raise PoolExhausted(
                f"no room for {format_bytes(length)} of parameters: {format_bytes(self._held_bytes)} of "
                f"{format_bytes(self._budget_bytes)} are held by {len(kept)} records that are in use at once or of "
                f"which user code keeps views; raise pool_bytes, or do not keep views of parameters{_about_ddp()}"
            )
        held.lease = lease
        self._held_bytes += lease.length_bytes

    def _victim(self, *, idle_only: bool) -> _Held | None:
        """The record that is needed last among those that may go."""
        best, best_distance = None, -1
        for held in self._all:
            if held.lease is None or held.pins or held.attached or held.resident:
                continue
            if held.state is _State.HERE:
                transfer = held.lease.transfer if held.lease is not None else None
                if idle_only and transfer is not None and not transfer.done():
                    continue
                if held.foreign_uses():
                    continue
            distance = self._order.distance(held.number)
            if distance > best_distance:
                best, best_distance = held, distance
        return best

    def _evict(self, held: _Held) -> None:
        """Give up the buffer of a record that nobody uses; what is newer in it is written first."""
        if held.state is _State.HERE:
            self._settle_write(held)
            if self._is_newer(held):
                self._write(held)
                self._settle_write(held)
        self._release(held)

    def _release(self, held: _Held) -> None:
        lease = held.lease
        assert lease is not None
        if held.state is _State.ARRIVING and lease.transfer is not None:
            self._dropped.append(lease.transfer)
        for transfer in [transfer for transfer in self._dropped if transfer.done()]:
            self._dropped.remove(transfer)
            with contextlib.suppress(SwapIOError):  # Nobody wanted what it read.
                transfer.wait()
        for values in held.values:
            _by_address.pop(values.data_ptr(), None)
        held.values = []
        self._held_bytes -= lease.length_bytes
        held.lease, held.state = None, _State.STORED
        lease.release()

    def _reclaim(self) -> bool:
        """Give a buffer back to a pool that is short."""
        if self._closed or not self._lock.acquire(blocking=False):
            return False
        try:
            victim = self._victim(idle_only=True) or self._victim(idle_only=False)
            if victim is None:
                return False
            self._evict(victim)
            return True
        finally:
            self._lock.release()

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise SwapError(
                "a model whose parameters are swapped was used in a forked process; its files and buffers "
                "belong to the parent"
            )
        if self._closed:
            raise SwapError("the swapper of this model was closed, and the values of its parameters are gone")


def _evict_in_child() -> None:
    """The pool does not exist in a forked child: a parameter that was in use there would be a crash."""
    for swapper in _living:
        for held in swapper._all:
            if held.attached:
                for place in held.plan.places:
                    if (home := home_of(place.parameter)) is not None:
                        evict(place.parameter, home)


os.register_at_fork(after_in_child=_evict_in_child)


def _finalize(
    records: list[_Held], dropped: list[AnyTransfer], store: TensorStore, release: Callable[[], None], pid: int
) -> None:
    """Wait for what is in flight, delete the files and give the memory back."""
    if os.getpid() != pid:
        return
    for held in records:
        if held.lease is None:
            continue
        if held.lease.transfer is not None:
            try:
                held.lease.transfer.wait()
            except SwapIOError as error:
                # Without a traceback: this may run in the middle of anything, where formatting one is not safe.
                if held.state is _State.HERE:
                    log.warning("a write of parameters had failed, and the model is gone: %r", error)
            held.lease.transfer = None
        if held.foreign_uses():
            held.lease.abandon()
        else:
            held.lease.release()
        for values in held.values:
            _by_address.pop(values.data_ptr(), None)
        held.values = []
        held.lease = None
    for transfer in dropped:
        with contextlib.suppress(SwapIOError):
            transfer.wait()
    dropped.clear()
    for held in records:
        store.forget(held.key)
    release()


def _parameters(held: _Held) -> list[torch.nn.Parameter]:
    return [place.parameter for place in held.plan.places]


def _in_file(lease: Lease, place: ParameterPlace) -> torch.Tensor:
    """The values of a parameter where the file has them, in the order of indices, 1-D."""
    data = lease.tensor[place.file_offset_bytes : place.file_offset_bytes + place.length_bytes]
    if place.file_offset_bytes % place.dtype.itemsize == 0:
        return data.view(place.dtype)
    raise AssertionError("tensors of smaller items come after those of larger ones")


def _used_by(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """The parameters that the forward of `module` itself uses, as far as can be known before it runs."""
    whole = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)
    # These choose another kernel in evaluation if a parameter of a module below them is not an ordinary one.
    yield from module.parameters(recurse=isinstance(module, whole))


def _first_of(records: Iterable[ParameterRecord], resident_bytes: int) -> set[ParameterRecord]:
    """The first records that together take at most `resident_bytes`."""
    chosen: set[ParameterRecord] = set()
    for record in records:
        if resident_bytes < record.length_bytes:
            break
        resident_bytes -= record.length_bytes
        chosen.add(record)
    return chosen


def _least_bytes(
    model: torch.nn.Module, records: Sequence[ParameterRecord], resident: set[ParameterRecord], step_in_backward: bool
) -> tuple[int, str]:
    """What the pool must have for parameters, and the sum in words."""
    moving = [record for record in records if record not in resident]
    largest = max((record.length_bytes for record in moving), default=0)
    needed = 2 * largest
    why = f"2 x {format_bytes(largest)} (the largest record: one in use, one arriving)"
    together, name = _longest_together(model, moving)
    if together > needed:
        needed = together
        why = f"{format_bytes(together)} (what {name or 'the model'} uses itself, and the modules it runs in,)"
    if step_in_backward:
        needed += largest
        why += f" + {format_bytes(largest)} (stepped in backward)"
    if resident:
        kept_bytes = sum(record.length_bytes for record in resident)
        needed += kept_bytes
        why += f" + {format_bytes(kept_bytes)} kept resident"
    return needed, why


def _longest_together(model: torch.nn.Module, records: Iterable[ParameterRecord]) -> tuple[int, str]:
    """The most bytes of records that are there while a module runs inside others, and the name of that module."""
    record_of = {place.parameter: record for record in records for place in record.places}

    def walk(name: str, module: torch.nn.Module, outer: frozenset[ParameterRecord]) -> tuple[int, str]:
        used = outer | {record_of[p] for p in _used_by(module) if p in record_of}
        below = [walk(f"{name}.{key}".lstrip("."), child, used) for key, child in module.named_children()]
        return max([(sum(record.length_bytes for record in used), name), *below], key=lambda item: item[0])

    return walk("", model, frozenset())


def _is_contiguous(place: ParameterPlace) -> bool:
    return torch.empty_strided(place.shape, place.stride, device="meta").is_contiguous()


def _about_ddp() -> str:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return ""
    return (
        " (DistributedDataParallel keeps views of all while it synchronizes them: make it before swapper.offload, or "
        "with init_sync=False where all ranks start with the same values)"
    )


def _in_transform() -> bool:
    """Whether a transform of torch.func runs: what it sees are not tensors with memory."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _refuse_in_transform(used: Iterable[torch.Tensor]) -> None:
    for tensor in used:
        inner = tensor
        while torch._C._functorch.is_functorch_wrapped_tensor(inner):
            inner = torch._C._functorch.get_unwrapped(inner)
        if home_of(inner) is not None:
            raise SwapError(
                "a transform of torch.func uses swapped parameters, and could not let them go; call the model by "
                "torch.func.functional_call with copies of them"
            )


def _phase() -> str:
    return "backward" if torch._C._current_graph_task_id() != -1 else "forward"
