"""Layers of `OffloadedCache`: transformers' own, but for where their keys and values are.

[Note: the same bits] Kernels choose by strides and alignment. So a layer gives new tensors, laid out as `torch.cat` and
the slices of transformers' layers lay them out: contiguous from `update`; after `crop`, and in a sliding window, a
slice of a tensor with more tokens. These others hold nothing then, and are there for the strides alone.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import torch
import transformers.cache_utils

from swapper.errors import SwapError
from swapper.hf.layer_tokens import LayerTokens
from swapper.hf.token_records import TokenRecords
from swapper.io.devices import refuse_in_graph
from swapper.process.warnings import warn_once

_TOO_OLD = (
    f"swapper.OffloadedCache needs transformers 5.15 or newer, and this is {transformers.__version__}, whose cache has "
    "other layers: pip install -U transformers"
)
try:
    from transformers.cache_utils import (
        CacheLayerMixin,
        DynamicLayer,
        DynamicSlidingWindowLayer,
        LinearAttentionAndFullAttentionLayer,
        LinearAttentionAndSlidingWindowAttentionLayer,
        LinearAttentionCacheLayerMixin,
        LinearAttentionLayer,
    )
except ImportError as error:
    raise ImportError(_TOO_OLD) from error
if "tokens_to_remove" not in inspect.signature(DynamicLayer.crop).parameters:  # Before, it was what is to be left.
    raise ImportError(_TOO_OLD)
if TYPE_CHECKING:
    from transformers.cache_utils import DummyLayer
else:  # transformers 5.20, the last for Python 3.10, has none.
    DummyLayer = getattr(transformers.cache_utils, "DummyLayer", None)

__all__ = ["AnyLayer", "OffloadedLayer", "OffloadedSlidingLayer", "OnDrive", "offloaded"]

log = logging.getLogger(__name__)

_FunctionT = TypeVar("_FunctionT", bound=Callable[..., object])
AnyLayer: TypeAlias = CacheLayerMixin | LinearAttentionCacheLayerMixin | DummyLayer


def _not_compiled(function: _FunctionT) -> _FunctionT:
    """Leave a function as it is where a model is compiled: `torch.compiler.disable`, typed."""
    return cast(_FunctionT, torch.compiler.disable(function))


def _dtype_of_values(keys: torch.dtype, values: torch.dtype) -> torch.dtype:
    """The dtype of the empty tensor to which transformers joins values: before 5.24 it was that of the keys."""
    layer = DynamicLayer()
    layer.lazy_initialization(*(torch.empty(0, dtype=dtype, device="meta") for dtype in (keys, values)))
    assert layer.values is not None
    return layer.values.dtype


class _NoGraph(torch.autograd.Function):
    """Gives a tensor the `requires_grad` that it would have, and refuses a backward, which would miss the graph."""

    @staticmethod
    def forward(ctx: Any, assembled: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return assembled

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> None:
        raise SwapError("keys and values in an OffloadedCache have no graph; use a DynamicCache to train")


class OnDrive(DynamicLayer):
    """The base of all layers with keys and values."""

    def __init__(self, records: TokenRecords, window: int | None = None) -> None:
        self._records = records
        self._window = window
        self._tokens = LayerTokens(records, window)
        self._lead = self._trail = 0  # Tokens that the tensor has which `keys` is a slice of: see the note above.

    def lazy_initialization(self, *tokens: Any, **states: Any) -> None:
        """Take note of dtype and device of keys and values; or make states, which are given by name."""
        if isinstance(self, LinearAttentionLayer) and states:
            LinearAttentionLayer.lazy_initialization(self, **states)
            return
        keys, values = tokens
        self.dtype, self.device = keys.dtype, keys.device
        self._joined_to = keys.dtype, _dtype_of_values(keys.dtype, values.dtype)
        self._records.lock_for(keys.device)
        self.is_initialized = True

    @_not_compiled
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values, and give all of them, in new memory."""
        tokens = key_states, value_states
        self._records.check()
        refuse_in_graph(key_states.device)
        if self._tokens.likes and (refusal := self._tokens.refusal(tokens)):
            raise ValueError(f"OffloadedCache: {refusal}")
        with self._records.changing(), torch.no_grad():
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            if not self._tokens.likes:
                self._tokens.begin(tokens, self._joined_to)
            likes = self._tokens.likes
            keys, values = self._updated([t.detach().to(like.dtype) for t, like in zip(tokens, likes, strict=True)])
        if torch.is_grad_enabled() and any(each.requires_grad for each in tokens):
            keys = _NoGraph.apply(keys, key_states)
            values = _NoGraph.apply(values, value_states)
        return keys, values

    def _updated(self, tokens: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        whole = self._assembled(tokens)
        self._tokens.append(tokens)
        self._lead = self._trail = 0
        return whole

    def _assembled(self, new: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Give what is on the drive, and then the new tokens."""
        count = self._tokens.count
        # What the layer before gave is free by now, and the heap keeps it.
        total = count + new[0].shape[2]
        self._records.freed.add(sum(like.element_size() * _numel(like, total) for like in self._tokens.likes))
        whole = []
        for like, tokens in zip(self._tokens.likes, new, strict=True):
            batch, heads, _, width = like.shape
            whole.append(like.new_empty((batch, heads, count + tokens.shape[2], width)))
            whole[-1][:, :, count:].copy_(tokens)
        self._tokens.fill([each[:, :, :count] for each in whole])
        return tuple(whole)

    def _part(self, number: int) -> torch.Tensor | None:
        """Give the keys (0), or the values (1)."""
        self._records.check()
        if not self.is_initialized:
            return None
        if not self._tokens.likes:
            return torch.tensor([], dtype=self._joined_to[number], device=self.device)
        refuse_in_graph(self.device)
        with self._records.changing(), torch.no_grad():
            batch, heads, _, width = self._tokens.likes[number].shape
            count = self._tokens.count
            whole = self._tokens.likes[number].new_empty((batch, heads, self._lead + count + self._trail, width))
            part = whole[:, :, self._lead : self._lead + count]
            outs: list[torch.Tensor | None] = [None] * len(self._tokens.likes)
            outs[number] = part
            self._tokens.fill(outs)
            return part

    @_not_compiled
    @torch.no_grad()
    def copy(self, records: TokenRecords) -> OnDrive:
        """Give a layer of another cache, of `records`, with the same tokens."""
        copied = self.__class__.__new__(self.__class__)
        tokens = LayerTokens(records, self._window)
        own = {"_records": records, "_tokens": tokens}
        vars(copied).update({name: copy.deepcopy(value) for name, value in vars(self).items() if name not in own})
        vars(copied).update(own)
        if self._tokens.likes:
            refuse_in_graph(self.device)
            with self._records.changing(), records.changing():
                records.lock_for(self.device)
                tokens.begin(self._tokens.likes, [like.dtype for like in self._tokens.likes])
                tokens.append(self._assembled([like[:, :, :0] for like in self._tokens.likes]))
        return copied

    @property
    @_not_compiled
    def keys(self) -> torch.Tensor | None:
        """All keys, `(batch, heads, tokens, width)`, in new memory at every access; None before the first tokens."""
        return self._part(0)

    @keys.setter
    def keys(self, keys: torch.Tensor | None) -> None:
        self._refuse(keys)

    @property
    @_not_compiled
    def values(self) -> torch.Tensor | None:
        """All values: see `keys`."""
        return self._part(1)

    @values.setter
    def values(self, values: torch.Tensor | None) -> None:
        self._refuse(values)

    @staticmethod
    def _refuse(tensor: torch.Tensor | None) -> None:
        if tensor is not None:  # `CacheLayerMixin` sets them to None.
            raise SwapError("keys and values of an OffloadedCache are on the drive; call update() to add tokens")

    def get_seq_length(self) -> int:
        """Give the number of tokens; 0 of a batch without rows, as a layer of transformers does."""
        return self._tokens.count if self._tokens.likes and self._tokens.likes[0].shape[0] else 0

    def offload(self) -> None:
        """Do nothing: it is."""

    def prefetch(self) -> None:
        """Do nothing: layers are read ahead anyway."""

    @_not_compiled
    def reset(self) -> None:
        """Drop all tokens."""
        with self._records.changing():
            self.forget()
            self._tokens.clear()

    def forget(self) -> None:
        """Be as new, when the records are gone."""
        if isinstance(self, LinearAttentionLayer):
            LinearAttentionLayer.reset(self)
        self._tokens.count, self._tokens.likes = 0, ()
        self._lead = self._trail = 0
        self.is_initialized = False
        if hasattr(self, "cumulative_length"):
            self.cumulative_length = 0

    @_not_compiled
    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Let the batch have these rows of what it has."""
        if isinstance(self, LinearAttentionLayer):
            LinearAttentionLayer.reorder_cache(self, beam_idx)
        if self.get_seq_length() > 0:
            self._select(self._rows().index_select(0, beam_idx.cpu()))

    @_not_compiled
    def batch_repeat_interleave(self, repeats: int) -> None:
        """Have each row of the batch so many times."""
        if self.get_seq_length() > 0:
            self._select(self._rows().repeat_interleave(repeats))

    @_not_compiled
    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows of the batch."""
        if self.get_seq_length() > 0:
            self._select(self._rows()[indices.cpu() if isinstance(indices, torch.Tensor) else indices])

    def _rows(self) -> torch.Tensor:
        return torch.arange(self._tokens.likes[0].shape[0], device="cpu")

    def _select(self, rows: torch.Tensor) -> None:
        with self._records.changing():
            self._tokens.select(rows)
            self._lead = self._trail = 0

    @_not_compiled
    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens: `-tokens_to_remove` of them."""
        self._crop_states(tokens_to_remove)
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}) is not supported; give a negative number, of the tokens to remove"
            )
        if tokens_to_remove < 0 and self.is_initialized:
            self._keep(slice(None, tokens_to_remove))

    def _crop_states(self, tokens_to_remove: int) -> None:
        if isinstance(self, LinearAttentionLayer):
            if not self.record_past:
                raise RuntimeError("crop() needs what was before: call activate_past_recording() first")
            with self._records.changing():
                LinearAttentionLayer.crop(self, tokens_to_remove)

    def _keep(self, part: slice) -> None:
        """Keep a part of the tokens."""
        with self._records.changing():
            count = self._tokens.count
            kept = range(count)[part]
            first = kept.start if kept else count
            self._tokens.drop(first, last=False)
            self._tokens.drop(count - first - len(kept), last=True)
            self._lead += first
            self._trail += count - first - len(kept)


