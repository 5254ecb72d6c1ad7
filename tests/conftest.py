"""What every test has: a place for files, the environment restored, and what to skip without root."""

from __future__ import annotations

import os

# Threads that spin while they wait take the cores from the engine and from tests beside this one; no bits depend on it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# The examples import each other by plain name, and so do tests that train their models.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.geteuid() == 0:
        return
    skip = pytest.mark.skip(reason="needs root")
    for item in items:
        if item.get_closest_marker("root"):
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def _tmpfs_is_allowed() -> Iterator[None]:
    """The directory for temporary files is in memory on many machines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWAPPER_ALLOW_TMPFS", "1")
        yield


@pytest.fixture(autouse=True)
def _threads_are_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture
def nvme_path(tmp_path: Path) -> Path:
    """An empty directory for records."""
    path = tmp_path / "nvme"
    path.mkdir()
    return path


@pytest.fixture
def leaves_nothing(nvme_path: Path) -> Iterator[None]:
    """After the test, `nvme_path` is empty. Ask for it before what makes files there, so that it looks last."""
    yield
    assert not list(nvme_path.iterdir()), "files were left behind"
