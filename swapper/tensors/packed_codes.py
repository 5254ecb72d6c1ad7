"""4-bit codes of bitsandbytes, and the other order that it puts them in for some processors.

[Note: packed codes] On a CPU with AVX-512 BF16 the first forward in evaluation puts the codes of a matrix in the order
that a kernel takes them in: `weight.data = packed`, of as many bytes. They stay so until `state_dict` puts them back.
Of 32 rows the same bytes are used again, so the one order is made of the other in place. For a weight whose values are
in files of somebody else that is no change, but another form of the same values: when its record comes from the files
again it is packed as it arrives.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from swapper.tensors.inner import has_own_class

__all__ = ["CodeForm", "form_of", "is_packed", "pack_codes"]

_ROWS = 32
_TILE_BYTES = 1 << 15
"""Codes that are packed at once: so few that torch starts no threads, which wait for one another on a busy machine."""


class CodeForm:
    """The form in which a parameter has its codes.

    Args:
        rows: of the matrix.
        row_bytes: of the codes of one of them.

    Attributes:
        packed: see [Note: packed codes].
    """

    def __init__(self, rows: int, row_bytes: int) -> None:
        self.rows, self.row_bytes = rows, row_bytes
        self.packed = False

    def arrange(self, codes: torch.Tensor) -> None:
        """Bring codes that are as in the file, 1-D, into the form that they have now, in place. At once or not at all:
        no memory is needed once the first byte has changed."""
        if self.packed:
            pack_codes(codes.view(torch.uint8), self.rows)

    def is_other(self, codes: torch.Tensor, given: torch.Tensor) -> bool:
        """Return True if `given` are `codes` in the other form."""
        if given.numel() * given.dtype.itemsize != self.rows * self.row_bytes or given.device.type != "cpu":
            return False
        if not given.is_contiguous():
            return False
        before, after = (each.detach().reshape(-1).view(torch.uint8) for each in (codes, given))
        plain, packed = (after.clone(), before) if self.packed else (before.clone(), after)
        pack_codes(plain, self.rows)
        return torch.equal(plain, packed)


def form_of(tensor: torch.Tensor) -> CodeForm | None:
    """Give the form of the codes of `tensor`, which are as in a file; None if they are in one order only."""
    state: Any = vars(tensor).get("quant_state")
    if state is None or not has_own_class(tensor) or len(state.shape) != 2:
        return None
    rows, columns = state.shape
    if rows % _ROWS or columns % 2 or rows * columns != 2 * tensor.nbytes:
        return None  # bitsandbytes refuses to pack these.
    return CodeForm(rows, columns // 2)


def is_packed(tensor: torch.Tensor) -> bool:
    """True if bitsandbytes has packed the codes of `tensor`, and not put them back."""
    return bool(getattr(vars(tensor).get("quant_state"), "packing_format_for_cpu", False))


@torch.no_grad()
def pack_codes(codes: torch.Tensor, rows: int) -> None:
    """Pack the codes of a matrix, as `_convert_weight_packed_for_cpu` of bitsandbytes does, in place.

    Args:
        codes: two in a byte, the first of them in the upper half; 1-D, uint8, contiguous.
        rows: of the matrix, a multiple of 32.
    """
    blocks = codes.view(rows // _ROWS, _ROWS, -1)
    row_bytes = blocks.shape[2]
    together = min(max(1, _TILE_BYTES // (_ROWS * row_bytes)), blocks.shape[0])
    tile = min(row_bytes, max(1, _TILE_BYTES // _ROWS))
    packed = torch.empty(together, row_bytes, _ROWS // 2, 2, dtype=torch.uint8, device="cpu")
    even, odd, other = (torch.empty(together, _ROWS // 2, tile, dtype=torch.uint8, device="cpu") for _ in range(3))
    for at in range(0, blocks.shape[0], together):
        block = blocks[at : at + together]
        count = block.shape[0]
        for first in range(0, row_bytes, tile):
            columns = slice(first, min(first + tile, row_bytes))
            kept = columns.stop - first
            # A byte of the result has two codes of one column: below of a row of the first half, above of the second.
            below, above = block[:, : _ROWS // 2, columns], block[:, _ROWS // 2 :, columns]
            even_now, odd_now, other_now = (each[:count, :, :kept] for each in (even, odd, other))
            torch.bitwise_right_shift(below, 4, out=even_now)
            torch.bitwise_and(above, 0xF0, out=other_now)
            even_now.bitwise_or_(other_now)
            torch.bitwise_and(below, 0xF, out=odd_now)
            torch.bitwise_left_shift(above, 4, out=other_now)
            odd_now.bitwise_or_(other_now)
            # For each column of bytes: the rows, and of each the even column and the odd one.
            packed[:count, columns, :, 0].copy_(even_now.transpose(1, 2))
            packed[:count, columns, :, 1].copy_(odd_now.transpose(1, 2))
        ctypes.memmove(block.data_ptr(), packed.data_ptr(), block.nbytes)
