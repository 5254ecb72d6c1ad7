"""The codec of `encoding: int8`: what the core makes of a block is what the reference makes of it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from encoded_state import rounded
from training import same_bits

from swapper.io.bf16_codec import RoundingKey
from swapper.optimizer.int8_codec import blocks_of, decode_int8, encode_int8

KEY = RoundingKey("exp_avg", 1, 0)
Coded = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


def encoded(values: torch.Tensor, first: int = 0, key: RoundingKey = KEY) -> Coded:
    codes, scales = torch.empty(values.numel(), dtype=torch.uint8), torch.empty(blocks_of(values.numel()))
    encode_int8(values, codes, scales, first, key)
    return codes, scales


def decoded(coded: Coded) -> torch.Tensor:
    values = torch.empty(coded[0].numel(), dtype=torch.float32)
    decode_int8(*coded, values)
    return values


def same_bytes(one: Coded, other: Coded) -> bool:
    return all(same_bits(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(one, other, strict=True))


def draw(kind: str, numel: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(numel)
    normal = torch.randn(numel, generator=generator)
    wide = torch.exp2(torch.rand(numel, generator=generator) * 60 - 30)
    if kind == "bits":
        bits = torch.randint(-(1 << 31), 1 << 31, (numel,), generator=generator).to(torch.int32).view(torch.float32)
        return torch.where(bits.isfinite(), bits, torch.zeros(()))
    return {
        "normal": normal,
        "squares": normal.square(),
        "any-positive": draw("bits", numel).abs() if kind == "any-positive" else normal,
        "denormal": normal * 1e-41,
        "positive-denormal": (normal * 1e-41).abs(),
        "alike": 1 + normal.abs() * 1e-4,
        "large": (2.4e38 + wide.clamp(max=1) * 1e38) * normal.sign(),
        "positive-large": 2.4e38 + wide.clamp(max=1) * 1e38,
        "wide": wide * normal.sign(),
        "positive-wide": wide,
        "mostly-zero": torch.where(normal > 2, wide, torch.zeros(())),
        "zero": torch.zeros(numel),
    }[kind]


KINDS = (
    "bits", "normal", "squares", "any-positive", "denormal", "positive-denormal", "alike", "large", "positive-large",
    "wide", "positive-wide", "mostly-zero", "zero",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numel", [1, 255, 256, 257, 511, 50_003])
def test_the_core_rounds_as_the_reference(kind: str, numel: int) -> None:
    values = draw(kind, numel)
    for first in (0, 256, 512 * 1001, 256 * ((1 << 35) + 1)):
        key = RoundingKey("exp_avg_sq", first % 7, 3, seed=5)
        assert same_bits(decoded(encoded(values, first, key)), rounded(values, first, key, "int8"))


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_decoded_is_encoded_to_the_same_bytes(kind: str) -> None:
    values = draw(kind, 10_007)
    coded = encoded(values)
    for step in range(2, 6):
        assert same_bytes(encoded(decoded(coded), 256 * step, RoundingKey("other", step, step)), coded)


@pytest.mark.parametrize("blocks", [1, 3, 128, 1000])
def test_bytes_depend_neither_on_cuts_nor_on_threads(blocks: int) -> None:
    values = torch.cat([draw("normal", 150_000), draw("squares", 50_007)])
    torch.set_num_threads(1)
    whole = encoded(values)
    cut = 256 * blocks
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        assert same_bytes(encoded(values), whole)
        parts = [encoded(part, i * cut) for i, part in enumerate(values.split(cut))]
        codes, scales = (torch.cat(each) for each in zip(*parts, strict=True))
        assert same_bytes((codes, scales), whole)
        assert same_bits(decoded(whole), decoded((codes, scales)))


def test_bytes_do_not_depend_on_how_denormals_are_treated() -> None:
    values = torch.cat([draw("denormal", 1024), draw("positive-denormal", 1024), draw("bits", 1024)])
    expected, back = encoded(values), decoded(encoded(values))
    assert torch.set_flush_denormal(True)
    coded = encoded(values)
    found = decoded(coded).view(torch.int32)
    torch.set_flush_denormal(False)
    assert same_bytes(coded, expected)
    assert torch.equal(found, back.view(torch.int32))


def test_bits_depend_on_each_part_of_the_key() -> None:
    values = draw("normal", 4096)
    keys = [("a", 1, 2, 3), ("b", 1, 2, 3), ("a", 2, 2, 3), ("a", 1, 3, 3), ("a", 1, 2, 4)]
    found = [encoded(values, 0, RoundingKey(*key))[0] for key in keys]
    found.append(encoded(values, 4096, RoundingKey(*keys[0]))[0])
    for i, one in enumerate(found):
        assert not any(torch.equal(one, other) for other in found[i + 1 :])


@pytest.mark.parametrize("is_signed", [False, True], ids=["window", "linear"])
def test_special_values_stay_what_they_are(is_signed: bool) -> None:
    values = draw("squares", 512)
    values[:6] = torch.tensor([0.0, math.inf, math.nan, torch.finfo(torch.float32).max, 2.0**-149, 1.0])
    if is_signed:
        values[6:256:2] *= -1
        values[300:302] = torch.tensor([-0.0, -math.inf])
    found = decoded(encoded(values))
    special = (values == 0) | values.isinf()
    assert same_bits(found[special], values[special])
    assert torch.equal(found.isnan(), values.isnan())
    assert found[torch.isfinite(values)].isfinite().all()
    assert not is_signed or torch.equal(found.signbit(), values.signbit())
    assert is_signed or (found[values > 0] > 0).all(), "a positive value became zero"


def test_blocks_of_nothing_but_what_is_not_finite() -> None:
    values = torch.full((1024,), math.nan)
    values[256:512], values[512:768] = math.inf, -math.inf
    values[768:] = -0.0
    coded = encoded(values)
    found = decoded(coded)
    assert found[:256].isnan().all() and same_bits(found[256:], values[256:])
    assert same_bytes(encoded(found), coded)


def test_the_sign_of_a_nan_does_not_count() -> None:
    """That of 0 / 0 has one on some processors, and its neighbours would become zero."""
    values = draw("squares", 256) * torch.logspace(0, -6, 256)
    values[3:5] = torch.tensor([-1, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    found = decoded(encoded(values))
    assert torch.equal(found.isnan(), values.isnan())
    assert (found[~values.isnan()] > 0).all()


def test_a_value_without_a_sign_keeps_its_ratio() -> None:
    """Beside one that is 2**30 as large: an average of squares is divided by its root."""
    values = torch.full((256,), 3.0 * 2.0**-30)
    values[0] = 3.9
    ratios = decoded(encoded(values))[1:] / values[1:]
    assert (ratios >= 1 / 1.125).all() and (ratios <= 1.125).all()


@pytest.mark.parametrize("largest", [1e-3, 1.0, 124.9, 125.0, 125.1, 3e38, 2.0**-120, 1.2e-38])
def test_units_are_as_fine_as_they_can_be(largest: float) -> None:
    values = torch.full((256,), -largest)
    values[1:] = torch.linspace(-1, 1, 255) * largest
    error = (decoded(encoded(values)).double() - values.double()).abs().max()
    assert error <= max(largest / 62.5, 2.0**-126)


@pytest.mark.parametrize(
    ("values", "codes", "scales", "first", "says"),
    [
        (torch.zeros(4), torch.zeros(5, dtype=torch.uint8), torch.zeros(1), 0, "codes is"),
        (torch.zeros(4).double(), torch.zeros(4, dtype=torch.uint8), torch.zeros(1), 0, "values is"),
        (torch.zeros(4), torch.zeros(4, dtype=torch.int8), torch.zeros(1), 0, "codes is"),
        (torch.zeros(257), torch.zeros(257, dtype=torch.uint8), torch.zeros(1), 0, "scales is"),
        (torch.zeros(4), torch.zeros(4, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32), 0, "scales is"),
        (torch.zeros(2, 2), torch.zeros(4, dtype=torch.uint8), torch.zeros(1), 0, "values is"),
        (torch.zeros(4), torch.zeros(4, dtype=torch.uint8), torch.zeros(1), 255, "first is 255; it must be a multiple"),
        (torch.zeros(4), torch.zeros(4, dtype=torch.uint8), torch.zeros(1), -256, "first is -256"),
    ],
)
def test_other_arguments_are_refused(
    values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, first: int, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        encode_int8(values, codes, scales, first, KEY)
