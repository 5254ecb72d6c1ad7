"""Several threads that use one config: they share what its users share in one thread, and end in the same bits."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import swapper
from swapper import OffloadConfig
from swapper.session import Shared


@pytest.fixture
def config(nvme_path: Path, leaves_nothing: None) -> OffloadConfig:
    return OffloadConfig(nvme_path=nvme_path, pool_bytes="1MiB", bucket_bytes="16KiB", offload_param={"device": "nvme"})


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """What each of `calls` returns, in a thread of its own. Raises the first exception of one."""
    results: list[Any] = [None] * len(calls)
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


def offloaded(config: OffloadConfig) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    swapper.offload(model, config=config)
    return model


def test_models_that_come_at_once_share_one_pool(config: OffloadConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each made one of its own, so that together they had twice the memory."""
    meeting = threading.Barrier(2)
    create = Shared.__init__

    def met(*args: Any) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait(0.5)  # For the other one, if it comes here at all.
        create(*args)

    monkeypatch.setattr(Shared, "__init__", met)
    one, other = in_threads(lambda: offloaded(config), lambda: offloaded(config))
    assert one.swapper.store is other.swapper.store
    for model in (one, other):
        model.swapper.close()
    assert Shared.existing(config) is None


@pytest.mark.parametrize("made", ["model", "cache"])
def test_the_last_model_goes_while_something_else_comes(
    made: str, config: OffloadConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was found is closed before the other holds it. It raised that the pool is closed."""
    last = offloaded(config)
    find = Shared.of.__func__  # type: ignore[attr-defined]

    def found(*args: Any) -> Shared:
        shared: Shared = find(*args)
        monkeypatch.undo()
        last.swapper.close()
        return shared

    monkeypatch.setattr(Shared, "of", classmethod(found))
    if made == "model":
        model = offloaded(config)
        assert model(torch.ones(64)).isfinite().all()
        model.swapper.close()
    else:
        pytest.importorskip("transformers")
        with swapper.OffloadedCache(config) as cache:
            keys = torch.randn(1, 2, 40, 16)
            assert torch.equal(cache.update(keys, keys, 0)[0], keys)
    assert Shared.existing(config) is None


def test_caches_of_one_config_have_one_part_of_the_pool(config: OffloadConfig) -> None:
    """A quarter of it, however many there are, and in whatever order they go; a model keeps no part."""
    pytest.importorskip("transformers")
    model = offloaded(config)
    shared = Shared.existing(config)
    assert shared is not None
    counts = []
    caches = []
    for _ in range(3):
        caches.append(swapper.OffloadedCache(config))
        counts.append(shared.held_bytes)
    for cache in (caches[1], caches[0], caches[2]):
        cache.close()
        counts.append(shared.held_bytes)
    part = config.pool_bytes // 4
    assert counts == [part, part, part, part, part, 0]
    model.swapper.close()
    assert Shared.existing(config) is None
