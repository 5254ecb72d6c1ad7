"""`offload_optimizer.encoding: exact`: packs where the drive is slow, and not where the processor is."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from training import adamw, assert_same, assert_same_state, make_model, run, same_bits

import swapper
from swapper.io.handle import AsyncIOHandle, FaultPlan
from swapper.optimizer import encoding_choice
from swapper.optimizer.plan import OptimizerPlan
from swapper.storage.speed import DriveSpeed

SLOW, FAST = 1e6, 1e13
"""Bytes per second, far from where the processor of any machine would come to another decision."""

Measures = Callable[..., list[object]]


@pytest.fixture(autouse=True)
def _small_state_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding_choice, "LEAST_BYTES", 1)


@pytest.fixture
def drives(monkeypatch: pytest.MonkeyPatch) -> Measures:
    """Let drives have these speeds. What comes back grows with each measurement."""

    def patch(*speeds: tuple[float, float]) -> list[object]:
        calls: list[object] = []

        def measure(config: swapper.OffloadConfig) -> list[DriveSpeed]:
            calls.append(config)
            return [DriveSpeed(*speed) for speed in speeds]

        monkeypatch.setattr("swapper.api.calls.drive_speeds", measure)
        return calls

    return patch


def config_of(nvme_path: Path | list[Path], **state: Any) -> swapper.OffloadConfig:
    state = {"device": "nvme", "encoding": "exact"} | state
    return swapper.OffloadConfig(
        nvme_path=nvme_path, pool_bytes="256KiB", bucket_bytes="32KiB", offload_optimizer=state
    )


def wrap(nvme_path: Path | list[Path], **state: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make_model()
    optimizer = adamw(model)
    swapper.wrap_optimizer(optimizer, config_of(nvme_path, **state))
    return model, optimizer


def chosen(optimizer: torch.optim.Optimizer) -> tuple[str, str]:
    stats = swapper.of(optimizer).stats()
    return stats.encoding, stats.encoding_reason


# --- What is chosen --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bps", "encoding"), [(SLOW, "packed"), (FAST, "exact")])
def test_a_slow_drive_gets_packed_state_and_no_bit_changes(
    bps: float, encoding: str, nvme_path: Path, drives: Measures, caplog: pytest.LogCaptureFixture
) -> None:
    calls = drives((bps, bps))
    plain = make_model()
    other = adamw(plain)
    run(plain, other)
    with caplog.at_level(logging.INFO, logger="swapper.optimizer.encoding_choice"):
        model, optimizer = wrap(nvme_path)
    assert len(calls) == 1
    name, reason = chosen(optimizer)
    assert name == encoding and "a step would take the drive" in reason
    how = "packed" if encoding == "packed" else "not packed"
    assert caplog.messages == [f"offload_optimizer.encoding: exact: state is {how}: {reason}"]
    run(model, optimizer)
    assert_same(plain, model)
    assert_same_state(optimizer.state_dict(), other.state_dict())
    swapper.of(optimizer).flush()
    tables = [b'"blocks.' in path.read_bytes() for path in nvme_path.rglob("*-optim-*.safetensors")]
    assert tables and all(found == (encoding == "packed") for found in tables)
    swapper.of(optimizer).close()


def test_files_and_sums_are_those_of_the_encoding_that_was_chosen(nvme_path: Path, drives: Measures) -> None:
    for bps, other in ((SLOW, "packed"), (FAST, "unpacked")):
        drives((bps, bps))
        found = []
        for encoding in ("exact", other):
            model, optimizer = wrap(nvme_path, encoding=encoding)
            run(model, optimizer)
            swapper.of(optimizer).flush()
            stats = swapper.of(optimizer).stats()
            lengths = sorted(path.stat().st_size for path in nvme_path.rglob("*-optim-*.safetensors"))
            found.append((lengths, stats.state_bytes, stats.bytes_written))
            swapper.of(optimizer).close()
        assert found[0] == found[1]


def test_a_slow_codec_is_not_used(nvme_path: Path, drives: Measures, monkeypatch: pytest.MonkeyPatch) -> None:
    drives((SLOW, SLOW))
    monkeypatch.setattr(encoding_choice, "codec_s", lambda: 1e-3)
    _model, optimizer = wrap(nvme_path)
    assert chosen(optimizer)[0] == "exact"
    swapper.of(optimizer).close()


def test_a_slow_step_is_not_made_slower(nvme_path: Path, drives: Measures, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that computes for longer than the drive takes hides the drive, and would not hide the codec."""
    drives((SLOW, SLOW))
    monkeypatch.setattr(encoding_choice, "codec_s", lambda: 1e-12)
    monkeypatch.setattr(encoding_choice, "_step_s", lambda optimizer: 1e-3)
    _model, optimizer = wrap(nvme_path)
    assert chosen(optimizer)[0] == "exact"
    swapper.of(optimizer).close()


