"""`NativeQueue`: native steps of several buckets at once, on threads of the core, while Python opens the next ones.

A bucket that is queued is open, and nothing of it is written yet. What runs is written to until it is waited for, so
its buffers are nobody else's before that. Each of the two has a half of the scratch buffer.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from swapper.errors import SwapError
from swapper.optimizer.native_step import NativeOperand
from swapper.optimizer.operands import Operand, Scratch
from swapper.optimizer.records import OpenBucket
from swapper.optimizer.segments import Bucket
from swapper.optimizer.step_program import NativeRun
from swapper.process.interrupts import interrupts_deferred

__all__ = ["NativeQueue", "QueuedBucket"]

_NUMEL_TOGETHER = 1 << 20
"""Elements from which on what is queued is begun: many times what waking a thread costs, and still in two halves."""


@dataclass(eq=False, slots=True)
class QueuedBucket:
    """An open bucket all of whose operands are stepped natively."""

    opened: OpenBucket
    operands: Sequence[Operand]
    native: Sequence[NativeOperand]


class NativeQueue:
    """Begins what is queued when that is enough, and concludes it when the next has begun.

    Args:
        enter: a method, which is called for the operands of each bucket just before they begin to change.
        conclude: a method, which is called for each bucket that is stepped.

    Attributes:
        open_bytes_max: see `OptimizerPlan.open_bytes_max`.
    """

    def __init__(
        self,
        enter: Callable[[Sequence[Operand]], None],
        conclude: Callable[[QueuedBucket], None],
    ) -> None:
        self.open_bytes_max: int | None = 0
        # Of whoever has the queue: held, neither would go before the garbage collector comes.
        self._enter, self._conclude = weakref.WeakMethod(enter), weakref.WeakMethod(conclude)
        self._halves: tuple[Scratch, Scratch] | None = None
        self._queued: list[QueuedBucket] = []
        self._numel = 0  # of what is queued
        self._run: NativeRun | None = None
        self._running: list[QueuedBucket] = []

    def scratch(self, whole: Scratch) -> Scratch:
        """The half of `whole`, which is the same in one step, that the next bucket is to have its scratch of."""
        if self._halves is None:
            self._halves = whole.halves()
        return self._halves[0]

    def has_room(self, bucket: Bucket) -> bool:
        """True if `bucket` may be opened beside those that are open here."""
        if self.open_bytes_max is None:
            return True
        open_bytes = sum(each.opened.bucket.length_bytes for each in (*self._running, *self._queued))
        return open_bytes + bucket.length_bytes <= self.open_bytes_max

    def add(self, bucket: QueuedBucket) -> None:
        """Step `bucket`, soon. Errors as of `flush`."""
        self._queued.append(bucket)
        self._numel += sum(each.segment.numel for each in bucket.native)
        if self._numel >= _NUMEL_TOGETHER:
            self._begin()

    def flush(self) -> None:
        """Have all stepped and concluded.

        Raises:
            SwapError: a stored master is damaged, or a step was refused. Nothing of what begun with it was written.
            SwapIOError: an earlier write failed.
        """
        if self._queued:
            self._begin()
        self._conclude_all(self._wait())
        for half in self._halves or ():  # Also what was taken for a bucket that was not queued then.
            half.reset()

    def drop(self) -> None:
        """Forget all, after what runs: the step is over, or was cut off. Idempotent."""
        with interrupts_deferred():  # For milliseconds: what runs uses buffers, and temporaries, that are here.
            if self._run is not None:
                with contextlib.suppress(SwapError):  # Whoever cut it off knows more.
                    self._run.wait()
            self._run, self._halves, self._numel = None, None, 0
            self._running, self._queued = [], []

    def _begin(self) -> None:
        done = self._wait()
        enter = self._enter()
        assert enter is not None, "whoever has the queue calls it"
        for bucket in self._queued:
            enter(bucket.operands)
        native = [each for bucket in self._queued for each in bucket.native]
        self._run = NativeRun([(each.program, each.segment) for each in native], torch.get_num_threads())
        self._running, self._queued, self._numel = self._queued, [], 0
        self._conclude_all(done)
        if self._halves is not None:  # What was concluded has left its half.
            self._halves = self._halves[::-1]
            self._halves[0].reset()

    def _wait(self) -> list[QueuedBucket]:
        """Wait for what runs, and return it, with results."""
        if self._run is None:
            return []
        results = iter(self._run.wait())
        done, self._run, self._running = self._running, None, []
        for bucket in done:
            for each in bucket.native:
                each.result = next(results)
        return done

    def _conclude_all(self, done: Sequence[QueuedBucket]) -> None:
        conclude = self._conclude()
        assert conclude is not None, "whoever has the queue calls it"
        for bucket in done:
            conclude(bucket)
