"""A drive that stands still until a test lets it go on: what is in flight meanwhile is certain, however late it is."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from swapper.io.handle import FaultPlan, Transfer
from swapper.storage.store import TensorStore


@contextlib.contextmanager
def still(*plans: FaultPlan) -> Iterator[None]:
    """Within it no transfer ends that was started within it, also none that fails. The drive is free after it."""
    try:
        for plan in plans:
            plan.bytes_per_second = 1
        yield
    finally:
        for plan in plans:
            plan.bytes_per_second = 0


def go_on_when_waited_for(patch: pytest.MonkeyPatch, *plans: FaultPlan) -> None:
    """Let drives that stand still go on as soon as somebody waits for a transfer."""

    def going_on(wait: Callable[..., Any]) -> Callable[..., Any]:
        def waits(*arguments: Any) -> Any:
            for plan in plans:
                plan.bytes_per_second = 0
            return wait(*arguments)

        return waits

    for name in ("wait", "wait_quietly"):
        patch.setattr(Transfer, name, going_on(getattr(Transfer, name)))


@contextlib.contextmanager
def still_at_write(number: int, store: TensorStore, *plans: FaultPlan) -> Iterator[None]:
    """As `still`, from the `number`-th write through `store` on, counted from 1."""
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        count, write = itertools.count(1), store.write

        def counted(*arguments: Any) -> Any:
            if next(count) == number:
                stack.enter_context(still(*plans))
            return write(*arguments)

        patch.setattr(store, "write", counted)
        yield
        assert next(count) > number, "there were fewer writes"
