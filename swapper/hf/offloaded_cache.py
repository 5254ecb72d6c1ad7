"""`OffloadedCache`: a `DynamicCache` of transformers whose keys and values are on the drive."""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache

from swapper.api.arguments import ConfigLike, as_config
from swapper.errors import ConfigError, SwapError
from swapper.hf.cache_layers import OffloadedLayer, OnDrive, offloaded
from swapper.hf.token_records import TokenRecords
from swapper.metrics import Metrics, Moves, moves_of
from swapper.tensors.grad_modes import outside_of_inference

__all__ = ["CacheStats", "OffloadedCache"]


@dataclass(frozen=True)
class CacheStats(Moves):
    """The work of an `OffloadedCache` since it was made. Sizes are bytes, times seconds.

    Attributes:
        stored_bytes: length of all records now, on the drive or in the pool.
        pool_bytes, pool_used_bytes, pool_peak_bytes: the most of the pool that records may hold; what they hold now;
            the most that they ever did.
    """

    stored_bytes: int = 0
    pool_bytes: int = 0
    pool_used_bytes: int = 0
    pool_peak_bytes: int = 0


class OffloadedCache(DynamicCache):
    """Keeps keys and values of all layers on the drive: `model.generate(..., past_key_values=OffloadedCache(config))`.

    Everything that a `DynamicCache` does works, with the same bits. One layer's keys and values are in memory at a
    time, while that layer uses them; those of the next are read ahead into the pool. See docs/inference.md.

    Args:
        config: an `OffloadConfig`, or what makes one: the path of a YAML or JSON file, or a mapping. `nvme_path` names
            the drive, and `bucket_bytes` is the longest a record may be, if that is less than 16 MiB. Caches, models
            and optimizers with the same `OffloadConfig` object share one pool: all caches together have a quarter of
            it, or all of it if the config sends nothing else to the drive.
        model_config: the config of the model, which says which layers have a sliding window. None: that of the model
            that uses the cache first.

    Raises:
        ConfigError: there is no `nvme_path`, the pool is too small, or `model_config` is something else.
        SwapIOError: the drive failed.
    """

    is_compileable = False

    def __init__(self, config: ConfigLike, model_config: PreTrainedConfig | None = None) -> None:
        if isinstance(config, PreTrainedConfig):
            raise ConfigError(
                "config: this is the config of a model, which names no drive; call "
                "swapper.OffloadedCache(offload_config, model.config)"
            )
        if model_config is not None and not isinstance(model_config, PreTrainedConfig):
            raise ConfigError(
                f"model_config: {type(model_config).__name__} is not the config of a model; give model.config, or "
                "nothing: the model that uses the cache has one"
            )
        settings = as_config(config)
        with outside_of_inference():  # What is made here is used outside of that mode too.
            self._records = TokenRecords(settings)
        self._config = settings  # The object itself: a copy shares its pool.
        self._layers: list[Any] = []
        self._knows_layers = True  # Until the end of this.
        super().__init__()
        # Called without arguments, for each layer of a model whose config is not known.
        self.layer_class_to_replicate = cast(type[OffloadedLayer], functools.partial(OffloadedLayer, self._records))
        self._knows_layers = False
        if model_config is not None:
            self._make_layers(model_config)

    @property
    def layers(self) -> list[Any]:
        """A layer for each of the model, once a model has used the cache, or its config was given."""
        if not self._knows_layers and not self._layers and (config := _config_of_caller()) is not None:
            self._make_layers(config)
        return self._layers

    @layers.setter
    def layers(self, layers: list[Any]) -> None:
        self._layers = layers

    def _make_layers(self, config: PreTrainedConfig) -> None:
        plain = DynamicCache(config=config)
        self._knows_layers = True
        if plain.layer_class_to_replicate is None:
            self.layer_class_to_replicate = None
        self._layers.extend(offloaded(layer, self._records) for layer in plain.layers)

    def reset(self) -> None:
        """Drop all tokens, and what has failed: the cache is as new."""
        self._records.clear()
        for layer in self._layers:
            if hasattr(layer, "forget"):
                layer.forget()
            else:
                layer.reset()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Let the batch have these rows of what it has, in all layers or, after an exception, in none that is given."""
        with self._records.changing_together():
            super().reorder_cache(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens: see `DynamicCache`; and `reorder_cache` for exceptions."""
        with self._records.changing_together():
            super().crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Have each row of the batch so many times. As `reorder_cache`."""
        with self._records.changing_together():
            super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows of the batch. As `reorder_cache`."""
        with self._records.changing_together():
            super().batch_select_indices(indices)

    @property
    def metrics(self) -> Metrics:
        """Counters since this was made."""
        return self._records.metrics

    def stats(self) -> CacheStats:
        """Counters since this was made."""
        limit_bytes, used_bytes, peak_bytes = self._records.pool_bytes
        return CacheStats(
            **dataclasses.asdict(moves_of(self.metrics)),
            stored_bytes=self._records.stored_bytes,
            pool_bytes=limit_bytes,
            pool_used_bytes=used_bytes,
            pool_peak_bytes=peak_bytes,
        )

    def close(self) -> None:
        """Delete the files and give the memory back; any use after this is an error. Idempotent."""
        self._records.close()

    def __enter__(self) -> OffloadedCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, object]) -> OffloadedCache:
        """Give a cache of its own with the same tokens, as for prompts that begin alike: in new records.

        Raises:
            SwapError: this is closed, or of no use any more; or the states of a layer can be copied by nobody.
            SwapIOError: the drive is full, or failed. The copy is closed then.
        """
        self._records.check()
        copied = OffloadedCache(self._config)
        try:
            copied._knows_layers = self._knows_layers
            if self.layer_class_to_replicate is None:
                copied.layer_class_to_replicate = None
            for layer in self._layers:
                of_it = layer.copy(copied._records) if isinstance(layer, OnDrive) else copy.deepcopy(layer, memo)
                copied._layers.append(of_it)
        except BaseException:
            copied.close()
            raise
        return copied

    def __reduce__(self) -> str:
        raise SwapError("an OffloadedCache cannot be pickled: its files belong to this process; use copy.deepcopy")


def _config_of_caller() -> PreTrainedConfig | None:
    """Give the config of the model that calls this, the innermost one; None if there is none.

    Looks into frames of transformers only: to look at the names of a frame keeps what they name until it ends.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("transformers"):
            caller, config = frame.f_locals.get("self"), frame.f_locals.get("config")
            if isinstance(caller, PreTrainedModel):
                return caller.config
            if isinstance(config, PreTrainedConfig):  # As in functions that make masks.
                return config
        frame = frame.f_back
    return None
