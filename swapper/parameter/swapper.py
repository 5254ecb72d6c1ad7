"""`ParameterSwapper`: a model whose parameters are on disk and come when they are used."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from swapper.errors import ConfigError
from swapper.parameter.access_order import Order, Use
from swapper.parameter.cache import Held, State, finalize
from swapper.parameter.owner import ParameterOwner, parts_of
from swapper.parameter.records import (
    ParameterRecord,
    first_of,
    least_bytes,
    plan_parameter_records,
    summary_of_what_stays,
    where,
)
from swapper.sizes import format_bytes
from swapper.storage.buffers import BufferPool
from swapper.storage.store import RecordKey, TensorStore
from swapper.tensors.evicted import evict, restore_for_good
from swapper.tensors.homes import home_of

__all__ = ["ParameterSwapper"]

log = logging.getLogger(__name__)


class ParameterSwapper(ParameterOwner):
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
        count = len(records)
        evaluation = [Use("evaluation", i) for i in range(count)]
        forward = [Use("forward", i) for i in range(count)]
        backward = [Use("backward", i) for i in reversed(range(count))]
        step = [Use("step", i) for i in range(count)]
        held = [
            Held(record, RecordKey(owner, "param", record.number), resident=record in resident) for record in records
        ]
        super().__init__(
            held,
            Order([*evaluation, *forward, *backward, *step], start=count),
            self._budget(budget_bytes, leave_bytes, pool),
            pool,
            store,
            release,
        )
        self._model = weakref.ref(model)
        if summary := summary_of_what_stays(model, records, self.stays):
            log.warning("%s\n  model.swapper.stays has the reason for each parameter", summary)
        store.plan({held.key: held.plan.file_bytes for held in self._all})
        try:
            for each in self._all:
                self._adopt(each)
            self._install(model)
            self._begin()
        except BaseException:
            self._give_everything_back()
            raise
        formers, self._former = self._former, {}
        keepers = [former.keeper for former in formers.values()]  # They live until all is taken over.
        parameters_of: dict[object, list[torch.nn.Parameter]] = {}
        for parameter, former in formers.items():
            parameters_of.setdefault(former.owner, []).append(parameter)
        for parameters in parameters_of.values():
            formers[parameters[0]].forget(parameters)
        del keepers

    def _give_everything_back(self) -> None:
        """After a failed construction: the values of what was taken over are in the pool or on the drive."""
        for parameter, former in self._former.items():
            evict(parameter, former)
        for held in self._all:
            places = held.plan.places
            mine = [i for i, p in enumerate(places) if p.parameter in self._home and p.parameter not in self._former]
            if mine:
                with self._lock:
                    held.holds.add(self)
                    self._bring(held, "forward")
                    for place, values in [(places[i], held.values[i]) for i in mine]:
                        copy = values.as_strided(place.shape, place.stride).clone(memory_format=torch.preserve_format)
                        restore_for_good(place.parameter, copy)
        self._closed = True
        self._remove_hooks()
        finalize(self._all, self._dropped, self._store, lambda: None, self._pid)

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

    def records_of(self, parameters: Iterable[torch.nn.Parameter]) -> list[Held]:
        """The records that hold `parameters`, each once; those that stay in memory have none."""
        return list(dict.fromkeys(self._home[p] for p in parameters if p in self._home))

    @contextmanager
    def stepping(self, parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
        """Within it `parameters` have their values and are changed; afterwards they are written behind."""
        parts = parts_of(home_of(p) for p in parameters if p in self._home)
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
