"""What every test of a command has."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_default_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWAPPER_NVME_PATH", raising=False)
