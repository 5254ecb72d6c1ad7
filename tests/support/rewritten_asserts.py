"""Rewrites the asserts of all test files once, and keeps them where each process of pytest looks.

Processes that begin at once find nothing of each other's, and where PYTHONDONTWRITEBYTECODE is set pytest keeps
nothing: then each does it anew, for half of the time that it takes to collect the tests.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from _pytest.assertion import rewrite

_STATE: Any = SimpleNamespace(trace=lambda why: sys.exit(f"{__file__}: {why}"))


def rewrite_asserts(path: Path) -> None:
    """Write what pytest caches of the test file `path`, unless it is there already."""
    directory = rewrite.get_cache_dir(path)
    cached = directory / f"{path.stem}{rewrite.PYC_TAIL}"
    if rewrite._read_pyc(path, cached) is None:
        directory.mkdir(parents=True, exist_ok=True)
        source_hash, code = rewrite._rewrite_test(path, None)  # type: ignore[arg-type]  # As without settings of it.
        rewrite._write_pyc(_STATE, code, source_hash, cached)


if __name__ == "__main__":
    for path in Path(__file__).parents[1].rglob("test_*.py"):
        rewrite_asserts(path.resolve())
