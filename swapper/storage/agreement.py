"""`agreed`: what several processes do together succeeds on all of them, or fails on all.

A rank that raises leaves the others in their next collective, where they wait until it times out. So each tells the
others how it went before any of them goes on.
"""

from __future__ import annotations

import copy
import logging
import pickle
import secrets
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from swapper.errors import ConfigError, SwapError, SwapIOError, renewed
from swapper.io.devices import on_device
from swapper.io.host_memory import bytes_of
from swapper.tensors.collectives import is_distributed

__all__ = [
    "agreed",
    "exchanged",
    "gathered_by_first",
    "leave_note",
    "notes_of",
    "of_all",
    "process_group",
    "rank_count",
    "rank_of_process",
    "tells_on_host",
]

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_within = threading.local()
"""`another`: the thread is within `agreed`."""
_ranks: tuple[Any, list[int]] | None = None
"""The process group that `process_group` was given, and its members' ranks; None: all processes. Of all threads, as
autograd's on a device agree too."""

_gloos: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Of each default group, which is another after `destroy_process_group` and `init_process_group`."""

WARN_AFTER_S = 30.0
"""A rank that waits longer than this for the others says so."""

_waits: dict[int, float] = {}
"""The threads that wait for other ranks and have not said so yet, and since when."""
_watcher: threading.Thread | None = None

ANSWER_S = 10.0
"""The store of `torch.distributed` that has said nothing for so long has no notes."""
_asking: threading.Thread | None = None
"""The thread that has asked it last."""


@dataclass(frozen=True)
class _Verdict:
    """The error of a rank, or None. A class of its own, so that ranks that are at different calls see it."""

    error: Exception | None


@contextmanager
def process_group(group: torch.distributed.ProcessGroup | None) -> Iterator[None]:
    """Make calls of swapper together with the processes of `group`, in place of all of `torch.distributed`.

    Some calls wait for each other's processes, so that what fails on one is raised on all: the first use of a config
    with "nvme" in it, all of what is sharded, and checkpoints that ranks save or load together. Where not all processes
    of the default group make them, those that do make them within this:

        with swapper.process_group(trainers):
            swapper.offload(model, optimizer, config)

    So with `offload`, `wrap_optimizer`, `from_pretrained`, `backward`, `step`, clipping, `load_state_dict`,
    `save_checkpoint`, `load_checkpoint`. It holds in all threads of the process.

    Args:
        group: of `torch.distributed.new_group` or a mesh, with this process; None is the default group. One of this
            process alone is `torch.distributed.new_group([rank], use_local_synchronization=True)`.

    Raises:
        ConfigError: this process is not in `group`; or that is no group, or one that was destroyed.
    """
    global _ranks
    given: object = group
    if given is not None and given is torch.distributed.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError("process_group: this process is not in the group; leave the calls to those that are")
    try:
        ranks = None if group is None else (group, torch.distributed.get_process_group_ranks(group))
    except (KeyError, TypeError):
        raise ConfigError(
            f"process_group: {group!r} is no process group of this program, or was destroyed; give one of "
            "torch.distributed.new_group or mesh.get_group(), or None for the default group"
        ) from None
    before, _ranks = _ranks, ranks
    try:
        yield
    finally:
        _ranks = before


def _members() -> tuple[Any, Sequence[int]]:
    """The group that calls are made in, None for all processes, and its ranks in the default group."""
    count = torch.distributed.get_world_size() if is_distributed() else 1
    return _ranks or (None, range(count))


def _all_gathered(value: _T, group: Any, count: int) -> list[_T]:
    """As `torch.distributed.all_gather_object`. None of the group: of all processes."""
    values: list[Any] = [None] * count
    gloo = _gloo_of_all() if group is None else None
    if gloo is None:
        with _on_device_of(group):
            torch.distributed.all_gather_object(values, value, group)
        return values
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in values]
    gloo.allgather([lengths], [torch.tensor([data.numel()], dtype=torch.int64, device="cpu")]).wait()
    longest = max(map(int, lengths))
    given = torch.zeros(longest, dtype=torch.uint8, device="cpu")
    given[: data.numel()] = data
    found = [torch.empty_like(given) for _ in values]
    gloo.allgather([found], [given]).wait()
    return [pickle.loads(bytes_of(each[: int(length)])) for each, length in zip(found, lengths, strict=True)]


def _on_device_of(group: Any) -> AbstractContextManager[None]:
    """Within it the device that `init_process_group` was given is the current one: objects go by way of that.

    In a group for devices alone torch takes the current one, which on each rank is the first if nobody has set it.
    """
    groups = (group, torch.distributed.group.WORLD)
    bound = next(filter(None, (getattr(each, "bound_device_id", None) for each in groups)), None)
    return nullcontext() if bound is None else on_device(bound)


def _gloo_of_all() -> Any:
    """Connections of all processes that nobody else uses; None if the default group has no gloo.

    `torch.distributed.checkpoint.async_save` has collectives in the default group, in its thread, while the training
    goes on. No `new_group`, whose name has the number of groups that a rank has made: not all have made as many.
    """
    default: Any = torch.distributed.group.WORLD
    if (known := _gloos.get(default)) is not None:
        return known
    if (backend := _gloo_in(default)) is None:
        return None
    c10d: Any = torch.distributed.distributed_c10d
    store = c10d.PrefixStore("swapper", c10d._get_default_store())
    store = c10d.PrefixStore(_new_name(store, default.rank(), default.size()), store)
    timeout = getattr(getattr(backend, "options", None), "_timeout", c10d.default_pg_timeout)
    gloo = _gloos[default] = c10d.ProcessGroupGloo(store, default.rank(), default.size(), timeout)
    return gloo


def _new_name(store: Any, rank: int, count: int) -> str:
    """A name that all ranks know, and that no earlier group of theirs had. Waits for rank 0.

    A store may live longer than process groups, as that of `torchrun` does: it has the addresses of earlier ones, and a
    rank that found these would wait for nobody. So each rank takes the name out of the store.
    """
    if rank > 0:
        name: str = store.get(f"name/{rank}").decode()
        with suppress(RuntimeError, NotImplementedError):  # Some stores cannot.
            store.delete_key(f"name/{rank}")
        return name
    name = secrets.token_hex(8)
    for each in range(1, count):
        store.set(f"name/{each}", name)
    return name


def _gloo_in(group: Any) -> Any:
    """The gloo backend of a process group; None if it has none."""
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # It is of devices alone.
        return None
    return backend if backend.name() == "gloo" else None


def tells_on_host() -> bool:
    """True if the ranks tell each other by gloo, and so without waiting for an accelerator. Asks nobody."""
    if not is_distributed():
        return False
    group, _ = _members()
    return _gloo_in(torch.distributed.group.WORLD if group is None else group) is not None


def _rank() -> int:
    return torch.distributed.get_rank() if is_distributed() else 0


def rank_count() -> int:
    """The number of processes of the group; 1 if `torch.distributed` is not initialized."""
    return len(_members()[1])


def rank_of_process() -> int:
    """The rank of this process in the group; 0 if it is alone, or `torch.distributed` is not initialized."""
    members = _members()[1]
    # One alone stays so, though `torch.distributed` begins or ends meanwhile.
    return members.index(_rank()) if len(members) > 1 else 0


def exchanged(value: _T) -> list[_T]:
    """Return the `value` of each rank, in the order of ranks. Collective, over the processes of the group. Pickled.

    Raises:
        SwapError: some ranks are within another call, have ended, or did not come until the group's timeout.
    """
    group, members = _members()
    if len(members) == 1:
        return [value]
    with _telling_of_long_waits():
        values = _all_gathered(value, group, len(members))
    at_verdict = [isinstance(each, _Verdict) for each in values]
    if any(at_verdict) and not all(at_verdict):
        there = [rank for rank, is_there in zip(members, at_verdict, strict=True) if is_there]
        raise SwapError(
            f"ranks {there} are within another call of swapper than the others: all ranks must make the same calls in "
            "the same order, with the same settings"
        )
    return values


def of_all(here: bool, together: bool = True) -> bool:
    """True if `here` is, on all ranks. Collective, as `agreed`, within which nothing is asked: then it is `here`.

    Raises:
        SwapError: as for `exchanged`.
    """
    if not together or getattr(_within, "another", False):
        return here
    return all(exchanged(here))


def gathered_by_first(value: _T) -> list[_T]:
    """As `exchanged` on rank 0, and empty on the others."""
    group, members = _members()
    if len(members) == 1:
        return [value]
    values: list[Any] | None = [None] * len(members) if _rank() == members[0] else None
    with _telling_of_long_waits(), _on_device_of(group):
        torch.distributed.gather_object(value, values, members[0], group)
    return values or []


def leave_note(key: str, note: str) -> bool:
    """Leave a note for other ranks, for as long as the store of `torch.distributed` lives. Waits for no rank.

    Returns:
        False if there is no store that it can be left in, or none that answers, which is logged.
    """
    try:
        _check_answers()
        _store().set(key, note)
    except (RuntimeError, ValueError) as error:
        log.warning("ranks cannot be compared, as the store of torch.distributed takes no notes: %s", str(error))
        return False
    return True


def notes_of(keys: Sequence[str]) -> list[str | None]:
    """The notes that ranks have left, in the order of `keys`; None for those that are not there. Waits for no rank.

    The process that has the store may be stopped, and torch asks it without an end: so a thread asks, and what has not
    come after `ANSWER_S` is not there, which is logged.
    """
    global _asking
    answers: list[list[str | None] | Exception] = []

    def ask() -> None:
        try:
            are_all_there = store.check(list(keys))
            answers.append([store.get(key).decode() if are_all_there or store.check([key]) else None for key in keys])
        except (RuntimeError, ValueError) as error:
            answers.append(error)

    try:
        _check_answers()
        store = _store()
        _asking = threading.Thread(target=ask, name="swapper-notes", daemon=True)
        _asking.start()
        _asking.join(ANSWER_S)
        _check_answers()
        answer = answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer
    except (RuntimeError, ValueError) as error:
        log.warning("ranks cannot be compared, as the store of torch.distributed does not answer: %s", str(error))
        return [None] * len(keys)


def _check_answers() -> None:
    """Raise `RuntimeError` if a thread still waits for what it has asked the store: the next one would, too."""
    if _asking is not None and _asking.is_alive():
        raise RuntimeError(f"it was asked, and has said nothing for {ANSWER_S:.0f} s")


def _store() -> Any:
    c10d: Any = torch.distributed.distributed_c10d
    if (store := c10d._get_default_store()) is None:
        raise ValueError("the default group has none")
    return c10d.PrefixStore("swapper", store)


class _RankMissing(SwapError, RuntimeError):
    """Another rank did not come. Who catches torch's error of that catches this one too."""


