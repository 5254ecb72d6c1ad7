"""`LayerTokens`: keys and values of one layer, in records of some tokens each; new tokens go to the last one.

[Note: rows] A beam search gives every row of the batch another history at every token. Records are not rewritten for
that: each knows which of its rows is which row of the batch. Only the last one, which new tokens go to, is put in
order, in the pool.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from swapper.hf.token_records import TokenRecord, TokenRecords

__all__ = ["LayerTokens"]


class LayerTokens:
    """Tensors of shape `(batch, heads, tokens, width)` that grow by tokens, on the drive.

    Args:
        records: of the cache. This appends its own list to `records.layers`.
        window: no more than so many tokens are usually kept: records are not made for many more. None for no limit.

    Attributes:
        likes: an empty tensor for each part (keys, values) with the shape that the parts have, but no tokens; its
            dtype and device; () before the first tokens.
        count: tokens.
    """

    def __init__(self, records: TokenRecords, window: int | None = None) -> None:
        self._all = records
        self._most = None if window is None else 2 * max(window, 1)
        self._own: list[TokenRecord] = []
        self._number = len(records.layers)
        records.layers.append(self._own)
        self.likes: tuple[torch.Tensor, ...] = ()
        self.count = 0

    def begin(self, tokens: Sequence[torch.Tensor], joined_to: Sequence[torch.dtype]) -> None:
        """Take dtypes, devices and shapes from the first tokens.

        Args:
            tokens: as they are given to the layer.
            joined_to: dtypes of the empty tensors that a `DynamicLayer` joins all tokens to, which promotes them.
        """
        dtypes = [torch.promote_types(dtype, each.dtype) for dtype, each in zip(joined_to, tokens, strict=True)]
        self.likes = tuple(
            each.new_empty(each[:, :, :0].shape, dtype=dtype) for each, dtype in zip(tokens, dtypes, strict=True)
        )

    def refusal(self, tokens: Sequence[torch.Tensor]) -> str:
        """Say why `tokens` cannot be appended; "" if they can."""
        for name, like, new in zip(("keys", "values"), self.likes, tokens, strict=False):
            wanted, given = list(like.shape), list(new.shape)
            if len(given) != 4 or wanted[:2] + wanted[3:] != given[:2] + given[3:]:
                return f"{name} of shape {given} do not continue those of shape {wanted}, in which 0 stands for tokens"
            if torch.promote_types(like.dtype, new.dtype) != like.dtype or like.device != new.device:
                return f"{name} are {new.dtype} on {new.device}, and were {like.dtype} on {like.device}"
        return ""

    def fill(self, outs: Sequence[torch.Tensor | None]) -> None:
        """Copy all tokens to `outs`, in order.

        Args:
            outs: for each part a tensor of shape `(batch, heads, tokens, width)`, of any strides; or None.
        """
        at = 0
        for position, record in enumerate(self._own):
            self._all.read_ahead(self._number, position - 1)  # This one and those after it.
            slices = [None if out is None else out[:, :, at : at + len(record)] for out in outs]
            self._all.use(record, functools.partial(self._copy, record, slices), self.likes[0].device)
            at += len(record)
        self._all.read_ahead(self._number, len(self._own) - 1)

    @staticmethod
    def _copy(
        record: TokenRecord, outs: Sequence[torch.Tensor | None], parts: Sequence[torch.Tensor], non_blocking: bool
    ) -> None:
        for out, part in zip(outs, parts, strict=True):
            if out is None:
                continue
            # Up as it lies, in one piece; the accelerator puts it in the layout of `out`.
            piece = _as_it_lies(part[:, :, record.start : record.stop]).to(out.device, non_blocking=non_blocking)
            tokens = piece.permute(1, 2, 0, 3)
            if record.rows is None:
                out.copy_(tokens)
            else:
                for i, row in enumerate(record.rows.tolist()):
                    out[i].copy_(tokens[row])

    def append(self, tokens: Sequence[torch.Tensor]) -> None:
        """Take new tokens in. `refusal` must have been asked before.

        Raises:
            SwapIOError: the drive is full, or failed.
            ConfigError: the pool is too small for one token.
        """
        done, count = 0, tokens[0].shape[2]
        if count and self._own:
            self._put_in_order(self._own[-1])
        while done < count:
            if not self._own or self._own[-1].stop == self._own[-1].capacity or self._own[-1].rows is not None:
                self._own.append(self._all.create(tokens, self._all.record_bytes(len(self._all.layers)), self._most))
            record = self._own[-1]
            taken = min(record.capacity - record.stop, count - done)
            is_full = record.stop + taken == record.capacity
            new = [each[:, :, done : done + taken] for each in tokens]
            work = functools.partial(self._extend, record, new)
            self._all.use(record, work, tokens[0].device, changes=True, full=is_full)
            record.stop += taken
            done += taken
            self.count += taken

    @staticmethod
    def _extend(
        record: TokenRecord, tokens: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], non_blocking: bool
    ) -> None:
        for part, new in zip(parts, tokens, strict=True):
            room = part[:, :, record.stop : record.stop + new.shape[2]]
            _as_it_lies(room).copy_(_as_it_lies(new), non_blocking=non_blocking)

    def _put_in_order(self, record: TokenRecord) -> None:
        """Let new tokens have room in the last record: its rows are those of the batch, and no token is dropped."""
        rows = record.rows
        batch = self.likes[0].shape[0]
        reordered = rows is not None and record.parts[0].shape[0] == batch
        shifted = rows is None and record.stop == record.capacity and 2 * record.start >= record.capacity
        if not reordered and not shifted:
            return
        start, stop = record.start, record.stop

        def move(parts: Sequence[torch.Tensor], _: bool) -> None:
            for part in parts:
                tokens = part[:, :, start:stop]
                tokens = tokens.clone() if rows is None else tokens.index_select(0, rows)
                part[:, :, : stop - start].copy_(tokens)

        self._all.use(record, move, changes=True)
        record.rows, record.start, record.stop = None, 0, stop - start

    def drop(self, count: int, *, last: bool) -> None:
        """Drop the first `count` tokens, or the `last` ones; all, if those are fewer."""
        position = -1 if last else 0
        while count > 0 and self._own:
            record = self._own[position]
            dropped = min(count, len(record))
            if last:
                record.stop -= dropped
            else:
                record.start += dropped
            self.count -= dropped
            count -= dropped
            if not len(record):
                self._all.forget(record.key)
                del self._own[position]

    def select(self, rows: torch.Tensor) -> None:
        """Let the batch have the rows `rows` of what it has now. See [Note: rows].

        Args:
            rows: 1-D, on the CPU; int64.
        """
        for record in self._own:
            record.rows = rows if record.rows is None else record.rows[rows]
        self.likes = tuple(like.new_empty((rows.numel(), *like.shape[1:])) for like in self.likes)

    def clear(self) -> None:
        """Drop all."""
        while self._own:
            self._all.forget(self._own[-1].key)
            self._own.pop()
        self.count = 0
        self.likes = ()


def _as_it_lies(tokens: torch.Tensor) -> torch.Tensor:
    """`(rows, heads, tokens, width)` as `(tokens, rows, heads, width)`: in a record that is one piece of memory."""
    return tokens.permute(2, 0, 1, 3)
