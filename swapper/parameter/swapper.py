"""`ParameterSwapper`: a model whose parameters are on disk and come when they are used."""

from __future__ import annotations

import contextlib
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from swapper.io.checksums import checksum
from swapper.io.devices import check_devices
from swapper.metrics import Moves, moves_of
from swapper.parameter.cache import Held, finalize
from swapper.parameter.held_on_device import HeldOnDevice
from swapper.parameter.kept_owners import forget_failed_backward
from swapper.parameter.owner import ParameterOwner
from swapper.parameter.records import DeviceRoom, ParameterPlan
from swapper.sizes import format_bytes
from swapper.storage.access_order import AccessOrder, Use
from swapper.storage.budget import PoolBudget
from swapper.storage.buffers import BufferPool
from swapper.storage.growing_pool import GrowingPool
from swapper.storage.spans import RecordStore
from swapper.storage.store import RecordKey, TensorStore
from swapper.tensors.attributes import PARTS
from swapper.tensors.evicted import evict, refuse_pickle, restore_for_good
from swapper.tensors.homes import home_of
from swapper.tensors.inner import has_own_class
from swapper.tensors.sharded import local_of

__all__ = ["ParameterSwapper"]

log = logging.getLogger(__name__)


class ParameterSwapper(ParameterOwner):
    """Keeps the parameters of `model` on disk, and brings each record in when it is used, ahead where it can.

    Args:
        model: its parameters are evicted, its modules hooked. Only a weak reference is kept.
        owner: number of this swapper among those of the process; part of every record's key.
        plan: of its parameters.
        budget_bytes: the most of the pool that records may hold; at least `plan.needs.least_bytes`.
        pool, store, release: as for `ParameterOwner`.
        room: what records may have of an accelerator; at least what one module uses.

    Attributes:
        made_with: for who has made this: the config.

    Raises:
        SwapIOError: the records could not be written. The model is as it was.
    """

    made_with: object = None
    _depth: int | None = None
    """The distance to which records are read ahead at the cost of others that could have stayed: see `AccessOrder`."""

    def __init__(
        self,
        model: torch.nn.Module,
        owner: int,
        plan: ParameterPlan,
        budget_bytes: int,
        pool: BufferPool | GrowingPool,
        store: RecordStore | None,
        release: Callable[[], None],
        room: DeviceRoom | None = None,
    ) -> None:
        self.plan = plan
        count = len(plan.records)
        evaluation = [Use("evaluation", i) for i in range(count)]
        forward = [Use("forward", i) for i in range(count)]
        backward = [Use("backward", i) for i in reversed(range(count))]
        step = [Use("step", i) for i in range(count)]
        order = AccessOrder([*evaluation, *forward, *backward, *step], start=count, depth=self._depth)
        make = Held if room is None else HeldOnDevice
        held = [make(r, RecordKey(owner, "param", r.number), resident=r in plan.resident) for r in plan.records]
        super().__init__(held, order, budget_bytes, pool, store, release, room)
        if self._tier is not None:
            self._tier.expect([*evaluation, *forward, *backward], start=count)
        self._model = weakref.ref(model, forget_failed_backward)  # That would keep this.
        if plan.summary:
            log.warning("%s\n  model.swapper.stays has the reason for each parameter", plan.summary)
        for each in self._all:
            if isinstance(each, HeldOnDevice):
                each.kept, each.stays = store is None, each.plan in plan.device_resident
        if store is not None:
            store.plan({held.key: held.plan.file_bytes for held in self._all})
        try:
            self._groups.take(model, self)
            for each in self._all:
                self._adopt(each)
                if each.plan.sharded:
                    self._groups.drop_flat()
                if store is None:  # Else memory of the host would have all values twice.
                    self._let_formers_go()
            self._install(model)
            self._begin()
        except BaseException:
            self._give_everything_back()
            raise
        self._let_formers_go()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refused: of a model that is copied with it `memo` of `copy.deepcopy` has None in place of this."""
        refuse_pickle()

    def _lets_go(self, held: Held, position: int, p: torch.Tensor, of_record: bool) -> bool:
        # It was given another shape, as by `resize_token_embeddings`, or dtype, as a module's are by `to(dtype)`. Other
        # devices are refused, and `to(dtype)` of the whole model, which memory may have no room for. So are slices of
        # itself, whose memory is the pool's, and another order in memory.
        location = held.plan.locations[position]
        before = f"{tuple(location.shape)} x {location.dtype}"
        given = f"{tuple(p.shape)} x {p.dtype}"
        parts = vars(p).get(PARTS)
        special = location.aliases or held.plan.sharded or (parts is not None and not parts.rows)
        if has_own_class(p):  # bitsandbytes has noted what it gives: too late to refuse it for a view.
            special = special or given != before or p.stride() != location.stride
            what = "other data while views of its former data were kept"
        else:
            special = special or given == before
            what = f"other data, {given} in place of {before}"
        if p.device != held.values[position].device or special or of_record or self._is_converted():
            return False
        vars(p).pop(PARTS, None)
        del self._home[p]
        location.given += 1
        restore_for_good(p, p.detach())
        self.stays[location.name] = f"it was given {what}"
        log.warning(
            "%s was given %s: from now on it is in memory (%s). To have it on the drive, %s",
            location.name,
            what,
            format_bytes(p.nbytes),
            "keep clones" if has_own_class(p) else "convert or resize it before swapper.offload",
        )
        return True

    def _is_converted(self) -> bool:
        """Return True if a caller is `Module._apply` of the whole model, as it is of `model.to(dtype)`."""
        frame, model = sys._getframe(1), self._model()
        apply = torch.nn.Module._apply.__code__
        while frame.f_code is not apply or frame.f_locals["self"] is not model:
            if frame.f_back is None:
                return False
            frame = frame.f_back
        return True

    def _let_formers_go(self) -> None:
        """Let the former owners forget the parameters that were taken over."""
        formers, self._former = self._former, {}
        keepers = [former.keeper for former in formers.values()]  # They live until all is taken over.
        parameters_of: dict[object, list[torch.Tensor]] = {}
        for parameter, former in formers.items():
            parameters_of.setdefault(former.owner, []).append(parameter)
        for parameters in parameters_of.values():
            formers[parameters[0]].forget(parameters)
        del keepers

    def _give_everything_back(self) -> None:
        """After a failed construction: the values of what was taken over are in the pool or on the drive.

        Records in the pool come first, and leave it: so there is room for the others, and nothing has to be written by
        a drive that may be what has failed.
        """
        for parameter, former in self._former.items():
            evict(parameter, former)
        with self._lock:
            self._cache.recover()
            in_pool = [held for held in self._all if self._cache.records.get(held.key) is not None]
            for held in dict.fromkeys([*in_pool, *self._all]):
                if any(self._is_taken(location.parameter) for location in held.plan.locations):
                    self._restore_taken(held)
                self._cache.forget(held.key)
        self._closed = True
        self._remove_hooks()
        finalize(self._all, self._caches, self._store, lambda: None, self._pid)

    def _is_taken(self, parameter: torch.Tensor) -> bool:
        """True if nobody else has the values of `parameter`."""
        return parameter in self._home and parameter not in self._former

    def _restore_taken(self, held: Held) -> None:
        self._cache.require(held.key, held.length_bytes)
        lease = self._cache.fetch(held.key)
        if not held.opened:
            held.open(lease, self, arrived=True)
        for location, values in zip(held.plan.locations, held.opened, strict=True):
            if self._is_taken(parameter := location.parameter):
                copy = torch.empty_strided(
                    location.shape, location.stride, dtype=location.dtype, device=parameter.device
                )
                copy.copy_(location.view(values))
                for tensor in location.tensors:
                    restore_for_good(tensor, copy)

    @property
    def stays(self) -> dict[str, str]:
        """The parameters that stay in memory, by name, and why."""
        return self.plan.stays

    def stats(self) -> Moves:
        """The transfers of parameters since the model was offloaded; those of weights that stay in files too."""
        return moves_of(self.metrics)

    def share_pool(self, budget: PoolBudget) -> None:
        """Others need the pool, too: hold at most what `budget` shares out, no less than `plan.needs.least_bytes`."""
        if self._store is not None:
            self._cache.limit_bytes = self._budget_bytes = budget.shares().parameters
            self._policy.budget = budget

    def flush(self) -> None:
        """Write what changed and wait until it is on disk.

        Raises:
            SwapIOError: a write failed, or a device.
        """
        self._check_open()
        with self._lock:
            for held in self._all:
                if (tier := self._tier_of(held)) is not None:
                    tier.bring_down(held)
                held.write_newer(self._cache)
            for held in self._all:
                for cache in self._caches:
                    cache.wait(held.key)
            check_devices()

    def rest(self) -> None:
        """As `flush`, when the model is not to be used soon: gives the memory of an accelerator back.

        Raises:
            SwapIOError: a write failed.
        """
        self.flush()
        with self._lock:
            if self._tier is not None:
                self._tier.rest()

    def flushed_records(self) -> list[Held]:
        """The records that have the values of all their parameters, in files of the run. None without a `store`.

        Their checksums are known; of those that an accelerator has written past the host, as they are read for it.

        Raises:
            SwapIOError: a write failed, or such a read.
        """
        self.flush()
        complete = [
            held
            for held in (self._all if self.store is not None else ())
            if all(self._home.get(p) is held and home_of(p) for p in (each.parameter for each in held.plan.locations))
        ]
        with self._lock:
            for held in complete:
                if self._tier is not None and not held.checksums:
                    with self._tier.reading(held):
                        held.checksums = [checksum(values) for values in held.opened]
        return complete

    @property
    def store(self) -> TensorStore | None:
        """The store of the records, in files of the run; None if the pool keeps them, or files of others."""
        return self._store if isinstance(self._store, TensorStore) else None

    def records_of(self, parameters: Iterable[torch.Tensor]) -> list[Held]:
        """The records that hold `parameters`, each once; those that stay in memory have none."""
        found = map(self._home.get, map(local_of, parameters))
        return list(dict.fromkeys(held for held in found if held is not None))

    @contextmanager
    def stepping(
        self, parameters: Iterable[torch.nn.Parameter], device: torch.device
    ) -> Iterator[Mapping[torch.nn.Parameter, torch.Tensor]]:
        """Within it `parameters` have their values and are changed; afterwards they are written behind.

        Args:
            parameters: those that are not swapped are passed over.
            device: where they are stepped: their own, or the CPU.

        Returns:
            Of parameters on an accelerator that are stepped on the CPU: their values there, tensors of the parameter's
            shape and strides in the pool; of a DTensor, those of its local tensor. All others have their values
            themselves.
        """
        parameters = list(parameters)
        parts = self.parts_with(parameters)
        if not parts:  # All of them are in memory, as after `close(keep_values=True)`.
            yield {}
            return
        if self._tier is not None and device != self._tier.device:
            with self._holding(parts, "step", on_host=True):
                located = [
                    (held.plan.locations[position], held.opened[position])
                    for held, positions in parts
                    for position in positions
                ]
                views = {location.parameter: location.view(values) for location, values in located}
                yield {p: views[local_of(p)] for p in parameters if local_of(p) in views}
            return
        try:
            with self._holding(parts, "step"):
                with self._lock:
                    for held, _ in parts:
                        held.note_change()
                yield {}
        finally:
            for held, _ in parts:
                held.step_checksums.clear()

    def note_stepped(self, parameter: torch.nn.Parameter, whole: int | None) -> None:
        """Within `stepping`: all of `parameter` is stepped, and `whole` the checksum of its bytes, if that is known.

        Of those that are written before it ends, no checksum is taken once more.
        """
        if whole is not None and self._tier is None:
            for held, positions in self.parts_with([parameter]):
                held.step_checksums.update(dict.fromkeys(positions, whole))

    def written_late(self, parameters: Iterable[torch.nn.Parameter]) -> contextlib.AbstractContextManager[None]:
        """Write records that hold some of `parameters` only if their memory is needed, else when this is left."""
        return self._written_late(self.records_of(parameters))

    def staying(
        self, parameters: Iterable[torch.nn.Parameter], following: Iterable[torch.nn.Parameter]
    ) -> contextlib.AbstractContextManager[None]:
        """Keep the records within it that hold some of `parameters`, which are attached, and some of `following`."""
        here = set(self.records_of(parameters))
        staying = [held for held in self.records_of(following) if held in here]
        return self._holding([(held, ()) for held in staying], "step") if staying else contextlib.nullcontext()