@contextmanager
def _telling_of_long_waits() -> Iterator[None]:
    global _watcher
    thread = threading.get_ident()
    _waits[thread] = time.monotonic()
    if _watcher is None or not _watcher.is_alive():  # The first time; and in a fork, which has no threads.
        _watcher = threading.Thread(target=_watch, name="swapper-waits", daemon=True)
        with suppress(RuntimeError):  # There are no more threads. Who raised now would leave the others waiting.
            _watcher.start()
    began = time.monotonic()
    try:
        yield
    except RuntimeError as error:  # Of torch's, which say an address or a key.
        members = _members()[1]
        raise _RankMissing(
            f"rank {_rank()} has waited {time.monotonic() - began:.0f} s for the other ranks of "
            f"{_named(members)} to make the same call of swapper, and one of them has ended, does not "
            f"answer, or makes other calls, as with other settings: {error}"
        ) from error
    finally:
        _waits.pop(thread, None)


def _named(members: Sequence[int]) -> str:
    return str([*members]) if len(members) <= 16 else f"all {len(members)}"


def _watch() -> None:
    while True:
        time.sleep(WARN_AFTER_S / 4)
        for thread, since in list(_waits.items()):
            if (waited_s := time.monotonic() - since) > WARN_AFTER_S:
                _waits.pop(thread, None)  # It says so once.
                members = _members()[1]
                log.warning(
                    "rank %d has waited %.0f s for the other ranks of %s to make the same call of swapper; if some of "
                    "them never do, make it within swapper.process_group(group) of those that do",
                    _rank(),
                    waited_s,
                    _named(members),
                )


