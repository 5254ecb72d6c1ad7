"""A `DynamicCache` of transformers and an `OffloadedCache`, to which the same is done, and compared to the bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, MistralConfig

from swapper import OffloadConfig, OffloadedCache, SwapError

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}


def same(ours: torch.Tensor | None, plain: torch.Tensor | None) -> bool:
    """True if both are None, or have the same bits, dtype, shape and strides."""
    if ours is None or plain is None:
        return ours is plain
    if ours.dtype != plain.dtype or ours.shape != plain.shape:
        return False
    if not ours.numel():
        return True
    if ours.stride() != plain.stride():
        return False
    return torch.equal(ours.cpu().contiguous().view(torch.uint8), plain.cpu().contiguous().view(torch.uint8))


def window_config(windows: list[int | None]) -> MistralConfig:
    """Of a model with a sliding window of so many tokens in each layer; None: without."""
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    window = next((window for window in windows if window is not None), None)
    return MistralConfig(
        **SMALL, num_key_value_heads=2, num_hidden_layers=len(windows), sliding_window=window, layer_types=kinds
    )


class Pair:
    """A `DynamicCache` and ours, to which the same is done."""

    def __init__(self, draw: random.Random, config: OffloadConfig, device: str = "cpu") -> None:
        self.draw, self.device = draw, device
        self.numbers = torch.Generator().manual_seed(draw.getrandbits(32))
        self.layers = draw.randint(1, 3)
        window = draw.choice([1, 2, 5, 16, 40])
        windows = [draw.choice([None, window]) for _ in range(self.layers)]
        model = window_config(windows) if draw.random() < 0.7 else None
        self.plain = DynamicCache(config=model)
        self.ours = OffloadedCache(config, model)
        self.batch, self.heads = draw.randint(1, 3), draw.randint(1, 2)
        self.widths = draw.choice([(16, 16), (8, 24), (1, 5)])
        self.over = False
        self.dtypes = draw.choice([(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.float32, torch.float16)])

    def new(self, count: int) -> tuple[torch.Tensor, ...]:
        """Keys and values of `count` tokens, as a model has them: transposed."""
        shapes = [(self.batch, count, self.heads, width) for width in self.widths]
        tensors = [torch.randn(shape, generator=self.numbers) for shape in shapes]
        return tuple(t.to(self.device, dtype).transpose(1, 2) for t, dtype in zip(tensors, self.dtypes, strict=True))

    def update(self) -> None:
        count = self.draw.choice([1, 1, 1, 2, 7, 40])
        for layer in range(self.layers):
            keys, values = self.new(count)
            ours, plain = self.ours.update(keys, values, layer), self.plain.update(keys, values, layer)
            assert same(ours[0], plain[0])
            assert same(ours[1], plain[1])

    def both(self, call: Callable[[Any], object]) -> bool:
        """Do it to both. False if both refuse."""
        results = []
        for cache in (self.ours, self.plain):
            try:
                results.append((call(cache), None))
            except (ValueError, RuntimeError, IndexError) as error:
                results.append((None, type(error)))
        assert results[0] == results[1]
        return results[0][1] is None

    def crop(self) -> None:
        count = self.draw.choice([0, 1, 2, 9, 70, 500])
        if all(not sliding for sliding in self.plain.is_sliding):
            self.both(lambda cache: cache.crop(-count))
        elif all(layer.record_past for layer in self.plain.layers if hasattr(layer, "record_past")):
            self.both(lambda cache: cache.crop(-min(count, max(self.plain.get_seq_length() - 1, 0))))

    def record_past(self) -> None:
        self.both(lambda cache: cache.activate_past_recording())

    def reorder(self) -> None:
        rows = torch.tensor([self.draw.randrange(self.batch) for _ in range(self.batch)])
        self.both(lambda cache: cache.reorder_cache(rows))

    def repeat(self) -> None:
        times = self.draw.randint(1, 3)
        if self.batch * times <= 6 and self.plain.get_seq_length() > 0:
            self.both(lambda cache: cache.batch_repeat_interleave(times))
            self.batch *= times

    def select(self) -> None:
        if self.plain.get_seq_length() > 0:
            kept = sorted(self.draw.sample(range(self.batch), self.draw.randint(1, self.batch)))
            rows = torch.tensor(kept)
            if self.draw.random() < 0.5:
                rows = torch.zeros(self.batch, dtype=torch.bool).index_fill_(0, rows, True)
            self.both(lambda cache: cache.batch_select_indices(rows))
            self.batch = len(kept)

    def copied(self) -> None:
        """Both go on with a copy of themselves, or what the copies become changes nothing."""
        ours, plain = copy.deepcopy(self.ours), copy.deepcopy(self.plain)
        if self.draw.random() < 0.5:
            (ours, self.ours), self.plain = (self.ours, ours), plain
        else:
            with torch.no_grad():
                for layer in range(len(ours)):
                    ours.update(*self.new(3), layer)
        ours.close()

    def anything(self) -> None:
        """A call that may be wrong. If it is, ours has changed nothing, or refuses all further use: then it is over."""
        batch, draw = self.batch, self.draw
        count = draw.choice([-70, -5, -1, 0, 1, 4])
        rows = torch.tensor([draw.randrange(-1, batch + 1) for _ in range(draw.randint(0, 4))], dtype=torch.long)
        calls: list[Callable[[Any], object]] = [
            lambda cache: cache.crop(count),
            lambda cache: cache.reorder_cache(rows),
            lambda cache: cache.batch_select_indices(rows),
            lambda cache: cache.batch_select_indices(rows.tolist()),
            lambda cache: cache.batch_repeat_interleave(count % 3 - 1),
            lambda cache: cache.layers[count % self.layers].crop(-abs(count)),
            lambda cache: cache.get_mask_sizes(count, self.layers),
            lambda cache: (cache.is_initialized, cache.batch_size, cache.is_linear, cache.is_dummy, len(cache)),
            lambda cache: [cache.is_recording_past(layer) for layer in range(len(cache))],
            lambda cache: cache.get_conv_state(0),
            lambda cache: cache.update_indexer(torch.zeros(1, 1, 1), 0),
        ]
        call = draw.choice(calls)
        tried = copy.deepcopy(self.plain)
        results: list[object] = []
        for cache in (tried, self.ours):
            try:
                results.append(call(cache))
            except Exception as error:
                results.append(type(error))
        if results == [AttributeError, None]:  # transformers' windows fail to drop tokens before there are any.
            assert self.plain.get_seq_length() == 0
        elif isinstance(results[0], type):
            assert results[0] == results[1]
            self.over = self.refuses()
        else:
            assert results[0] == results[1]
            self.plain = tried
            sizes = {len(keys) for keys, *_ in tried if keys is not None}
            self.over = len(sizes) > 1 or sizes == {0}  # Where layers differ, no more tokens fit all of them.
            self.batch = next(iter(sizes), batch)

    def refuses(self) -> bool:
        """True if ours is of no use until it is reset: an error in one layer, after it was done in others."""
        try:
            _ = [layer.keys for layer in self.ours.layers]
        except SwapError as error:
            assert "reset()" in str(error)
            return True
        return False

    def reset(self) -> None:
        if self.draw.random() < 0.3:
            self.both(lambda cache: cache.reset())

    def compare(self) -> None:
        assert len(self.ours) == len(self.plain)
        for layer in range(len(self.plain)):
            for name in ("get_seq_length", "get_max_length"):
                assert getattr(self.ours, name)(layer) == getattr(self.plain, name)(layer), name
            assert self.ours.get_mask_sizes(3, layer) == self.plain.get_mask_sizes(3, layer)
        assert self.ours.is_sliding == self.plain.is_sliding and self.ours.is_croppable == self.plain.is_croppable
        for ours, plain in zip(self.ours, self.plain, strict=True):
            assert same(ours[0], plain[0])
            assert same(ours[1], plain[1])
