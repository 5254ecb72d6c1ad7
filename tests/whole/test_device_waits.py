"""A test of tests: each call that waits for a device is taken out of the code, one at a time, and is missed.

A new wait in the code is found here without an edit. If no scenario misses it, it is not needed and goes, or what it is
for becomes a scenario (`tests/support/device_scenarios.py`), or it gets a line in `NOT_MISSED` with the reason.
"""

from __future__ import annotations

import gc
import itertools
from pathlib import Path

import parameter_scenarios
import pytest
import torch
from accelerators import SETTINGS, simulate
from device_scenarios import SCENARIOS
from isolation import alone
from removed_waits import Site, remove, sites

MISSED_FIRST_BY: dict[str, tuple[str, str]] = {
    "gradient/copies.py join join": ("gradients on the drive", "sim-lazy"),
    "gradient/swapper.py _take begin": ("gradients on the drive", "sim-lazy"),
    "io/bounce.py _copy follow": ("files", "sim-random"),
    "io/bounce.py _give_up wait": ("files whose thread ends", "sim-lazy"),
    "io/devices.py join wait_event": ("gradients on the drive", "sim-lazy"),
    "io/devices.py join join": ("gradients on the drive", "sim-lazy"),
    "io/devices.py among_streams wait_stream": ("step in backward on two streams", "sim-lazy"),
    "io/devices.py among_streams wait_stream 1": ("step in backward on two streams", "sim-lazy"),
    "io/devices.py keep_for_current_stream record_stream": ("gradients clipped on another stream", "sim-lazy"),
    "io/devices.py keep record_stream": ("temporary parameter", "sim-lazy"),
    "io/devices.py wait synchronize": ("failed step", "sim-random"),
    "io/devices.py wait _wait": ("failed step", "sim-random"),
    "io/devices.py _wait wait": ("failed step", "sim-random"),
    "io/devices.py run keep": ("temporary parameter", "sim-lazy"),
    "optimizer/stepper.py finish join": ("gradients on the drive", "sim-lazy"),
    "storage/cache.py _wait_for_content wait": ("parameters on a slow drive", "sim-random"),
    "optimizer/stepper.py run_one join": ("step in backward", "sim-lazy"),
    "io/devices.py wait_all synchronize": ("pool that grows", "sim-lazy"),
    "storage/buffers.py _unlock_for_devices wait_all": ("pool that grows", "sim-lazy"),
    "storage/buffers.py _unregister wait_quietly": ("pool that is closed", "sim-lazy"),
    "parameter/device_sums.py differing wait": ("parameters changed in forward", "sim-lazy"),
    "parameter/device_sums.py of record_stream": ("sums of parameters", "sim-lazy"),
    "parameter/device_tier.py bring follow": ("parameters on the drive", "sim-lazy"),
    "parameter/held_on_device.py follow join": ("parameters on the drive", "sim-lazy"),
    "parameter/held_on_device.py follow_all wait_stream": ("parameters used on another stream", "sim-lazy"),
    "parameter/held_on_device.py sum_again record_stream": ("parameters that leave on another stream", "sim-lazy"),
    "parameter/device_tier.py _lift begin": ("parameters in memory of others", "sim-lazy"),
    "parameter/device_tier.py _copy_up transfer": ("parameters in a short pool", "sim-random"),
    "parameter/device_tier.py _copy_up transfer 1": ("parameters on a slow drive", "sim-lazy"),
    "parameter/held_on_device.py release begin": ("parameters converted", "sim-random"),
    "parameter/held_on_device.py forget record_stream": ("parameters in memory of others", "sim-random"),
    "parameter/device_tier.py _land wait": ("parameters changed in the pool", "sim-lazy"),
    "parameter/device_tier.py _send_down begin": ("parameters stepped on the device", "sim-random"),
    "parameter/device_tier.py _send_down transfer": ("parameters in a short pool", "sim-lazy"),
    "parameter/device_tier.py release_on_host follow": ("parameters in use in the pool", "sim-lazy"),
    "gradient/swapper.py _take transfer": ("step on the device with gradients", "sim-lazy"),
    "gradient/swapper.py _take transfer 1": ("step on the device with gradients", "sim-lazy"),
    "optimizer/stepper.py abandon wait": ("failed step", "sim-random"),
    "optimizer/stepper.py _join join": ("step on the device", "sim-lazy"),
    "optimizer/stepper.py _step_bucket _join": ("step on the device", "sim-lazy"),
    "hf/token_records.py use transfer": ("keys and values", "sim-lazy"),
    "hf/token_records.py _take join": ("keys and values on two streams", "sim-lazy"),
    "optimizer/device_slots.py hold begin": ("failed step on the device", "sim-random"),
    "optimizer/device_slots.py wait wait": ("step on the device that is cut off in a copy up", "sim-lazy"),
    "optimizer/device_slots.py wait wait 1": ("step on the device that is cut off in a copy down", "sim-lazy"),
    "optimizer/stepper.py abandon wait 1": ("step on the device that is cut off in a copy down", "sim-lazy"),
    "parameter/device_tier.py _bring_to_host wait": ("parameters whose write fails", "sim-lazy"),
    "parameter/device_tier.py _fetch wait": ("parameters changed while they are written", "sim-lazy"),
    "parameter/held_on_device.py follow join 1": ("parameters changed while they leave", "sim-lazy"),
    "parameter/held_on_device.py follow_all follow": ("parameters whose arrival is cut off", "sim-lazy"),
    "parameter/held_on_device.py end_sent join": ("views changed while parameters leave", "sim-lazy"),
    "parameter/device_tier.py release_on_host begin": ("parameters stepped while they are read", "sim-random"),
    "parameter/held_on_device.py write wait": ("parameters stepped while they are read", "sim-lazy"),
    "optimizer/device_slots.py take follow": ("step on the device", "sim-lazy"),
    "optimizer/device_slots.py join join": ("step on the device", "sim-lazy"),
    "optimizer/device_slots.py empty begin": ("step on the device", "sim-random"),
    "optimizer/device_slots.py empty transfer": ("step on the device", "sim-lazy"),
}
"""Where it is worth to look first; others are missed by a plain step. It only saves time."""