@contextmanager
def agreed(together: bool = True) -> Iterator[None]:
    """Do what is within on all ranks, and find at its end that it succeeded on all. Collective, over the group.

    What is within may have collectives of its own only where no rank can have failed before. Within another `agreed`
    nothing is asked: that one finds out.

    Args:
        together: False if other ranks may not do the same: then nothing is asked. The same on all ranks.

    Raises:
        SwapError: what another rank raised, of the same class and with its number; the lowest of several. What is of
            no class of swapper's is a SwapError with its text.
        SwapError: other ranks are within another call.
        Exception: what this rank raised, as it is.
    """
    if not together or rank_count() == 1 or getattr(_within, "another", False):
        yield
        return
    failure: Exception | None = None
    _within.another = True
    try:
        yield
    except Exception as error:
        failure = error
    finally:
        _within.another = False
    # After `except`: a rank that fails here has no error of its own as the context of this one.
    try:
        verdicts = exchanged(_Verdict(None if failure is None else _as_sent(failure)))
    except SwapError as mismatch:
        raise mismatch from failure
    try:
        if failure is not None:
            raise failure
        for rank, verdict in zip(_members()[1], verdicts, strict=True):
            if verdict.error is not None:
                raise _as_raised_here(verdict.error, rank) from verdict.error
    finally:
        failure = None  # Its traceback has this frame: together they would keep what the callers have.


def _as_sent(error: Exception) -> Exception:
    """`error`, if others can read it, and else its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return SwapError(f"{type(error).__name__}: {error}")
    return error


def _as_raised_here(error: Exception, rank: int) -> SwapError:
    where = f"on rank {rank}"
    if isinstance(error, SwapIOError):
        return renewed(error, detail=f"{error.detail}; {where}" if error.detail else where)
    if isinstance(error, SwapError):
        new = copy.copy(error)
        new.args = (f"{where}: {error}",)
        return new
    return SwapError(f"{where}: {type(error).__name__}: {error}")
