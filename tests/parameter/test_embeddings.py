"""Embeddings whose weights stay in files: of those that are looked up the rows are read, and no others."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from twins import bits, config_for, small_records, swapper_of
from weight_files import hollow, write_weights

import swapper
from swapper.metrics import Timeline
from swapper.parameter import embeddings, from_files

ROWS, WIDTH = 401, 64
BLOCK_ROWS = 10


@pytest.fixture(autouse=True)
def _all_move(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Models of tests are small: so are the records, and what stays."""
    monkeypatch.setattr(from_files, "_SMALL_BYTES", 300)
    monkeypatch.setattr(embeddings, "LEAST_BYTES", 2000)
    monkeypatch.setattr(embeddings, "_BLOCK_BYTES", 4 * WIDTH * BLOCK_ROWS)
    with small_records():
        yield


class Lookup(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32, *, tied: bool = False, **kwargs: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, dtype=dtype, **kwargs)
        self.head = nn.Linear(WIDTH, ROWS, bias=False, dtype=dtype)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.table(ids).sin())
        return out


def twins(
    nvme_path: Path, tmp_path: Path, pool_bytes: str | int = "1MiB", experts: str = "auto", **kwargs: Any
) -> tuple[Lookup, Lookup]:
    """A model, and one with its weights in a file."""
    torch.manual_seed(3)
    reference = Lookup(**kwargs)
    state = {"table.weight": reference.table.weight.detach()}
    if reference.head.weight is not reference.table.weight:
        state["head.weight"] = reference.head.weight.detach()
    path = write_weights(tmp_path / "weights.safetensors", state, 40)
    param = {"device": "nvme", "experts": experts}
    config = config_for(nvme_path, pool_bytes=pool_bytes, offload_optimizer={"device": "none"}, offload_param=param)
    model = swapper.offload(hollow(Lookup(**kwargs)), config=config, weights=path)[0]
    assert isinstance(model, Lookup)
    return model, reference


def blocks_read(timeline: Timeline) -> list[int]:
    return [e.record[2] for e in timeline.events() if e.name == "read" and e.record and e.record[1] == "expert"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_lookup_has_the_bits_of_memory_and_reads_the_blocks_of_its_rows(
    dtype: torch.dtype, nvme_path: Path, tmp_path: Path
) -> None:
    model, reference = twins(nvme_path, tmp_path, dtype=dtype, padding_idx=3)
    (fused,) = swapper_of(model).plan.experts.fused
    chance, seen = random.Random(5), set()
    for shape in [(), (1,), (3,), (2, 4), (0,), (2, 0), (1, 1), (40,), (5, 1, 2)]:
        ids = torch.tensor([chance.randrange(ROWS) for _ in range(torch.Size(shape).numel())]).reshape(shape).long()
        ids = ids.int() if chance.random() < 0.3 else ids
        ids = ids.t() if ids.dim() == 2 else ids
        for mode in (torch.no_grad, torch.inference_mode):
            with mode(), Timeline() as timeline:
                found, plain = model.table(ids), reference.table(ids)
            assert bits(found) == bits(plain) and found.stride() == plain.stride()
            assert found.is_inference() == plain.is_inference() and not found.requires_grad
            wanted = {int(row) // fused.rows for row in ids.reshape(-1)}
            assert set(blocks_read(timeline)) == wanted - seen
            seen |= wanted
    for wrong in (-1, ROWS):
        with torch.no_grad(), pytest.raises(IndexError, match="index out of range"):
            model.table(torch.tensor([1, wrong]))
    for wrong in (-ROWS - 1, ROWS):
        with torch.no_grad(), pytest.raises(AssertionError, match="within num_embeddings"):
            nn.functional.embedding(torch.tensor([1]), model.table.weight, padding_idx=wrong)
    swapper_of(model).close()


def least_pool_bytes(nvme_path: Path, tmp_path: Path) -> int:
    with pytest.raises(swapper.ConfigError) as caught:
        twins(nvme_path, tmp_path, pool_bytes="48KiB")
    found = re.search(r"set pool_bytes to at least (\d+)", str(caught.value))
    assert found is not None, caught.value
    return int(found[1])


def test_gradients_have_the_bits_of_memory_in_the_least_pool(nvme_path: Path, tmp_path: Path) -> None:
    model, reference = twins(nvme_path, tmp_path, pool_bytes=least_pool_bytes(nvme_path, tmp_path))
    for frozen in (False, True):
        for each in (model, reference):
            each.zero_grad()
            each.table.weight.requires_grad_(not frozen)
            each(torch.tensor([[7, 99, 7], [0, 41, 8]])).square().sum().backward()
        assert [None if p.grad is None else bits(p.grad) for p in model.parameters()] == [
            None if p.grad is None else bits(p.grad) for p in reference.parameters()
        ]
        with torch.no_grad():
            ids = torch.arange(0, ROWS, 3)
            assert bits(model(ids)) == bits(reference(ids))
    swapper_of(model).close()


def test_what_is_tied_to_a_head_or_changes_in_its_forward_comes_whole(nvme_path: Path, tmp_path: Path) -> None:
    ids = torch.tensor([4, 90])
    model, reference = twins(nvme_path, tmp_path, tied=True)
    assert not swapper_of(model).plan.experts.fused
    with torch.no_grad():
        assert bits(model(ids)) == bits(reference(ids))
    swapper_of(model).close()
    for more in ({"max_norm": 2.0}, {"experts": "whole"}):
        model, _ = twins(nvme_path, tmp_path, **more)  # type: ignore[arg-type]
        assert not swapper_of(model).plan.experts.fused
        swapper_of(model).close()


def test_the_weight_stays_one(nvme_path: Path, tmp_path: Path) -> None:
    model, reference = twins(nvme_path, tmp_path)
    ids = torch.tensor([4, 90, 100])
    with torch.no_grad():
        for use in (
            lambda m: m.table.weight.sum(),
            lambda m: m.table.weight[3],
            lambda m: m.table.weight[ids],
            lambda m: m.table.weight.transpose(0, 1)[5],
            lambda m: nn.functional.embedding(ids, m.table.weight, max_norm=1e9),
            lambda m: torch.embedding(m.table.weight, ids),
            lambda m: torch.compile(m, backend="eager")(ids),
            lambda m: dict(m.state_dict()),
        ):
            assert bits(use(model)) == bits(use(reference))
        with pytest.raises(swapper.SwapError, match=r"transform of torch\.func"):
            torch.vmap(lambda each: nn.functional.embedding(each, model.table.weight))(ids)
    swapper_of(model).close(keep_values=True)
    with torch.no_grad():
        assert bits(model(ids)) == bits(reference(ids))
