"""Rows of what is made of tensors of files have the bits of rows of it, and read no other rows of those."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from swapper.files.recipe_parts import rows_of
from swapper.files.tensor_files import StoredTensor
from swapper.files.unread import Recipe, Unread, evaluate, sources_of


class Drawn:
    """Unread tensors made by random operators of several tensors in files, which are in memory here."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.files: dict[Path, torch.Tensor] = {}

    def stored(self, shape: torch.Size) -> Unread:
        path = Path(str(len(self.files)))
        self.files[path] = torch.randn(shape, generator=self.generator)
        return Unread.of_file(StoredTensor(path, "w", torch.float32, shape, 40, 40 + self.files[path].nbytes))

    def made(self, shape: torch.Size, depth: int) -> torch.Tensor:
        if depth == 0 or len(shape) < 2:
            return self.stored(shape)
        kind = self.random.choice(["stack", "cat", "cast", "transpose", "clone"])
        if kind == "stack":
            dim = self.random.randrange(len(shape))
            rest = torch.Size((*shape[:dim], *shape[dim + 1 :]))
            return torch.stack([self.made(rest, depth - 1) for _ in range(shape[dim])], dim)
        if kind == "cat":
            dim = self.random.randrange(-len(shape), len(shape))
            size = shape[dim]
            cuts = sorted(self.random.randint(0, size) for _ in range(self.random.randint(0, 2)))
            sizes = [b - a for a, b in zip([0, *cuts], [*cuts, size], strict=True) if b > a]
            position = dim % len(shape)
            parts = [torch.Size((*shape[:position], each, *shape[position + 1 :])) for each in sizes]
            return torch.cat([self.made(part, depth - 1) for part in parts], dim)
        of = self.made(shape, depth - 1)
        if kind == "cast":
            return of.to(self.random.choice([torch.float64, torch.float32])).to(torch.float32)
        if kind == "transpose" and len(shape) > 2:
            swapped = torch.Size((*shape[:-2], shape[-1], shape[-2]))
            return self.made(swapped, depth - 1).transpose(-1, len(shape) - 2)
        return of.clone()

    def read(self, stored: StoredTensor) -> torch.Tensor:
        whole = self.files[stored.path]
        first, last = (stored.start_bytes - 40) // 4, (stored.stop_bytes - 40) // 4
        return whole.view(-1)[first:last].view(stored.shape)


def recipe_of(tensor: torch.Tensor) -> Recipe:
    assert isinstance(tensor, Unread)
    return tensor.recipe


@pytest.mark.parametrize("seed", range(150))
@pytest.mark.sampled(40)
def test_rows_are_made_of_their_sources_alone(seed: int) -> None:
    drawn = Drawn(seed)
    shape = torch.Size(drawn.random.randint(1, 5) for _ in range(drawn.random.randint(2, 4)))
    recipe = recipe_of(drawn.made(shape, drawn.random.randint(0, 4)))
    whole = evaluate(recipe, drawn.read)
    whole_bytes = sum(each.length_bytes for each in sources_of(recipe))
    assert whole.shape == shape
    for start in range(shape[0]):
        for stop in range(start + 1, shape[0] + 1):
            rows = rows_of(recipe, start, stop)
            assert rows is not None and rows.shape == whole[start:stop].shape
            assert torch.equal(evaluate(rows, drawn.read), whole[start:stop])
            assert sum(each.length_bytes for each in sources_of(rows)) * shape[0] == whole_bytes * (stop - start)


@pytest.mark.parametrize(
    "make",
    [
        lambda w: w.transpose(0, 1).clone(),
        lambda w: w.reshape(2, 12).clone(),
        lambda w: w.clone().mul_(2),
        lambda w: torch.cat([w, w.flip(0)]),
        lambda w: torch.stack([w.t(), w.t()], 1),
        lambda w: w.split(2, 1)[1],
    ],
)
def test_what_is_not_known_has_no_rows(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    recipe = recipe_of(make(Drawn(0).stored(torch.Size((4, 6)))))
    assert rows_of(recipe, 0, recipe.shape[0]) is None
