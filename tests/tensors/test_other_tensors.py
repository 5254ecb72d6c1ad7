"""A parameter stays in memory that a tensor of the user shares, and is evicted if that tensor goes in a moment."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from models import WIDTH, Mlp
from torch import nn
from twins import bits, config_for, small_records, swapper_of

import swapper
from swapper.tensors import other_tensors
from swapper.tensors.other_tensors import OtherTensors, Patience

NAME = "blocks.2.0.weight"
GOES_AFTER_S = 0.1
"""Longer than any two looks at all tensors take; much shorter than what is waited."""


def saved(p: nn.Parameter) -> torch.Tensor:
    """Only autograd holds the view that Python code had."""
    return torch.ones_like(p).requires_grad_() * p.data


def in_cycle(p: nn.Parameter) -> list[Any]:
    held: list[Any] = [p.data[1:]]
    held.append(held)
    return held


KINDS: dict[str, Callable[[nn.Parameter], object]] = {
    "a view": lambda p: p.detach(),
    "a part": lambda p: p.data[1:2, 3:],
    "another parameter": lambda p: nn.Parameter(p.data),
    "saved": saved,
    "an array": lambda p: p.detach().numpy(),
    "DLPack": lambda p: np.from_dlpack(p.detach()),
    "a buffer of an array": lambda p: memoryview(p.detach().numpy()),
    "a storage": lambda p: p.untyped_storage(),
}


def offload(model: nn.Module, nvme_path: Path) -> set[str]:
    with small_records():
        swapper.offload(model, config=config_for(nvme_path))
    return set(swapper_of(model).stays)


@contextmanager
def held_for_a_moment(held: list[object]) -> Iterator[None]:
    """Another thread empties `held`, the only reference to what is in it."""
    thread = threading.Timer(GOES_AFTER_S, held.clear)
    thread.start()
    yield
    thread.join()


@pytest.mark.parametrize("kind", KINDS)
def test_what_goes_in_a_moment_leaves_no_parameter_in_memory(kind: str, nvme_path: Path) -> None:
    model = Mlp(4)
    expected = bits(dict(model.named_parameters()))
    with held_for_a_moment([KINDS[kind](model.get_parameter(NAME))]):
        assert offload(model, nvme_path) == set()
    swapper_of(model).close(keep_values=True)
    assert bits(dict(model.named_parameters())) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_what_goes_in_a_moment_leaves_nothing_that_was_built_on_the_drive(kind: str, nvme_path: Path) -> None:
    config = config_for(nvme_path)
    with small_records(), swapper.init(config):
        model = Mlp(4)
    with held_for_a_moment([KINDS[kind](model.get_parameter(NAME))]), small_records():
        swapper.offload(model, config=config)
        assert not swapper_of(model).stays
    swapper_of(model).close()


def test_a_cycle_that_nobody_has_leaves_no_parameter_in_memory(nvme_path: Path) -> None:
    model = Mlp(4)
    in_cycle(model.get_parameter(NAME))
    assert offload(model, nvme_path) == set()
    swapper_of(model).close()


@pytest.mark.parametrize("kind", [*KINDS, "in a cycle"])
def test_the_parameter_stays_that_is_shared(kind: str, nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swapper.parameter.records.PATIENCE_S", 0.01)
    model = Mlp(4)
    held = (KINDS | {"in a cycle": in_cycle})[kind](model.get_parameter(NAME))
    graph = model(torch.ones(2, WIDTH)).sum()  # Has views of all parameters, which do not count.
    assert offload(model, nvme_path) == {NAME}
    del held, graph
    swapper_of(model).close()


@pytest.mark.long
def test_the_parameter_stays_that_a_frozen_tensor_shares(thaws: None, nvme_path: Path) -> None:
    """The garbage collector lists no tensor that was there when `gc.freeze` was called."""
    model = Mlp(4)
    held = model.get_parameter(NAME).detach()
    gc.freeze()
    assert offload(model, nvme_path) == {NAME}
    held.zero_()
    assert not model.get_parameter(NAME).any()
    swapper_of(model).close()


def test_the_parameter_stays_of_which_a_view_was_handed_on(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a view is waited for another is made of it."""
    model = Mlp(4)
    held = [model.get_parameter(NAME).data]

    def hand_on(seconds: float) -> None:
        held[0] = held[0].detach()

    monkeypatch.setattr("time.sleep", hand_on)
    assert offload(model, nvme_path) == {NAME}
    swapper_of(model).close()


def test_the_parameters_stay_of_which_views_come_and_go(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No endless wait."""
    monkeypatch.setattr("swapper.parameter.records.PATIENCE_S", 0.1)
    model = Mlp(4)
    held = {name: p.data for name, p in model.named_parameters()}

    def replace(seconds: float) -> None:
        held.update((name, view.detach()) for name, view in list(held.items()))

    monkeypatch.setattr("time.sleep", replace)
    with pytest.raises(swapper.ConfigError, match="cannot move a byte"):
        offload(model, nvme_path)


def test_a_process_group_that_has_not_let_go_of_what_it_sent(nvme_path: Path) -> None:
    """Its thread has the tensors of a broadcast until it runs again, which may be after the call has returned."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for _ in range(20):
            model = Mlp(4)
            for p in model.parameters():
                torch.distributed.broadcast(p.detach(), 0)
            assert offload(model, nvme_path) == set()
            swapper_of(model).close()
    finally:
        torch.distributed.destroy_process_group()


def test_a_storage_that_the_user_keeps_follows_the_parameter(nvme_path: Path) -> None:
    """Its memory is in the pool, where no other parameter may come meanwhile."""
    model = Mlp(24)
    expected = bits(dict(model.named_parameters()))
    with small_records():
        swapper.offload(model, config=config_for(nvme_path, pool_bytes="96KiB"))
    x = torch.ones(2, WIDTH)
    with torch.no_grad():
        model(x)
        storage = model.get_parameter("blocks.12.0.weight").untyped_storage()
        for _ in range(3):
            model(x)
            assert {name: bits(p.detach()) for name, p in model.named_parameters()} == expected
        storage.fill_(0)
        model(x)
    expected["blocks.12.0.weight"] = bits(torch.zeros(WIDTH, WIDTH))
    assert {name: bits(p.detach()) for name, p in model.named_parameters()} == expected
    del storage
    swapper_of(model).close()


def test_looks_through_many_objects_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each view is handed on while it is waited for, and a look takes as long as among a million objects."""
    parameter = nn.Parameter(torch.ones(8))
    held = [parameter.data]
    now_s, looks = [0.0], [0]
    look = other_tensors._tensors_by_storage

    def sleep(seconds: float) -> None:
        now_s[0] += seconds
        held[0] = held[0].detach()

    def slow_look() -> Any:
        now_s[0] += 0.6
        looks[0] += 1
        return look()

    monkeypatch.setattr(other_tensors, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now_s[0]))
    monkeypatch.setattr(other_tensors, "_tensors_by_storage", slow_look)
    assert OtherTensors(Patience(1.0)).view(parameter)
    assert looks[0] > 4 and now_s[0] < 6