@pytest.mark.parametrize(("factor", "encoding"), [(1.01, "packed"), (0.99, "exact")])
def test_the_rule_is_the_documented_one(
    factor: float, encoding: str, nvme_path: Path, drives: Measures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With figures for all that is measured: 0.9 x bytes / drive > 1.25 x (step + 2 x packing and unpacking)."""
    step_s, value_s = 3e-9, 2e-9
    monkeypatch.setattr(encoding_choice, "codec_s", lambda: value_s)
    monkeypatch.setattr(encoding_choice, "_step_s", lambda optimizer: step_s)
    optimizer = adamw(make_model())
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numel = sum(p.numel() for p in parameters)
    packable = sum(2 * p.numel() for p in parameters if p.nbytes >= 16 << 10)  # `exp_avg` and `exp_avg_sq`.
    plan = OptimizerPlan(optimizer, config_of(nvme_path), 0)
    beyond_bytes = plan.stored_bytes - (256 << 10)  # That much the pool may hold.
    assert beyond_bytes > 0
    at_s = 1.25 * (step_s * numel + 2 * value_s * packable)
    drives((FAST, 0.9 * beyond_bytes / at_s / factor))
    _model, wrapped = wrap(nvme_path)
    assert chosen(wrapped)[0] == encoding
    swapper.of(wrapped).close()


def test_the_slower_way_decides_and_drives_add_up(tmp_path: Path, drives: Measures) -> None:
    paths = [tmp_path / "one", tmp_path / "two"]
    for path in paths:
        path.mkdir()
    for speeds, encoding in [
        ([(SLOW, SLOW)] * 2, "packed"),
        ([(SLOW, FAST)] * 2, "packed"),
        ([(FAST, SLOW)] * 2, "packed"),
        ([(SLOW, SLOW), (FAST, FAST)], "exact"),
    ]:
        drives(*speeds)
        model, optimizer = wrap(paths)
        assert chosen(optimizer)[0] == encoding, speeds
        plain = make_model()
        other = adamw(plain)
        run(plain, other, range(2))
        run(model, optimizer, range(2))
        assert_same(plain, model)
        swapper.of(optimizer).close()


@pytest.mark.long
def test_a_capped_drive_is_measured(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is faked but the drive's speed: 2 MB/s, where any processor is many times as fast, also a busy one."""
    slow = functools.partial(AsyncIOHandle, faults=FaultPlan(bytes_per_second=2_000_000))
    monkeypatch.setattr("swapper.session.AsyncIOHandle", slow)
    _model, optimizer = wrap(nvme_path)
    assert chosen(optimizer)[0] == "packed", chosen(optimizer)[1]
    swapper.of(optimizer).close()


# --- What is never measured ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "encoding", "reason"),
    [
        ({"encoding": "unpacked"}, "exact", ""),
        ({"encoding": "packed"}, "packed", ""),
        ({"encoding": {"exp_avg": "exact"}}, "exact", ""),
        ({"encoding": {"exp_avg": "bf16", "exp_avg_sq": "unpacked"}}, "bf16", ""),
        ({"device": "cpu"}, "exact", ""),
        ({"device": "cpu", "encoding": "unpacked"}, "exact", ""),
        ({"step_in_backward": True}, "exact", "with step_in_backward"),
    ],
    ids=str,
)
def test_nothing_is_measured_where_nothing_is_to_be_chosen(
    settings: dict[str, Any], encoding: str, reason: str, nvme_path: Path, drives: Measures
) -> None:
    calls = drives((SLOW, SLOW))
    _model, optimizer = wrap(nvme_path, **settings)
    name, found = chosen(optimizer)
    assert name == encoding and found.startswith(reason) and bool(found) == bool(reason)
    assert not calls
    swapper.of(optimizer).close()


