"""Copies of gradients between an accelerator and the pool, which go on while backward does."""

from __future__ import annotations

from collections import deque

import torch

from swapper.gradient.clipping import norm_of
from swapper.io.devices import Copy, DeviceCopies
from swapper.tensors.end_of_backward import call_at_the_end
from swapper.tensors.sharded import Sharding, is_sharded, local_of

__all__ = ["GradientCopies"]

_COPYING_BYTES = 256 << 20
"""Most bytes of gradients that were let go of while an accelerator still copies them: its memory, until it has."""


class GradientCopies:
    """The copies of all devices. See [Note: gradients of an accelerator] in `swapper`."""

    def __init__(self) -> None:
        self._of_device: dict[torch.device, DeviceCopies] = {}
        self._evicted: deque[tuple[Copy, int]] = deque()  # of gradients, the last copy, and their bytes
        self._joined_after = -1  # number of the backward pass at whose end copies are waited for

    def of(self, device: torch.device) -> DeviceCopies:
        """Return the copies between `device` and the pool."""
        if device not in self._of_device:
            self._of_device[device] = DeviceCopies(device)
        return self._of_device[device]

    def add(self, evicted: torch.Tensor, fresh: torch.Tensor, *, both: bool) -> Copy | None:
        """Start adding `fresh` to `evicted`, which is on the host; `fresh` becomes the sum as well if `both`.

        On an accelerator, as autograd does, with a temporary of that size.
        """

        copies = self.of(fresh.device)

        def work() -> None:
            if fresh.device == evicted.device:
                summed = evicted.add_(fresh)
            else:
                summed = evicted.to(fresh.device, non_blocking=copies.non_blocking).add_(fresh)
                evicted.copy_(summed, non_blocking=copies.non_blocking)
            if both:
                fresh.copy_(summed)

        return copies.run(work, fresh)

    def norm(self, gradient: torch.Tensor, norm_type: float, result: torch.Tensor) -> torch.Tensor:
        """Start taking the norm of `gradient`, after the copies so far. The `result` has it after `join`.

        Args:
            result: of shape `()`, made before the copies' `begin`: see [Note: late copies] in `devices`.

        Returns:
            `result`; for a DTensor a DTensor around it, as torch gives it: each rank's norm is that of its part.
        """

        def work() -> None:
            nonlocal result
            norm = norm_of(gradient, norm_type, None)
            result.copy_(local_of(norm))
            if is_sharded(norm):
                result = Sharding.of(norm).with_local(result)

        self.of(gradient.device).run(work, result)
        return result

    def wait_later(self, copy: Copy, gradient: torch.Tensor) -> None:
        """`gradient` is let go of before `copy`, its last one, is done."""
        self._evicted.append((copy, gradient.nbytes))
        while len(self._evicted) > 1 and (
            self._evicted[0][0].done() or sum(length for _, length in self._evicted) > _COPYING_BYTES
        ):
            self._evicted.popleft()[0].wait_quietly()
        task = torch._C._current_graph_task_id()
        if task < 0:
            self.of(gradient.device).join()
        elif task != self._joined_after:
            self._joined_after = task
            call_at_the_end(self.join, rounds=1)

    def join(self) -> None:
        """Let the current stream wait for the copies so far."""
        for copies in self._of_device.values():
            copies.join()
