"""The simulator of `benchmarks/scale.py`: a step takes no less than any unit needs, and no more than all in turn."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from sampling import SEED

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import scale


@pytest.mark.parametrize("number", range(20))
def test_a_step_is_between_the_busiest_unit_and_the_sum_of_all(number: int) -> None:
    chance = random.Random(f"{SEED} {number}")
    machine = scale.Machine(
        chance.uniform(1e12, 1e15),
        chance.uniform(1e9, 1e11),
        chance.uniform(1e8, 1e10),
        chance.uniform(1e8, 1e10),
        chance.uniform(1e9, 1e11),
        link_bps=chance.choice([0.0, 1e10]),
        shares_processor=chance.random() < 0.3,
    )
    model = scale.Model(chance.uniform(1e8, 1e12), chance.randint(1, 40), chance.uniform(1, 1e4))
    ranks, inside = chance.choice(scale.RANKS), chance.random() < 0.5
    found = scale.simulate(model, machine, ranks, step_in_backward=inside)

    moved = model.parameters / ranks * model.state_bytes
    drive = moved / machine.drive_read_bps + moved / machine.drive_write_bps
    computed = model.parameters * 4 * 2 * model.tokens / machine.flops
    received = model.parameters * 2 * (ranks - 1) / ranks / machine.network_bps
    network = 3 * (received + model.layers * machine.network_s * (ranks - 1).bit_length())
    stepped = model.parameters / ranks / machine.step_eps
    link = 2 * moved / machine.link_bps if machine.link_bps else 0.0
    total = drive + computed + network + stepped + link
    assert max(drive, computed, network) * 0.999 <= found.step_s <= total * 1.001
    assert found.drive == pytest.approx(drive / found.step_s)
    assert 0 <= found.waiting < 1
    faster = replace(machine, drive_read_bps=2 * machine.drive_read_bps, drive_write_bps=2 * machine.drive_write_bps)
    assert scale.simulate(model, faster, ranks, step_in_backward=inside).step_s <= found.step_s * 1.001


def test_the_table_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = scale.table()
    scale.print_table(rows)
    assert len(capsys.readouterr().out.splitlines()) == 2 + 9 * len(scale.SHOWN)
    scale.draw(rows, tmp_path / "scale.png")
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")
