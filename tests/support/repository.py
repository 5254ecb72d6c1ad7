"""Where things are in the repository."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
BENCHMARK = BENCHMARKS / "memory.py"
SUPPORT = ROOT / "tests" / "support"