NOT_MISSED: dict[str, str] = {  # "seen": a test of that file fails without it
    "parameter/device_tier.py _finish_former_copy wait": "bounds what is read; seen: test_from_files_on_device",
    "gradient/copies.py wait_later join": "of gradients that come outside of a backward; seen: test_device_copies",
    "gradient/copies.py wait_later join 1": "of gradients that the user changes after it; seen: test_device_copies",
    "gradient/copies.py wait_later wait_quietly": "bounds what is in flight, by 256 MiB; seen: test_device_copies",
    "gradient/evicted.py _norms_of join": "a backward joins at its end; seen: test_device_copies",
    "optimizer/stepper.py _keep_native keep": "no wait: keeps what a class has made; seen: test_native_step",
    "gradient/swapper.py _take wait": "of gradients that are changed between two passes; seen: test_device_copies",
    "gradient/swapper.py _take wait 1": "of an error in the middle of a gradient; seen: test_device_copies",
    "io/bounce.py _sleep synchronize": "saves the thread from spinning: what is not done yet is met again",
    "io/bounce.py _advance synchronize": "raises what the device has to say; seen: test_device_tensors",
    "io/bounce.py _fail wait": "of an error of the device; seen: test_device_tensors",
    "io/devices.py wait_all synchronize 1": "as `wait_all synchronize`, for CUDA",
    "io/devices.py synchronize synchronize": "of programs that measure",
    "io/devices.py follow follow": "of slots that are emptied while others are filled; seen: test_device_step_waits",
    "io/devices.py run _wait": "of an error of the device; seen: test_device_copies",
    "io/gds.py why_not_direct synchronize": "needs cuFile; seen: test_direct_state",
    "optimizer/device_slots.py change wait": "a copy from the host has waited: it raises what the device has to say",
    "optimizer/device_slots.py follow_caller begin": "of a step without the pool that failed; seen: test_direct_state",
    "optimizer/device_slots.py give_back transfer": "needs cuFile; seen: test_direct_state",
    "optimizer/direct_state.py leave wait": "needs cuFile; seen: test_direct_state",
    "optimizer/direct_state.py give_back transfer": "of a bucket that is brought twice; seen: test_direct_state",
    "parameter/direct_records.py _complete wait": "a copy from the host has waited: it raises what the device says",
    "parameter/direct_records.py room_for wait": "needs cuFile; seen: test_direct_records",
    "parameter/building.py let_stay wait": "of a write that failed, and is made again just then; seen: test_init",
    "parameter/device_tier.py wait wait": "of errors; see test_device_failures",
    "parameter/swapper.py flush wait": "of writes by the drive, which `flush` is for",
    "storage/buffers.py _wait_for_one wait_quietly": "saves from spinning: who wants a lease tries again",
    "storage/cache.py _see_written wait": "of writes by the drive; seen: test_cache",
    "storage/cache.py _collect wait": "raises why a write has failed; seen: test_cache",
    "storage/cache.py _wait_for_write wait_quietly": "`_see_written` waits; this is in the time that is counted",
    "storage/cache.py flush wait_quietly": "of the writes after one that failed; seen: test_cache",
    "storage/cache.py discard wait": "of reads by the drive; seen: test_cache",
    "storage/cache.py flush wait_quietly 1": "of records that were dropped; seen: test_cache",
    "storage/cache.py close wait 1": "of reads by the drive that were dropped",
    "storage/cache.py close wait": "of what is given up with its owner",
    "storage/device_pool.py __init__ wait_all": "of memory that is about to be registered for direct storage",
    "storage/writes.py finish wait_quietly": "else `_finish` waits, and the lock is held meanwhile",
    "storage/writes.py _finish wait": "the copy is over: it raises what the device has to say; seen: test_writes",
    "storage/writes.py _start_writes wait_quietly": "of the thread; seen: test_writes",
}

