"""Which cases of a test run by default, and with SWAPPER_TESTS=all."""

from __future__ import annotations

import itertools
import os
import re
import sys
from pathlib import Path

import pytest
from launcher import run_program
from repository import SUPPORT

TESTS = """
import pytest

@pytest.mark.parametrize("drive", ["one", "two"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_product(dtype, drive): pass

@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.cuda), "host"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_device(dtype, device): pass

@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_list(dtype): pass

@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", range(9))
def test_sampled(case): pass

@pytest.mark.long
@pytest.mark.parametrize("case", range(17))
def test_long(case): pass

@pytest.mark.long
@pytest.mark.parametrize("case", range(3))
def test_another_long(case): pass

@pytest.mark.long
@pytest.mark.parametrize("drive", ["one", "two"])
@pytest.mark.parametrize("case", range(2))
def test_long_product(case, drive): pass
"""


@pytest.fixture
def named() -> str:
    """What is given to pytest."""
    return "."


@pytest.fixture
def collected(tmp_path: Path, which: str, named: str) -> list[str]:
    (tmp_path / "test_these.py").write_text(TESTS)
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT), "SWAPPER_TESTS": which, "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "sampling", "-p", "no:cacheprovider"]
    done = run_program([*command, named], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    return re.findall(r"::(\S+)", done.stdout)


@pytest.mark.long
@pytest.mark.parametrize("which", ["some"])
def test_by_default_each_value_of_a_product_occurs_and_not_each_case(collected: list[str]) -> None:
    product = [name for name in collected if name.startswith("test_product")]
    assert len(product) == 3
    assert all(any(value in name for name in product) for value in ("fp32", "bf16", "fp16", "one", "two"))
    on_host = [name for name in collected if name.startswith("test_device") and "cuda" not in name]
    assert sorted(on_host) == [f"test_device[{dtype}-host]" for dtype in ("bf16", "fp16", "fp32")]
    assert sum("cuda" in name for name in collected) == 1
    assert [name for name in collected if name.startswith("test_list")] == [
        f"test_list[{dtype}]" for dtype in ("fp32", "bf16", "fp16")
    ]


@pytest.mark.long
@pytest.mark.parametrize("which", ["all"])
def test_all_of_a_product_is_every_case(collected: list[str]) -> None:
    names = {
        f"test_product[{dtype}-{drive}]" for dtype, drive in itertools.product(["fp32", "bf16", "fp16"], ["one", "two"])
    }
    assert {name for name in collected if name.startswith("test_product")} == names


@pytest.mark.parametrize("which", ["all"])
def test_all_of_what_is_long_is_half_of_it_or_each_value_of_a_product(collected: list[str]) -> None:
    product = [name for name in collected if name.startswith("test_long_product")]
    assert len(product) == 2
    assert all(any(value in name for name in product) for value in ("0", "1", "one", "two"))
    assert len([name for name in collected if name.startswith("test_long[")]) == 9


@pytest.mark.parametrize("which", ["some", "all", "every"])
def test_twice_as_many_of_a_sample_run_of_all(collected: list[str], which: str) -> None:
    assert sum(name.startswith("test_sampled") for name in collected) == {"some": 2, "all": 4, "every": 9}[which]


@pytest.mark.parametrize("which", ["every"])
def test_every_case_of_a_long_product_runs(collected: list[str]) -> None:
    assert len([name for name in collected if name.startswith("test_long_product")]) == 4


@pytest.mark.parametrize("which", ["some"])
def test_by_default_one_in_ten_long_cases_runs_of_as_many_tests_as_there_can_be(collected: list[str]) -> None:
    for test in ("test_long[", "test_another_long[", "test_long_product["):
        assert len([name for name in collected if name.startswith(test)]) == 1


@pytest.mark.parametrize("named", ["test_these.py"])
@pytest.mark.parametrize("which", ["some"])
def test_all_long_ones_of_a_named_file_run(collected: list[str]) -> None:
    assert len([name for name in collected if "long[" in name]) == 20
