"""The mechanism in forty lines, at the head of the package, is a program that works."""

from __future__ import annotations

import doctest

import swapper.optimizer


def test_the_worked_example_has_the_bits_of_plain_pytorch() -> None:
    failed, tried = doctest.testmod(swapper.optimizer)
    assert failed == 0 and tried >= 5
