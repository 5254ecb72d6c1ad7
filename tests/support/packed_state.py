"""Runs tests that compare with plain PyTorch to the bit with state that is packed on the drive, beside unpacked.

A test, or a file, marked `packs_too` gets a parameter of two values: with "packed" each config whose state is on a
drive, and that says nothing else, has `encoding: packed`, in the process of the test. By default one of the two is
drawn for each case of a test that is not sampled: see `sampling`.
"""

from __future__ import annotations

from typing import Any

import pytest

from swapper.config import OffloadOptimizerConfig
from swapper.process.warnings import warn_once

__all__ = ["UNPACKED_AND_PACKED"]

UNPACKED_AND_PACKED = ("unpacked", "packed")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "packs_too: runs with state unpacked and packed")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("packs_too"):
        metafunc.parametrize("state_on_drive", UNPACKED_AND_PACKED, indirect=True)


@pytest.fixture(autouse=True)
def state_on_drive(request: pytest.FixtureRequest) -> str:
    """How it is: one of `UNPACKED_AND_PACKED`, or "" in a test that is not marked."""
    how: str = getattr(request, "param", "")
    if how:
        warn_once.cache_clear()  # What one of the two has said the other says, too.
    if how == "packed":
        monkeypatch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
        stored = OffloadOptimizerConfig.stored_encoding.fget

        def packed(self: OffloadOptimizerConfig) -> Any:
            given = stored(self)  # type: ignore[misc]
            return "packed" if given == "exact" == self.encoding and self.device == "nvme" else given

        monkeypatch.setattr(OffloadOptimizerConfig, "stored_encoding", property(packed))
    return how
