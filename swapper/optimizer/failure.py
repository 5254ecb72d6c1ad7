"""`Guard`: whether a swapped optimizer may be used, after a step or a load that ended in the middle."""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.optim import Optimizer

from swapper.errors import SwapError, SwapIOError
from swapper.io.devices import advise_on_memory
from swapper.metrics import Metrics
from swapper.optimizer.records import BucketRecords
from swapper.optimizer.segments import Bucket
from swapper.optimizer.stepper import Stepper
from swapper.tensors.homes import home_of
from swapper.tensors.sharded import local_of

__all__ = ["Guard"]

_ADVICE = (
    "a step on the accelerator takes memory there for three buckets, and for what the optimizer computes for one; "
    "lower bucket_bytes, or set offload_optimizer.step_device: cpu"
)
_Version = tuple["weakref.ref[torch.nn.Parameter]", int, int]


class Guard:
    """Refuses what must not be done to an optimizer now.

    Attributes:
        closed: the state is gone.
        failure: a step or a load that ended in the middle and is not made good yet.
    """

    def __init__(self, stepper: Stepper, records: BucketRecords, metrics: Metrics) -> None:
        self.closed = False
        self.failure: Failure | None = None
        self._stepper = stepper
        self._records = records
        self._metrics = metrics
        self._pid = os.getpid()

    @property
    def is_forked(self) -> bool:
        """True in a process that was forked since."""
        return os.getpid() != self._pid

    def check_open(self) -> None:
        """Raise `SwapError` if the state is gone, or the parent's."""
        if self.closed:
            raise SwapError("the swapper of this optimizer was closed and its state is gone; make a new optimizer")
        if self.is_forked:
            raise SwapError(
                "a swapped optimizer was used in a forked process; its files and buffers belong to the parent. "
                "Make the optimizer in the process that steps it"
            )

    def check_usable(self, optimizer: Optimizer, operation: str) -> None:
        """Raise `SwapError` if a step or a load has failed, and not all is loaded again."""
        self.note_cut_off(optimizer)
        if self.failure is not None:
            self.failure.check(operation)
            self.failure = None

    def note_cut_off(
        self, optimizer: Optimizer, error: BaseException | None = None, shared: Iterable[Bucket] | None = None
    ) -> None:
        """Remember a step that ended in the middle. Without `error`: one whose clean-up was cut off too.

        What any other call has taken, and gives back no more since its clean-up was cut off, is given back.

        Args:
            shared: what was to be stepped, where all ranks step together: of some of them nothing may be stepped, of
                others all, so that no rank may go on. None where this process steps alone.
        """
        stepper = self._stepper
        if error is not None and stepper.plan.on_device:
            advise_on_memory(error, _ADVICE)
        is_here = stepper.stepping or bool(error and stepper.entered)
        if not is_here and shared is None:
            if error is None:
                self._records.release_live()
            return
        stepper.widen(optimizer)
        where = f"after {stepper.done} of {len(stepper.plan.buckets)} buckets" if is_here else "on some of the ranks"
        failure = Failure(f"step {self._metrics.steps} failed {where}")
        # Not those without a gradient, or in no group any more: what is loaded may not have them.
        shared_segments = (segment for bucket in shared or () for segment in bucket.segments)
        touched = [*stepper.entered, *(segment for segment in shared_segments if segment.of.group is not None)]
        failure.wait_for(segment.parameter for segment in touched)
        failure.explain(error or KeyboardInterrupt())
        self.failure = failure
        stepper.entered, stepper.done, stepper.stepping = [], 0, False
        if error is None:
            stepper.abandon()

    @contextmanager
    def replacing(self, what: str) -> Iterator[None]:
        """While all state is replaced, and from then on if that fails, nothing may use it."""
        before = self.failure
        self.failure = failure = Failure(f"{what} was not finished")
        if before is not None:
            failure.parameters = before.parameters
        try:
            yield
        except BaseException as error:
            failure.explain(error)
            self._stepper.recover()
            raise
        self.failure = before


class Failure:
    """Something that ended in the middle, so that parameters and state do not belong together, or state is missing.

    Attributes:
        state_loaded: all state has been loaded since.
        parameters: must be loaded, too: their version counters and addresses are to change.
    """

    def __init__(self, text: str) -> None:
        self.state_loaded = False
        self.parameters: list[_Version] = []
        self._cause: SwapIOError | None = None
        self._text = text

    def wait_for(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Have these loaded before training goes on."""
        distinct = {id(p): p for p in parameters}.values()
        self.parameters = [(weakref.ref(p), p._version, _address(p)) for p in distinct]

    def explain(self, error: BaseException) -> None:
        """Say what the reason was."""
        self._text += f" ({type(error).__name__}: {error})"
        # A copy has no traceback, whose frames would keep the optimizer alive.
        self._cause = copy.copy(error) if isinstance(error, SwapIOError) else None

    def check(self, operation: str) -> None:
        """Raise unless state and parameters were loaded since."""
        if not self.state_loaded:
            raise SwapError(
                f"{operation} is refused: {self._text}. Parameters and optimizer state no longer belong together: load "
                "both from a checkpoint (model.load_state_dict and optimizer.load_state_dict)"
            ) from self._cause
        for reference, version, address in self.parameters:
            p = reference()
            if p is not None and local_of(p).numel() and p._version == version and _address(p) == address:
                raise SwapError(
                    f"{operation} is refused: {self._text}. The optimizer's state was loaded again but the parameters "
                    "were not: load them from the same checkpoint (model.load_state_dict)"
                ) from self._cause


def _address(p: torch.nn.Parameter) -> int:
    """Address of the values; 0 of a swapped parameter, for which only the version counts."""
    return 0 if home_of(local := local_of(p)) is not None else local.data_ptr()
