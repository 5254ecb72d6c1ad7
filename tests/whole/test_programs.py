"""Random users' programs, each run plain and swapped: the bits of plain PyTorch, and its exceptions.

    SWAPPER_PROGRAMS=2000 .venv/bin/pytest -q tests/whole/test_programs.py  # seeds 0 to 1999
    SWAPPER_PROGRAMS=1 SWAPPER_PROGRAMS_SEED=1234 .venv/bin/pytest ...    # the program of one seed
    SWAPPER_PROGRAMS_WITHOUT=replace,interrupt                           # kinds of actions, models, ... left out
    SWAPPER_DEVICE_PROGRAMS=300 .venv/bin/pytest -k on_a_device ...      # seeds 0 to 299, the model on a device

A program that fails is made smaller as long as it fails in the same way, and printed. What is printed can be pasted
into `PRINTED` below and run alone.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerators import simulated
from programs import Action, Difference, Placement, Program, generate, generate_on_device, minimised, perform
from sampling import ALL, EVERY

COUNT = int(os.environ.get("SWAPPER_PROGRAMS") or (100 if EVERY else 60 if ALL else 20))
ON_DEVICE = int(os.environ.get("SWAPPER_DEVICE_PROGRAMS") or (30 if EVERY else 18 if ALL else 6))
SEED = int(os.environ.get("SWAPPER_PROGRAMS_SEED") or 0)
WITHOUT = [name for name in os.environ.get("SWAPPER_PROGRAMS_WITHOUT", "").split(",") if name]

pytestmark = pytest.mark.timeout(180)  # One that hangs; and minimising takes 40 s at most.

PRINTED: dict[str, Program] = {
    "a parameter that was put back was stepped twice": Program(
        actions=(
            Action("remove", (1, 0, 0)),
            Action("train", (2, 0, 0, 0)),
            Action("put_back", (3, 0, 1)),
            Action("train", (4, 0, 0, 0)),
        ),
    ),
    "the state of a parameter was lost while it was in no group": Program(
        actions=(
            Action("train", (1, 0, 0, 0)),
            Action("remove", (2, 1, 0)),
            Action("train", (3, 0, 0, 1)),
            Action("put_back", (4, 0, 0)),
        ),
    ),
    "a step in backward after a parameter was taken out": Program(
        placement=Placement(parameter="nvme", in_backward=True, bucket_bytes=16384, spare_bytes=0, moves_all=True),
        actions=(Action("train", (1, 0, 0, 0)), Action("remove", (2, 47, 57)), Action("train", (3, 0, 0, 0))),
    ),
    "a checkpoint after a parameter was taken out": Program(
        actions=(Action("train", (1, 0, 0, 0)), Action("remove", (2, 0, 0)), Action("save", (3, 0, 2)))
    ),
    "a checkpoint after a parameter was replaced": Program(
        optimizer="adagrad", actions=(Action("replace", (1, 0, 0)), Action("save", (2, 0, 2)))
    ),
    "device: cpu, and a group that came before the first step": Program(
        placement=Placement(optimizer="cpu", moves_all=True),
        actions=(Action("add_group", (1, 0)), Action("train", (2, 0, 0, 0))),
    ),
    "device: cpu, wrapped again with a frozen layer that has state": Program(
        model="layers",
        placement=Placement(optimizer="cpu", moves_all=True),
        actions=(Action("train", (1, 0, 0, 0)), Action("freeze", (2, 71)), Action("rewrap", (3,))),
    ),
    "device: none, and the gradient of a group that came later": Program(
        placement=Placement(optimizer="none", gradient="nvme", moves_all=True),
        actions=(Action("add_group", (1, 0)), Action("train", (2, 0, 0, 0))),
    ),
    "a parameter with holes in memory that is cut": Program(
        model="strided",
        optimizer="rmsprop",
        placement=Placement(bucket_bytes=16384, spare_bytes=0, moves_all=True),
        actions=(Action("train", (1, 0, 0, 0)),),
    ),
    "the dtype of a product after loading": Program(
        dtype="float16",
        optimizer="nadam",
        actions=(Action("train", (1, 0, 0, 0)), Action("save", (2, 0, 0)), Action("load", (3, 0, 0))),
    ),
    "masters of a table that its forward changes in part": Program(
        model="bounded embeddings",
        dtype="float16",
        placement=Placement(masters=True, bucket_bytes=16384),
        actions=(Action("train", (1, 0, 0, 0)), Action("train", (1, 0, 0, 0))),
    ),
    "masters of a parameter that is edited in part": Program(
        model="multi-head attention",
        dtype="float16",
        placement=Placement(masters=True, bucket_bytes=16384, moves_all=True),
        actions=(Action("train", (1, 0, 0, 0)), Action("edit", (2, 5, 8)), Action("train", (3, 0, 0, 0))),
    ),
    "the smallest pool came to pieces in the second step": Program(
        model="resnet channels_last",
        placement=Placement(optimizer="cpu", parameter="nvme", bucket_bytes=16384, spare_bytes=0, moves_all=True),
        actions=(Action("train", (0, 0, 0, 0)), Action("train", (0, 0, 0, 0))),
    ),
}
"""Programs that failed once, by what was wrong."""


def run(program: Program, path: Path, seed: object) -> None:
    """Perform `program`; if the twins differ, say so with the smallest program in which they do."""
    try:
        outcome = perform(program, path)
    except Difference as difference:
        found, kind = {program: difference}, difference.kind

        def fails(candidate: Program) -> bool:
            try:
                perform(candidate, path)
            except Difference as other:
                if other.kind == kind:
                    found[candidate] = other
                    return True
            return False

        smallest = minimised(program, fails)
        raise AssertionError(
            f"program {seed}: {kind}\n{smallest}\n{found[smallest]}\nIt was, before it was made smaller:\n"
            f"{program}\n{found[program]}"
        ) from None
    performed.update(outcome.performed)
    skipped.update(outcome.skipped)
    raised.update(text[:150] for text in outcome.raised)
    if outcome.refused:
        refused[f"program {seed}, {outcome.refused.splitlines()[0][:150]}"] += 1


performed: Counter[str] = Counter()
skipped: Counter[str] = Counter()
raised: Counter[str] = Counter()
refused: Counter[str] = Counter()


@pytest.mark.long
@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("seed", range(SEED, SEED + COUNT))
def test_the_program_of_this_seed(seed: int, nvme_path: Path) -> None:
    run(generate(seed, WITHOUT), nvme_path, seed)


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("seed", range(SEED, SEED + ON_DEVICE))
def test_the_program_of_this_seed_on_a_device(seed: int, nvme_path: Path) -> None:
    """On the simulated one: its kernels are those of the CPU, so a step has the same bits on either."""
    simulated()
    run(generate_on_device(seed, WITHOUT), nvme_path, seed)


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("name", PRINTED)
def test_programs_that_failed_once(name: str, nvme_path: Path) -> None:
    run(PRINTED[name], nvme_path, name)


@pytest.fixture(scope="module", autouse=True)
def _what_was_met(request: pytest.FixtureRequest) -> Iterator[None]:
    """A generator that only meets refusals is seen, and so are actions that never had anything to work on."""
    yield
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\nprograms: {COUNT} from seed {SEED}, without {WITHOUT or 'nothing'}; refused {sum(refused.values())}")
        print("performed", dict(performed.most_common()))
        print("skipped", dict(skipped.most_common()))
        for text, count in raised.most_common():
            print(f"both raised, {count} times: {text}")
        print(*refused, sep="\n")