class OffloadedLayer(OnDrive):
    """`DynamicLayer` with its keys and values on the drive.

    Args:
        records: of the cache.
    """

    def __init__(self, records: TokenRecords) -> None:
        super().__init__(records)
        DynamicLayer.__init__(self)


class OffloadedSlidingLayer(OnDrive, DynamicSlidingWindowLayer):
    """`DynamicSlidingWindowLayer` with its keys and values on the drive.

    Args:
        records: of the cache.
        sliding_window: tokens that are attended to.
    """

    def __init__(self, records: TokenRecords, sliding_window: int) -> None:
        OnDrive.__init__(self, records, sliding_window)
        DynamicSlidingWindowLayer.__init__(self, sliding_window=sliding_window)

    def lazy_initialization(self, *tokens: Any, **states: Any) -> None:
        """As for all layers."""
        super().lazy_initialization(*tokens, **states)
        self._sliding_window_tensor = self._sliding_window_tensor.to(self.device)

    def get_seq_length(self) -> int:
        """Give the number of tokens that were seen."""
        return int(self.cumulative_length)

    def _updated(self, tokens: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        new = tokens[0].shape[2]
        whole = self._assembled(tokens)
        total = self._tokens.count + new
        self.cumulative_length += new
        kept = total if self.record_past else len(range(total)[-self.sliding_window + 1 :])
        self._tokens.drop(total - kept, last=False)
        self._tokens.append([each[:, :, max(new - kept, 0) :] for each in tokens])
        self._lead, self._trail = total - kept, 0
        if not self.record_past:
            return whole
        visible = self.sliding_window - 1 + new
        return tuple(each[:, :, -visible:, :] for each in whole)

    @_not_compiled
    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens, and those before the window."""
        if self.get_seq_length() < self.sliding_window:
            super().crop(tokens_to_remove)
            self.cumulative_length = self._tokens.count
            return
        self._crop_states(tokens_to_remove)
        if not self.record_past:
            raise RuntimeError(
                "crop() needs the tokens before the window once that is full: call activate_past_recording() first"
            )
        if tokens_to_remove > 0:
            raise RuntimeError(f"crop({tokens_to_remove}): give a negative number, of the tokens to remove")
        first = -self.sliding_window + 1 + tokens_to_remove
        self._keep(slice(first, tokens_to_remove or None))
        self.cumulative_length += tokens_to_remove


# Bases of transformers do not agree on types of attributes, in its own hybrid layers neither.
class OffloadedHybridLayer(OffloadedLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc, override]
    """`LinearAttentionAndFullAttentionLayer` with its keys and values on the drive; its states stay in memory."""

    def __init__(self, records: TokenRecords, number_of_states: int) -> None:
        OffloadedLayer.__init__(self, records)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)


class OffloadedHybridSlidingLayer(  # type: ignore[misc, override]
    OffloadedSlidingLayer, LinearAttentionAndSlidingWindowAttentionLayer
):
    """`LinearAttentionAndSlidingWindowAttentionLayer` with its keys and values on the drive; its states stay."""

    def __init__(self, records: TokenRecords, sliding_window: int, number_of_states: int) -> None:
        OffloadedSlidingLayer.__init__(self, records, sliding_window)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)


def _numel(like: torch.Tensor, count: int) -> int:
    batch, heads, _, width = like.shape
    return batch * heads * count * width


def offloaded(layer: AnyLayer, records: TokenRecords) -> AnyLayer:
    """Give the layer that stands for `layer`, which is new.

    One that keeps no keys and values is itself; so is one of a class that is not known, which the log says.
    """
    kind = type(layer)
    if kind is DynamicLayer:
        return OffloadedLayer(records)
    if isinstance(layer, DynamicSlidingWindowLayer) and kind is DynamicSlidingWindowLayer:
        return OffloadedSlidingLayer(records, layer.sliding_window)
    if isinstance(layer, LinearAttentionAndFullAttentionLayer) and kind is LinearAttentionAndFullAttentionLayer:
        return OffloadedHybridLayer(records, layer.number_of_states)
    if kind is LinearAttentionAndSlidingWindowAttentionLayer:
        assert isinstance(layer, LinearAttentionAndSlidingWindowAttentionLayer)
        return OffloadedHybridSlidingLayer(records, layer.sliding_window, layer.number_of_states)
    if kind not in (LinearAttentionLayer, DummyLayer):
        warn_once(log, f"OffloadedCache: what layers of class {kind.__name__} keep stays in memory")
    return layer
