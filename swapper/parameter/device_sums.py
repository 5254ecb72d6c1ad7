"""Sums of values on a device, by which a change is found that autograd does not know of.

[Note: the sum] Values are words of 32 bits, and each is multiplied with a weight of its own, an odd random number of 64
bits; all are added up modulo 2^64, a piece after the other, and the sum before a piece is multiplied with an odd
number as well. So a single word that changes always changes the sum, and so does, but for one case in 2^32, whatever
else changes: a sign, an order, two parameters exchanged. Words of 64 bits would be half the work, and the signs of an
even number of float64 would change nothing. Integer operations of torch give the same bits on every run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swapper.io.devices import Copy, DeviceCopies, current_streams
from swapper.tensors.grad_modes import modes_kept, set_grad_mode

__all__ = ["Check", "DeviceSums"]

_PIECE_WORDS = 1 << 20
"""Words that are multiplied at once, into a temporary of twice their bytes."""
_SEED = 0x5EED
_FACTOR = 0x9E3779B97F4A7C1


class DeviceSums:
    """Sums values on one device, with temporaries of a set size.

    Args:
        device: an accelerator.
        longest_bytes: of the tensors that are summed.

    Attributes:
        length_bytes: device memory of the weights and of the temporaries of two sums at once.
    """

    def __init__(self, device: torch.device, longest_bytes: int) -> None:
        self._device = device
        self.length_bytes = self.bytes_for(longest_bytes)
        self._weights = torch.empty(0, dtype=torch.int64, device="cpu")
        self._numel = _words_at_once(longest_bytes)

    @staticmethod
    def bytes_for(longest_bytes: int) -> int:
        """`length_bytes` of sums of tensors of up to `longest_bytes`."""
        return 3 * 8 * _words_at_once(longest_bytes)

    def fit(self, longest_bytes: int) -> None:
        """Sum tensors of up to `longest_bytes` from now on. Known sums stay what they are."""
        self.length_bytes = max(self.length_bytes, self.bytes_for(longest_bytes))
        self._numel = max(self._numel, _words_at_once(longest_bytes))

    def of(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Start summing each of `values` on the current stream.

        Args:
            values: 1-D, contiguous, of any dtype.

        Returns:
            int64, of shape `(len(values),)`.
        """
        with modes_kept():
            set_grad_mode(False)
            if self._weights.numel() < self._numel:
                generator = torch.Generator().manual_seed(_SEED)  # The first are the same, however many there are.
                weights = torch.randint(
                    -(1 << 62), 1 << 62, (self._numel,), dtype=torch.int64, generator=generator, device="cpu"
                )
                self._weights = (weights * 2 + 1).to(self._device)
            for stream in current_streams([self._device]):
                self._weights.record_stream(stream)  # Longer ones may replace them while several sum with them.
            return torch.stack([self._sum(each) for each in values])

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        data = values.view(torch.uint8)
        whole_bytes = data.numel() // 4 * 4
        words = data[:whole_bytes].view(torch.int32)
        total = torch.zeros((), dtype=torch.int64, device=self._device)
        pieces = [words[start : start + _PIECE_WORDS] for start in range(0, words.numel(), _PIECE_WORDS)]
        for piece in (*pieces, data[whole_bytes:]):
            if piece.numel():
                total = torch.add((piece * self._weights[: piece.numel()]).sum(), total, alpha=_FACTOR)
        return total


class Check:
    """Compares values with what they were, while the device does other work.

    Args:
        sums: of the values now, from `DeviceSums.of`.
        known: as they were.
        copies: of the device.

    Attributes:
        sums: as given.
    """

    def __init__(self, sums: torch.Tensor, known: torch.Tensor, copies: DeviceCopies) -> None:
        self.sums = sums
        differ = torch.ne(sums, known)
        on_host = torch.empty(differ.shape, dtype=differ.dtype, pin_memory=True, device="cpu")
        self._differ = on_host.copy_(differ, non_blocking=True)
        self._over: Copy | None = copies.reached()

    def done(self) -> bool:
        """Tell if the result is there."""
        return self._over is None or self._over.done()

    def differing(self) -> list[int]:
        """Wait for the result: which of the sums are not what they were.

        Raises:
            SwapIOError: the device failed.
        """
        if self._over is not None:
            self._over.wait()
            self._over = None
        return [index for index, differs in enumerate(self._differ.tolist()) if differs]


def _words_at_once(longest_bytes: int) -> int:
    return min(max(longest_bytes // 4, 3), _PIECE_WORDS)
