"""Shapes of state: of a large parameter, by those that the class makes for two small ones.

Some classes have state in blocks, or in fewer bits, from some size on: bitsandbytes from 4,096 elements, torchao where
blocks of 256 divide them, too. So the small ones have as many, and the factors of two of the large one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

__all__ = ["shape_of_state", "two_like"]

_NUMEL_MIN = 4096
_TWOS_MAX = 256
_TWOS_EACH = 16
_SMALL_SIZE = 8
_BLOCKS = tuple(1 << power for power in range(1, 13))

Shape = tuple[int, ...]


def two_like(shape: Shape) -> tuple[Shape, Shape]:
    """Two small shapes like `shape`: with other sizes in the same order, equal where its are, and its own up to 8."""
    sizes = sorted({size for size in shape if size > _SMALL_SIZE})
    count = sum(size in sizes for size in shape)
    others = math.prod(size for size in shape if size not in sizes)
    least = max(_SMALL_SIZE + 1, math.ceil((_NUMEL_MIN / max(1, others)) ** (1 / max(1, count))))
    twos = {size: min(_twos(size), _TWOS_EACH) for size in sizes}
    wanted = min(_twos(math.prod(shape)), _TWOS_MAX)
    for size in sizes:
        while twos[size] < _twos(size) and _twos(math.prod(twos.get(each, each) for each in shape)) < wanted:
            twos[size] *= 2
    first, last = {}, least - 1
    for size in sizes:
        last = first[size] = next(each for prime in _odd_primes() if (each := prime * twos[size]) > last)
    second, last = {}, math.ceil(last * 2 ** (1 / max(1, count)))  # Twice the elements, so that blocks are more.
    for size in sizes:
        last = second[size] = next(each for prime in _odd_primes() if (each := prime * twos[size]) > last)
    return tuple(first.get(size, size) for size in shape), tuple(second.get(size, size) for size in shape)


def shape_of_state(shape: Shape, like: tuple[Shape, Shape], states: tuple[Shape, Shape]) -> Shape | None:
    """The shape of a tensor of the state of a parameter of `shape`. None if it cannot be told.

    Args:
        like: shapes of other parameters, from `two_like`.
        states: those that the tensor has for them.
    """
    if len(states[0]) != len(states[1]):
        return None
    found = [_size_of(sizes, like, shape) for sizes in zip(*states, strict=True)]
    return None if None in found else tuple(size for size in found if size is not None)


def _size_of(sizes: tuple[int, int], like: tuple[Shape, Shape], shape: Shape) -> int | None:
    if sizes[0] == sizes[1]:
        return sizes[0]
    kinds = zip(*(_kinds_of_sizes(each) for each in (*like, shape)), strict=True)
    for first, second, made in kinds:
        if found := {size for *known, size in zip(first, second, made, strict=True) if tuple(known) == sizes}:
            return found.pop() if len(found) == 1 else None
    return None


def _kinds_of_sizes(shape: Shape) -> list[list[int]]:
    """Return possible sizes of state, likely ones first: those of the parameter, its elements, blocks of them."""
    numel = math.prod(shape)
    blocks = [[-(-numel // block) for block in _BLOCKS], [-(-size // block) for size in shape for block in _BLOCKS]]
    return [[*shape], [numel], *blocks, [numel // block for block in _BLOCKS]]


def _twos(number: int) -> int:
    return number & -number


def _odd_primes() -> Iterator[int]:
    number = 3
    while True:
        if all(number % other for other in range(3, math.isqrt(number) + 1, 2)):
            yield number
        number += 2
