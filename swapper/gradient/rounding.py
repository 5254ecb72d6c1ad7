"""Rounds fp32 gradients to bf16 on their way to the drive, in their buffers, at random but always alike.

[Note: rounded gradients] With `offload_gradient.encoding: bf16` a part of an fp32 gradient is in memory as ever, in a
buffer of fp32 values. When it is put it is rounded there ([Note: stochastic rounding] in `csrc/bf16_codec.h`), and half
of the buffer is written; when it is taken again it is decoded there. It is rounded whenever it is put, whether or not
somebody takes it before it is written: what a gradient becomes must not depend on how long the pool has room for it.
So micro-batches are added up in fp32, and each sum is rounded.

The random bits are a function of the number of steps that were made, of how often this gradient was rounded since it
was begun, in this step, and of the parameter's number and the element's index in it, as those of state are. Each pass
draws its own: with those of the pass before, its error would depend on that one's, and the mean would not be the sum.

What stays in memory is not rounded in one process. Where `torch.distributed` is initialized it is, in its place, as it
would be on its way to the drive: one rank may have used the values of a gradient, to log them, and others not, and
replicas of it must stay alike. A backward that has added nothing to it, as that of another model, does not round it:
somebody may have edited it. So what was clipped while it was evicted stays in memory after such a backward. That it
was passed is counted all the same, as on ranks where it goes back to the drive. A gradient that an accelerator still
copies is rounded by whoever finishes its record, so nothing of it may be taken before that. Norms for clipping are
those of rounded values, as a step uses them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from swapper.gradient.records import Gradient, PartRecord
from swapper.io.bf16_codec import RoundingKey, decode_bf16, encode_bf16
from swapper.tensors.grad_modes import modes_kept, set_grad_mode

__all__ = ["PlaceOf", "Rounding", "decode_in_place", "rounding_of"]

PlaceOf = Callable[[torch.nn.Parameter], tuple[int, int, int]]
"""Gives the steps that were made, the number of a parameter, and the index in all of it of its local first element."""

_CHUNK_NUMEL = 1 << 18
"""Elements that are encoded or decoded at once, by way of 512 KiB beside the buffer."""


@dataclass(frozen=True)
class Rounding:
    """Rounds one part of a gradient, the same each time.

    Attributes:
        key: of the random bits.
        first: index of the first element of the part in the whole parameter.
        file_bytes: length of the record.
    """

    key: RoundingKey
    first: int
    file_bytes: int

    def encode_in_place(self, values: torch.Tensor) -> int:
        """Round `values`, float32 and 1-D, on the host, to bf16 in the first half of their memory.

        Returns:
            How many bytes are to be written.
        """
        stored = _stored_in(values)
        with modes_kept():
            set_grad_mode(False)
            # From the first: what a chunk overwrites was encoded before, or is in this chunk.
            for start in range(0, len(values), _CHUNK_NUMEL):
                piece = values[start : start + _CHUNK_NUMEL]
                encoded = torch.empty(len(piece), dtype=torch.bfloat16, device="cpu")
                encode_bf16(piece, encoded, self.first + start, self.key)
                stored[start : start + _CHUNK_NUMEL].copy_(encoded)
        return self.file_bytes

    def decode_to(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Write what `encode_in_place` has left in the memory of `values` to `out`, which shares none of it."""
        decode_bf16(_stored_in(values), out)


def rounding_of(place_of: PlaceOf, gradient: Gradient, part: PartRecord, parameter: torch.nn.Parameter) -> Rounding:
    """Return the rounding of `part` now, of a gradient that was rounded `gradient.rounded` times with this one."""
    steps, number, first = place_of(parameter)
    return Rounding(RoundingKey(f"gradient.{gradient.rounded}", steps, number), first + part.start, part.file_bytes)


def decode_in_place(values: torch.Tensor) -> None:
    """Undo `Rounding.encode_in_place`: the memory of `values` has float32 again. Exact."""
    stored = _stored_in(values)
    with modes_kept():
        set_grad_mode(False)
        # From the last: a chunk overwrites what was decoded before, or is copied in this one.
        for start in reversed(range(0, len(values), _CHUNK_NUMEL)):
            decode_bf16(stored[start : start + _CHUNK_NUMEL].clone(), values[start : start + _CHUNK_NUMEL])


def _stored_in(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.bfloat16)[: len(values)]
