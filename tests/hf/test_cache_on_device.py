"""`OffloadedCache` on an accelerator: the tensors of a `DynamicCache`, by copies that the host does not wait for."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
from pathlib import Path

import pytest
import torch
from accelerators import keep_busy, simulate

pytest.importorskip("transformers")

from cache_pairs import Pair, same
from interrupts import interrupted_at
from sampling import places
from transformers import DynamicCache

import swapper
from swapper.errors import SwapError
from swapper.io.devices import Copy, DeviceCopies, Event


def config_of(path: Path, pool: str) -> swapper.OffloadConfig:
    return swapper.OffloadConfig(nvme_path=path, pool_bytes=pool, bucket_bytes="16KiB")


@pytest.mark.sampled(8)
@pytest.mark.parametrize("pool", ["64KiB", "1MiB"])
@pytest.mark.parametrize("seed", range(12))
@torch.no_grad()
def test_any_operations_give_the_tensors_of_a_dynamic_cache(
    seed: int, pool: str, nvme_path: Path, leaves_nothing: None, device: str
) -> None:
    draw = random.Random(seed)
    pair = Pair(draw, config_of(nvme_path, pool), device)
    steps = [pair.update] * 6 + [pair.crop, pair.reorder, pair.repeat, pair.select, pair.reset, pair.record_past]
    with pair.ours:
        for _ in range(16):
            draw.choice([*steps, pair.copied])()
            if draw.random() < 0.25:
                pair.compare()
        pair.compare()


@pytest.mark.parametrize("copied", [False, True], ids=["cache", "copy"])
@torch.no_grad()
def test_the_host_waits_for_no_copy_where_the_pool_has_room(
    copied: bool, nvme_path: Path, leaves_nothing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lazy device does nothing before somebody waits for it, so that what came first is not done in the end."""
    sim_device = simulate("sim-lazy", monkeypatch)
    new = torch.randn(8, 2, 2, 2, 2, 1, 16, device="sim")
    prompt = torch.randn(2, 2, 2, 300, 16, device="sim")
    plain = DynamicCache()
    with swapper.OffloadedCache(config_of(nvme_path, "4MiB")) as made, contextlib.ExitStack() as stack:
        given = [made.update(*prompt, layer) for layer in range(2)]
        cache = stack.enter_context(copy.deepcopy(made)) if copied else made
        swapper_copies = DeviceCopies(torch.device("sim", 0))
        torch.accelerator.synchronize()
        keep_busy("sim", 10)
        first = swapper_copies.reached()
        assert first is not None
        for tokens in new:
            given += [cache.update(*tokens[layer], layer) for layer in range(2)]
        assert not first.done(), "the host has waited for the device"
        expected = [plain.update(*prompt, layer) for layer in range(2)]
        expected += [plain.update(*tokens[layer], layer) for tokens in new for layer in range(2)]
        for ours, theirs in zip(itertools.chain(*given), itertools.chain(*expected), strict=True):
            assert same(ours, theirs)
    assert sim_device.violations() == []


@torch.no_grad()
def test_a_graph_that_is_captured_refuses_it_before_anything_changes(
    nvme_path: Path, leaves_nothing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate("sim-lazy", monkeypatch)
    tokens = torch.randn(2, 2, 2, 9, 16, device="sim")
    with swapper.OffloadedCache(config_of(nvme_path, "64KiB")) as cache:
        cache.update(*tokens, 0)
        with monkeypatch.context() as patch:
            module = torch.get_device_module(tokens.device)
            patch.setattr(module, "is_current_stream_capturing", lambda: True, raising=False)
            for use in (lambda: cache.update(*tokens, 0), lambda: cache.layers[0].keys, lambda: copy.deepcopy(cache)):
                with pytest.raises(SwapError, match="CUDA graph is being captured"):
                    use()
        assert same(cache.layers[0].keys, tokens[0])


@pytest.mark.parametrize("layers", [1, 3])
@torch.no_grad()
def test_a_device_may_be_behind_for_as_long_as_it_likes(
    layers: int, nvme_path: Path, leaves_nothing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No copy is over before somebody waits for it: two caches in a pool of four records, which all are copied."""
    simulate("sim-lazy", monkeypatch)
    waited: set[Event] = set()
    wait_quietly = Copy.wait_quietly

    def wait(transfer: Copy) -> None:
        wait_quietly(transfer)
        waited.add(transfer.event)

    monkeypatch.setattr(Copy, "wait_quietly", wait)
    monkeypatch.setattr(Copy, "done", lambda transfer: transfer.event in waited)
    config = config_of(nvme_path, "64KiB")
    with swapper.OffloadedCache(config) as first, swapper.OffloadedCache(config) as second:
        pairs = [(cache, DynamicCache()) for cache in (first, second)]
        for count in (120, 1, 40, 1):
            for layer, (ours, plain) in itertools.product(range(layers), pairs):
                tokens = torch.randn(2, 2, 2, count, 16, device="sim")
                assert all(map(same, ours.update(*tokens, layer), plain.update(*tokens, layer)))


@pytest.mark.long
@torch.no_grad()
def test_ctrl_c_leaves_all_or_nothing_or_a_cache_that_refuses(
    nvme_path: Path, leaves_nothing: None, device: str
) -> None:
    """What a device still copies when a call is cut off has its buffer until it is over, whoever comes next."""
    config = config_of(nvme_path, "64KiB")
    tokens = torch.randn(2, 2, 2, 90, 16, device=device)
    refused = 0
    with swapper.OffloadedCache(config) as other:
        for n in places(every=13, sample=40):
            with swapper.OffloadedCache(config) as ours:
                ours.update(*tokens, 0)
                keep_busy(device, 100)
                interrupted = interrupted_at(n, lambda: ours.update(*tokens, 0), "hf/")
                other.update(*tokens, 0)
                assert same(other.layers[0].keys, tokens[0])
                other.reset()
                try:
                    count = ours.get_seq_length()
                    assert same(ours.layers[0].values, torch.cat([tokens[1]] * (count // 90), 2))
                except SwapError:
                    refused += 1
                if not interrupted:
                    break
    assert refused > 2