def test_state_that_the_pool_can_hold_is_not_packed(
    nvme_path: Path, drives: Measures, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = drives((SLOW, SLOW))
    monkeypatch.setattr(encoding_choice, "LEAST_BYTES", 256 << 20)
    _model, optimizer = wrap(nvme_path)
    assert chosen(optimizer)[0] == "exact" and "that the pool cannot hold" in chosen(optimizer)[1]
    assert not calls
    swapper.of(optimizer).close()


def test_classes_whose_steps_cannot_be_timed_are_not_packed(nvme_path: Path, drives: Measures) -> None:
    calls = drives((SLOW, SLOW))
    model = make_model()
    whole = torch.optim.Adafactor([p for p in model.parameters() if p.dim() == 2])
    swapper.wrap_optimizer(whole, swapper.OffloadConfig(nvme_path=nvme_path, offload_optimizer={"device": "nvme"}))
    assert chosen(whole) == ("exact", "Adafactor is not known to be elementwise, so how long it steps is not known")
    swapper.of(whole).close()
    stateless = torch.optim.SGD(model.parameters(), lr=0.1)
    swapper.wrap_optimizer(stateless, config_of(nvme_path))
    assert chosen(stateless) == ("exact", "nothing of it can be packed")
    swapper.of(stateless).close()
    assert not calls


def test_steps_are_not_taken_from_an_accelerator(nvme_path: Path, drives: Measures) -> None:
    calls = drives((SLOW, SLOW))
    optimizer, config = adamw(make_model()), config_of(nvme_path)
    plan = OptimizerPlan(optimizer, config, 0)
    plan.on_accelerator = True
    measure = swapper.api.calls.drive_speeds
    assert encoding_choice.choose_encoding([optimizer], [plan], config, {}, itertools.count(), measure) == [plan]
    assert plan.encoding_reason == "the parameters are on an accelerator" and not calls


def test_unpacked_is_for_any_device(nvme_path: Path) -> None:
    for device in ("none", "cpu", "nvme"):
        swapper.OffloadConfig(nvme_path=nvme_path, offload_optimizer={"device": device, "encoding": "unpacked"})
    with pytest.raises(swapper.ConfigError, match="packed has no use"):
        swapper.OffloadConfig(offload_optimizer={"device": "none", "encoding": "packed"})


# --- check -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bps", "encoding"), [(SLOW, "packed"), (FAST, "unpacked")])
def test_check_chooses_as_a_run_does(
    bps: float, encoding: str, nvme_path: Path, drives: Measures, capsys: pytest.CaptureFixture[str]
) -> None:
    drives((bps, bps))
    model = make_model()
    optimizer = adamw(model)
    report = swapper.check(model, optimizer, config_of(nvme_path))
    line = next(line for line in capsys.readouterr().out.splitlines() if "a step would take the drive" in line)
    assert line.strip().startswith("packed" if encoding == "packed" else "not packed")
    assert report.encoding_reason in line
    named = swapper.check(model, optimizer, config_of(nvme_path, encoding=encoding))
    assert named.encoding_reason == "" and "a step would" not in capsys.readouterr().out
    assert (report.packed_numel, report.state_bytes, report.disk_bytes) == (
        named.packed_numel,
        named.state_bytes,
        named.disk_bytes,
    )
    assert bool(report.packed_numel) == (encoding == "packed")


# --- Ranks -----------------------------------------------------------------------------------------------------------

SHAPES = [(301, 64), (200, 71), (12, 12)]


def values_of(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def make_sharded(mesh: Any) -> tuple[nn.ParameterList, torch.optim.Optimizer]:
    values = values_of(0)
    module = nn.ParameterList(v if mesh is None else distribute_tensor(v, mesh, [Shard(0)]) for v in values)
    return module, torch.optim.AdamW(module.parameters(), lr=1e-2)


def train(module: nn.ParameterList, optimizer: torch.optim.Optimizer, steps: range, mesh: Any) -> None:
    for seed in steps:
        for p, gradient in zip(module, values_of(1 + seed), strict=True):
            p.grad = gradient if mesh is None else distribute_tensor(gradient, mesh, [Shard(0)])
        optimizer.step()
        optimizer.zero_grad()


def compare(module: nn.ParameterList, optimizer: torch.optim.Optimizer, expected: dict[str, Any]) -> None:
    def whole(value: Any) -> torch.Tensor:
        return value.full_tensor() if hasattr(value, "full_tensor") else value

    for p, value in zip(module, expected["values"], strict=True):
        assert same_bits(whole(p.detach()), value)
    state = optimizer.state_dict()["state"]
    for number, entries in expected["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert same_bits(whole(state[number][key]), entries[key]), (number, key)


def sharded_config(path: Path, encoding: str = "exact") -> swapper.OffloadConfig:
    state = {"device": "nvme", "encoding": encoding}
    return swapper.OffloadConfig(nvme_path=path, pool_bytes="96KiB", bucket_bytes="16KiB", offload_optimizer=state)


def choose_by_rank(rank: int, directory: str) -> None:
    torch.distributed.init_process_group("gloo")
    try:
        path = Path(directory)
        expected = torch.load(path / "expected.pt")
        mesh = init_device_mesh("cpu", (2,))
        encoding_choice.LEAST_BYTES = 1
        for packing in (0, 1):  # The rank that finds its drive slow.
            bps = SLOW if rank == packing else FAST
            swapper.api.calls.drive_speeds = lambda config, bps=bps: [DriveSpeed(bps, bps)]
            module, optimizer = make_sharded(mesh)
            swapper.wrap_optimizer(optimizer, sharded_config(path))
            assert chosen(optimizer)[0] == ("packed" if rank == packing else "exact")
            train(module, optimizer, range(2), mesh)
            swapper.save_checkpoint(path / f"saved-{packing}", module, optimizer)
            train(module, optimizer, range(2, 4), mesh)
            compare(module, optimizer, expected)
            # Saved when the other rank was the one that packs, and by one process.
            for name in (*(["saved-0"] if packing else []), "saved"):
                swapper.load_checkpoint(path / name, module, optimizer)
                train(module, optimizer, range(2, 4), mesh)
                compare(module, optimizer, expected)
            swapper.of(optimizer).close()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.long
def test_each_rank_chooses_by_itself(nvme_path: Path) -> None:
    module, optimizer = make_sharded(None)
    swapper.wrap_optimizer(optimizer, sharded_config(nvme_path, "unpacked"))
    train(module, optimizer, range(2), None)
    swapper.save_checkpoint(nvme_path / "saved", module, optimizer)
    train(module, optimizer, range(2, 4), None)
    expected = {"values": [p.detach() for p in module], "state": optimizer.state_dict()["state"]}
    torch.save(expected, nvme_path / "expected.pt")
    ranks.in_processes(choose_by_rank, str(nvme_path))
    for number in (0, 1):
        swapper.load_checkpoint(nvme_path / f"saved-{number}", module, optimizer)
        train(module, optimizer, range(2, 4), None)
        compare(module, optimizer, torch.load(nvme_path / "expected.pt"))
    swapper.of(optimizer).close()
