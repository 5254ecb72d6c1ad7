"""Tensors of files that are converted before they are read: the values are those of the same operators in memory."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from twins import bits
from weight_files import write_weights

import swapper
from swapper.files.recipe_parts import pieces_of
from swapper.files.tensor_files import StoredTensor, TensorReader, read_header
from swapper.files.unread import Step, Unread, evaluate, sources_of, write_values

Convert = Callable[[list[torch.Tensor]], torch.Tensor]


def conversion(chance: random.Random) -> Convert:
    """What a library may do with tensors of 4 x 6: some operators in a row."""
    steps = [chance.randrange(12) for _ in range(chance.randint(0, 4))]
    dims = [chance.randrange(-2, 2) for _ in steps]
    dtypes = [chance.choice([torch.float32, torch.bfloat16, torch.float16]) for _ in steps]

    def convert(tensors: list[torch.Tensor]) -> torch.Tensor:
        x = tensors[0].clone() if 11 in steps else tensors[0]
        for step, dim, dtype in zip(steps, dims, dtypes, strict=True):
            others = [each.to(x.dtype) for each in tensors[1:] if each.shape == x.shape]
            match step:
                case 0:
                    x = torch.stack([x, *others], dim)
                case 1:
                    x = torch.cat([x, x, *others], dim)
                case 2:
                    x = torch.chunk(x, 2, dim)[-1].contiguous()
                case 3:
                    x = x.transpose(0, dim).contiguous()
                case 4:
                    x = x.to(device="cpu", dtype=dtype)
                case 5:
                    x = x.reshape(2, -1).transpose(0, 1).reshape(x.shape)
                case 6:
                    x = torch.split(x, [1, x.shape[dim] - 1], dim)[1]
                case 7:
                    x = x[1:] if x.shape[0] > 1 else x.flatten().reshape(1, -1)
                case 9:
                    x = x if x is not tensors[0] else x.clone()
                    x[..., 1:].mul_(3)
                case 10:
                    x = x if x is not tensors[0] else x.clone()
                    halves, again = torch.chunk(x, 2, dim), x.detach()
                    halves[0].add_(halves[-1] if halves[0].shape == halves[-1].shape else 1)
                    x = again
                case 11:
                    x = torch.nn.Parameter(x, requires_grad=False)
                    x.data[0].zero_()
                    x = x.detach()
                case 8:
                    x = x.unsqueeze(dim).squeeze(dim).transpose(-1, -2)
        return x

    return convert


@pytest.mark.sampled(60)
@pytest.mark.parametrize("seed", range(150))
def test_what_is_converted_before_it_is_read_has_the_same_bits(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    values = {f"t{i}": torch.randn(4, 6, dtype=chance.choice([torch.float32, torch.bfloat16])) for i in range(3)}
    path = write_weights(tmp_path / "weights.safetensors", values, chance.randrange(64))
    stored = {tensor.name: tensor for tensor in read_header(path)}
    expected = None
    while expected is None:
        convert = conversion(chance)
        with contextlib.suppress(RuntimeError, IndexError):  # There is no such conversion.
            expected = convert(list(values.values()))
    found = convert([Unread.of_file(stored[name]) for name in values])
    assert type(found) is Unread
    assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())
    reader = TensorReader()

    def read(tensor: StoredTensor) -> torch.Tensor:
        return reader.read(tensor)

    assert bits(evaluate(found.recipe, read)) == bits(expected)
    assert set(sources_of(found.recipe)) <= set(stored.values())
    pieces = pieces_of(found.recipe, found)
    if pieces is not None:
        data = b"".join(path.read_bytes()[piece.start_bytes : piece.stop_bytes] for piece in pieces)
        assert data == expected.view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(found.recipe, Step):
        into = torch.empty(expected.shape, dtype=expected.dtype)
        write_values(found.recipe, into, read)
        assert torch.equal(into, expected)
    reader.close()


def test_experts_are_pieces_in_the_order_of_memory(tmp_path: Path) -> None:
    values = {f"{i}.{part}": torch.randn(3, 4) for i in range(4) for part in ("gate", "up")}
    path = write_weights(tmp_path / "weights.safetensors", values)
    files = {tensor.name: tensor for tensor in read_header(path)}
    parts = [torch.stack([Unread.of_file(files[f"{i}.{part}"]) for i in range(4)], 0) for part in ("gate", "up")]
    fused = torch.cat(parts, 1)
    assert isinstance(fused, Unread)
    pieces = pieces_of(fused.recipe, fused)
    assert pieces is not None
    assert [piece.name for piece in pieces] == list(values)


def test_values_are_read_where_the_library_needs_them(tmp_path: Path) -> None:
    values = {"a": torch.ones(3), "b": torch.ones(3), "c": torch.arange(3.0)}
    path = write_weights(tmp_path / "weights.safetensors", values)
    a, b, c = (Unread.of_file(tensor) for tensor in read_header(path))
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert c.sum().item() == 3
    assert type(torch.empty_like(a)) is torch.Tensor
    assert torch.equal((a + c).add_(b).mul_(2), torch.tensor([4.0, 6, 8]))  # It was computed for this.
    assert torch.equal(torch.zeros(3).copy_(c), torch.arange(3.0))
    for drawn in (c, c[1:], (a + c)[1:], torch.nn.Parameter(a + c).data):
        with pytest.raises(swapper.SwapError, match="changes a weight while the model is loaded"):
            drawn.normal_()
    torch.manual_seed(0)
    noise = (a + c).normal_()
    torch.manual_seed(0)
    assert torch.equal(noise, torch.randn(3))
    p = torch.nn.Parameter(a)
    assert isinstance(p, torch.nn.Parameter) and isinstance(p, Unread)
    assert p.device.type == "cpu"
