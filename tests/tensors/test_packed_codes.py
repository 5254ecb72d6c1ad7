"""Codes of bitsandbytes are packed as it packs them, and known in either form."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch

from swapper.tensors import packed_codes
from swapper.tensors.packed_codes import CodeForm, form_of, pack_codes

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    functional = pytest.importorskip("bitsandbytes.functional")

pytestmark = pytest.mark.filterwarnings("ignore")


def packed_by_bitsandbytes(codes: torch.Tensor, rows: int) -> torch.Tensor:
    shape = torch.Size((rows, 2 * codes.numel() // rows))
    state = functional.QuantState(torch.ones(shape.numel() // 2), shape, None, 2, "nf4", torch.float32)
    packed: torch.Tensor = functional._convert_weight_packed_for_cpu(codes.clone(), state)[0]
    return packed


@pytest.mark.parametrize("seed", range(20))
def test_codes_are_packed_in_place(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(packed_codes, "_TILE_BYTES", draw.choice([1, 5000, 1 << 15]))
    rows, row_bytes = 32 * draw.randint(1, 9), draw.randint(1, 200)
    codes = torch.randint(0, 256, (rows * row_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    want = packed_by_bitsandbytes(codes, rows)
    form, mine = CodeForm(rows, row_bytes), codes.clone()
    form.arrange(mine)
    assert torch.equal(mine, codes)
    assert form.is_other(codes, want) and not form.is_other(codes, codes)
    other = want.clone()
    other.view(-1)[draw.randrange(other.numel())] ^= 1 << draw.randrange(8)
    assert not form.is_other(codes, other) and not form.is_other(codes, want[:, :-1])
    form.packed = True
    form.arrange(mine)
    assert torch.equal(mine, want.view(-1))
    assert form.is_other(mine, codes.view(-1, 1)) and not form.is_other(other.view(-1), codes)


@pytest.mark.parametrize("failing", range(1, 5))
def test_packing_changes_all_or_nothing(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for memory before the first byte is changed, and never after. Several weights: `SpanStore` notes each."""
    codes = torch.randint(0, 256, (256 * 64,), dtype=torch.uint8)
    before, asked = codes.clone(), []
    empty = torch.empty

    def no_memory(*args: Any, **kwargs: Any) -> torch.Tensor:
        asked.append(torch.equal(codes, before))
        if len(asked) == failing:
            raise MemoryError
        return empty(*args, **kwargs)

    monkeypatch.setattr(packed_codes, "_TILE_BYTES", 1)
    monkeypatch.setattr(torch, "empty", no_memory)
    with pytest.raises(MemoryError):
        pack_codes(codes, 256)
    assert torch.equal(codes, before)
    pack_codes(codes, 256)
    assert all(asked) and torch.equal(codes.view(256, -1), packed_by_bitsandbytes(before, 256))


def test_only_whole_blocks_have_two_forms() -> None:
    modules = pytest.importorskip("bitsandbytes.nn")
    for rows, columns, has in ((32, 64, True), (48, 64, False), (64, 3, False)):
        layer = modules.Linear4bit(columns, rows, quant_type="nf4").to("cpu")
        assert (form_of(layer.weight) is not None) == has
    assert form_of(torch.nn.Parameter(torch.ones(32, 64))) is None
    assert form_of(modules.Linear8bitLt(64, 32, has_fp16_weights=False).to("cpu").weight) is None
