"""`agreed`: what several processes do together succeeds on all of them, or fails on all.

A rank that raises leaves the others in their next collective, where they wait until it times out. So each tells the
others how it went before any of them goes on.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from swapper.errors import ConfigError, SwapError, SwapIOError, renewed

__all__ = ["agreed", "exchanged", "gathered_by_first", "rank_count", "rank_of_process"]

_T = TypeVar("_T")
_within = threading.local()
"""`another`: the thread is within `agreed`."""


@dataclass(frozen=True)
class _Verdict:
    """How it went on a rank. Among other values it tells that ranks are at different calls."""

    error: Exception | None


def rank_count() -> int:
    """The number of processes of `torch.distributed`; 1 if it is not initialized."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if distributed else 1


def rank_of_process() -> int:
    """The rank of this process in `torch.distributed`; 0 if it is not initialized."""
    return torch.distributed.get_rank() if rank_count() > 1 else 0


def exchanged(value: _T) -> list[_T]:
    """What each rank has given, in the order of ranks. Collective, over all processes. Pickled.

    Raises:
        SwapError: some ranks are within another call.
    """
    if rank_count() == 1:
        return [value]
    values: list[Any] = [None] * rank_count()
    torch.distributed.all_gather_object(values, value)
    at_verdict = [isinstance(each, _Verdict) for each in values]
    if any(at_verdict) and not all(at_verdict):
        there = [rank for rank, is_there in enumerate(at_verdict) if is_there]
        raise SwapError(
            f"ranks {there} are within another call of swapper than the others: all ranks must make the same calls in "
            "the same order, with the same settings"
        )
    return values


def gathered_by_first(value: _T) -> list[_T]:
    """As `exchanged` on rank 0, and empty on the others."""
    if rank_count() == 1:
        return [value]
    is_first = torch.distributed.get_rank() == 0
    values: list[Any] | None = [None] * rank_count() if is_first else None
    torch.distributed.gather_object(value, values)
    return values or []


@contextmanager
def agreed(together: bool = True) -> Iterator[None]:
    """Do what is within on all ranks, and find at its end that it succeeded on all. Collective, over all processes.

    What is within may have collectives of its own only where no rank can have failed before. Within another `agreed`
    nothing is asked: that one finds out.

    Args:
        together: False if other ranks may not do the same: then nothing is asked. The same on all ranks.

    Raises:
        ConfigError, SwapIOError, SwapError: what another rank raised, with its number; the lowest of several.
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
    if failure is not None:
        raise failure
    for rank, verdict in enumerate(verdicts):
        if verdict.error is not None:
            raise _as_raised_here(verdict.error, rank) from verdict.error


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
    kind = ConfigError if isinstance(error, ConfigError) else SwapError
    text = str(error) if isinstance(error, SwapError) else f"{type(error).__name__}: {error}"
    return kind(f"{where}: {text}")