FOUND = sites()
SEEDS = itertools.count(1)


def test_no_line_is_for_a_call_that_is_gone() -> None:
    assert {*MISSED_FIRST_BY, *NOT_MISSED} <= set(map(str, FOUND))


@pytest.mark.parametrize("settings", ["sim-lazy", "sim-random", "sim-poison"])
@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenarios_pass_as_the_code_is(
    name: str, settings: str, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim_device = simulate(settings, monkeypatch)
    sim_device.violations()
    SCENARIOS[name]("sim", nvme_path)
    assert sim_device.violations() == []


def test_copies_come_after_what_had_their_memory_before(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream that memory is of may still be busy with it when it is given out for a copy."""
    sim_device = simulate("sim-lazy", monkeypatch)
    sim_device.configure("lazy", poison_reused=True)
    SCENARIOS["gradients on the drive"]("sim", nvme_path)
    assert sim_device.violations() == []


@pytest.mark.sampled(8)
@pytest.mark.filterwarnings("ignore")  # of what a failure leaves
@pytest.mark.parametrize("site", [site for site in FOUND if str(site) not in NOT_MISSED], ids=str)
def test_a_wait_that_is_removed_is_missed(site: Site, tmp_path: Path) -> None:
    # What hundreds of tests before it leave in a process may be what a scenario has to find missing.
    if not is_missed(site, tmp_path / "here") and not alone(is_missed, site, tmp_path / "alone"):
        pytest.fail(f"nothing misses {site}: it is not needed, or a scenario is missing")


def is_missed(site: Site, tmp_path: Path) -> bool:
    """True if a scenario fails without the wait at `site`."""
    first = MISSED_FIRST_BY.get(str(site), ("step", "sim-lazy"))
    every = [(name, settings) for settings in ("sim-lazy", "sim-random", "sim-poison") for name in SCENARIOS]
    with pytest.MonkeyPatch.context() as simulating:
        sim_device = simulate("sim-eager", simulating)
        for number, (name, settings) in enumerate([first, *every]):
            path = tmp_path / str(number)
            path.mkdir(parents=True)
            sim_device.configure(**SETTINGS[settings])
            missed = False
            try:
                with pytest.MonkeyPatch.context() as patch:
                    remove(site, patch)
                    patch.setattr(parameter_scenarios, "values_seed", next(SEEDS))
                    SCENARIOS[name]("sim", path)
            except Exception:
                missed = True
            gc.collect()
            sim_device.configure("eager")
            torch.accelerator.synchronize()
            if sim_device.violations() or missed:
                return True
    return False
