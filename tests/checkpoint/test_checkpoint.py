"""`save_checkpoint` and `load_checkpoint`: resumed to the bit, whatever was swapped then and is swapped now."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ALL, Make, Odd, Training, Words, make_model, options_of, settings_of
from launcher import run_program
from torch import nn
from torch.optim import Optimizer
from training import MORE, OPTIMIZERS
from twins import bits

import swapper

Reference = tuple[list[Any], Any, Any]
REFERENCES: dict[object, Reference] = {}


def uninterrupted(path: Path, make: Make, **how: Any) -> Reference:
    """Losses, all bits and options after five steps; once for all that must resume to them."""
    key = make, *how.items()
    if key not in REFERENCES:
        run = Training("nvme" if how.get("masters") else "plain", path, make, **how).steps(5)
        REFERENCES[key] = run.losses, run.everything(), options_of(run)
        run.close()
    return REFERENCES[key]


def check_resume(path: Path, make: Make, before: str, after: str, **how: Any) -> None:
    losses, everything, options = uninterrupted(path, make, **how)
    first = Training(before, path, make, **how).steps(3)
    first.save(path / "saved").wait()
    first.steps(1)  # What is linked must not change any more.
    first.close()
    second = Training(after, path, make, **how).steps(1)  # Its state is there already, and has to go.
    second.losses = losses[:3]
    second.load(path / "saved").steps(2)
    assert second.everything() == everything
    assert options_of(second) == options


@pytest.mark.sampled(14)
@pytest.mark.parametrize("name", [*OPTIMIZERS, *MORE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_optimizer_resumes_to_the_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    make = {**OPTIMIZERS, **MORE}[name]
    if name == "Muon" and dtype is torch.bfloat16:
        pytest.skip("its update is the same code in another dtype")
    kind = Words if name == "Adafactor" else Odd  # It divides by the length of an empty parameter.
    check_resume(tmp_path, make, "nvme", "cut otherwise", dtype=dtype, kind=kind)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_master_weights_resume_to_the_bit(name: str, tmp_path: Path) -> None:
    how: dict[str, Any] = {"dtype": torch.bfloat16, "masters": True, "kind": Words if name == "Adafactor" else Odd}
    check_resume(tmp_path, OPTIMIZERS[name], "nvme", "cut otherwise", **how)


@pytest.mark.parametrize("after", ["cut otherwise", "everything"])
def test_torch_defaults_are_not_those_of_what_is_loaded(after: str, tmp_path: Path) -> None:
    """Under `torch.set_default_dtype`, which libraries call while they build a model."""
    dtype, how = torch.get_default_dtype(), {"dtype": torch.bfloat16, "masters": True}
    first = Training("nvme", tmp_path, OPTIMIZERS["AdamW"], **how).steps(3)  # type: ignore[arg-type]
    first.save(tmp_path / "saved").wait()
    second = Training(after, tmp_path, OPTIMIZERS["AdamW"], **how)  # type: ignore[arg-type]
    try:
        torch.set_default_dtype(torch.bfloat16)
        second.load(tmp_path / "saved")
    finally:
        torch.set_default_dtype(dtype)
    second.losses = first.losses
    assert second.everything() == first.everything()


def some_pairs(ways: list[str]) -> list[tuple[str, str]]:
    """Each of them before and after each third of the others, itself among them."""
    return [(a, b) for i, a in enumerate(ways) for j, b in enumerate(ways) if (i + 2 * j) % 3 == 0]


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("before", "after"), some_pairs(ALL))
def test_from_any_device_to_any_other(before: str, after: str, tmp_path: Path) -> None:
    check_resume(tmp_path, OPTIMIZERS["AdamW"], before, after)


MASTERS = ["nvme", "cut otherwise", "drives", "cpu", "resident", "everything"]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("before", "after"), some_pairs(MASTERS))
def test_master_weights_from_any_device_to_any_other(before: str, after: str, tmp_path: Path) -> None:
    check_resume(tmp_path, OPTIMIZERS["AdamW"], before, after, dtype=torch.bfloat16, masters=True)


@pytest.mark.long
def test_fp16_masters_are_stored_whole(tmp_path: Path) -> None:
    check_resume(tmp_path, OPTIMIZERS["AdamW"], "nvme", "everything", dtype=torch.float16, masters=True, kind=Words)


@pytest.mark.long
def test_larger_models_of_many_records(tmp_path: Path) -> None:
    check_resume(tmp_path, OPTIMIZERS["AdamW"], "everything", "everything", kind=Words)


PROGRAM = """
import sys, json
from pathlib import Path
sys.path[:0] = {paths!r}
from training import OPTIMIZERS
from checkpoints import Training, torch
training = Training({way!r}, Path({path!r}), OPTIMIZERS["AdamW"], dtype=torch.bfloat16, masters=True)
if {load!r}:
    training.load(Path({saved!r}))
training.steps({steps!r})
training.save(Path({saved!r})).wait()
"""


@pytest.mark.long
def test_a_new_process_resumes_to_the_bit(tmp_path: Path) -> None:
    how: dict[str, Any] = {"dtype": torch.bfloat16, "masters": True}
    reference = Training("nvme", tmp_path, OPTIMIZERS["AdamW"], **how).steps(5)
    paths = [path for path in sys.path if path.startswith(str(Path(__file__).resolve().parents[2]))]
    for way, load, steps in (("everything", False, 3), ("cut otherwise", True, 2)):
        program = PROGRAM.format(
            paths=paths, way=way, path=str(tmp_path), load=load, steps=steps, saved=str(tmp_path / "saved")
        )
        run_program([sys.executable, "-c", program], check=True)
    last = Training("nvme", tmp_path, OPTIMIZERS["AdamW"], **how).load(tmp_path / "saved")
    last.losses = reference.losses
    assert last.turn == 5
    assert last.everything() == reference.everything()


def test_a_parameter_changed_since_its_step_makes_its_master_anew(tmp_path: Path) -> None:
    """As without the checkpoint in between: the master is what the parameter was set to."""
    how: dict[str, Any] = {"dtype": torch.bfloat16, "masters": True}

    def changed(training: Training) -> Training:
        with torch.no_grad():
            training.model.first.weight.mul_(1.25)
        return training

    reference = changed(Training("nvme", tmp_path, OPTIMIZERS["AdamW"], **how).steps(2)).steps(2)
    first = changed(Training("nvme", tmp_path, OPTIMIZERS["AdamW"], **how).steps(2))
    first.save(tmp_path / "saved")
    for way in ("nvme", "cut otherwise"):
        second = Training(way, tmp_path, OPTIMIZERS["AdamW"], **how).load(tmp_path / "saved")
        second.losses = reference.losses[:2]
        assert second.steps(2).everything() == reference.everything()


class Contiguous(Odd):
    """The same with its elements in another order in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv.to(memory_format=torch.contiguous_format)


@pytest.mark.parametrize("after", ["nvme", "everything", "none"])
def test_another_order_of_elements_in_memory(after: str, tmp_path: Path) -> None:
    """The state of a model that was channels_last resumes in one that is not, with the same values."""
    first = Training("nvme", tmp_path, OPTIMIZERS["AdamW"]).steps(2)
    first.save(tmp_path / "saved")
    second = Training(after, tmp_path, OPTIMIZERS["AdamW"], kind=Contiguous).load(tmp_path / "saved")
    assert second.model.conv.weight.is_contiguous()
    mine, there = second.optimizer.state_dict()["state"], first.optimizer.state_dict()["state"]
    for number, state in there.items():
        for key, value in state.items():
            assert torch.equal(mine[number][key], value), (number, key)
    for name, value in first.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], value), name


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("channels", [4, 60])
def test_loaded_state_lies_in_memory_as_its_parameter_does(channels: int, swapped: bool, tmp_path: Path) -> None:
    """Also state that is too small for a file: fused kernels walk through memory, whatever the strides are."""

    def made(memory_format: torch.memory_format) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Conv2d(3, channels, 5).to(memory_format=memory_format)
        return model, torch.optim.AdamW(model.parameters(), fused=True)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).contiguous(memory_format=torch.contiguous_format)
            p.grad = torch.empty_like(p).copy_(p.grad)
        optimizer.step()
        return next(model.parameters()).detach().clone(memory_format=torch.contiguous_format)

    first = made(torch.channels_last)
    step(*first)
    swapper.save_checkpoint(tmp_path / "saved", *first).wait()
    second = made(torch.contiguous_format)
    if swapped:
        config = {"nvme_path": tmp_path, "pool_bytes": "1MiB", "offload_optimizer": {"device": "nvme"}}
        swapper.wrap_optimizer(second[1], swapper.OffloadConfig(**config))
    swapper.load_checkpoint(tmp_path / "saved", *second)
    weight = next(second[0].parameters())
    assert second[1].state_dict()["state"][0]["exp_avg"].stride() == weight.stride()
    torch.testing.assert_close(step(*second), step(*first))


def test_options_that_were_changed_come_back(tmp_path: Path) -> None:
    first = Training("nvme", tmp_path, OPTIMIZERS["AdamW"]).steps(1)
    first.optimizer.param_groups[0].update(lr=torch.tensor(0.5), betas=(0.5, 0.75), note="mine")
    first.save(tmp_path / "saved")
    second = Training("none", tmp_path, OPTIMIZERS["AdamW"]).load(tmp_path / "saved")
    assert bits(options_of(second)) == bits(options_of(first))


def test_what_is_loaded_is_refused_before_anything_changes(tmp_path: Path) -> None:
    Training("nvme", tmp_path, OPTIMIZERS["AdamW"]).steps(1).save(tmp_path / "saved")
    other = Training("nvme", tmp_path, OPTIMIZERS["SGD"]).steps(1)
    other.model.first = nn.Linear(96, 78)
    before = other.everything()
    with pytest.raises(swapper.ConfigError) as caught:
        swapper.load_checkpoint(tmp_path / "saved", other.model, other.optimizer)
    for part in ("first.weight has shape [78, 96]", "first.bias", "sgd.SGD", "adamw.AdamW", "Nothing was loaded"):
        assert part in str(caught.value)
    assert other.everything() == before


def test_groups_in_another_order_are_refused(tmp_path: Path) -> None:
    def groups(model: Any, turned: bool) -> Optimizer:
        decayed = {"params": [model.first.weight, model.back.weight], "weight_decay": 0.1}
        others = {"params": [model.first.bias, model.back.bias], "weight_decay": 0.0}
        optimizer = torch.optim.AdamW([others, decayed] if turned else [decayed, others], lr=1e-2)
        return swapper.wrap_optimizer(optimizer, settings_of("nvme", tmp_path) or {})

    model = make_model()
    swapper.save_checkpoint(tmp_path / "saved", model, groups(model, False))
    again = make_model()
    with pytest.raises(
        swapper.ConfigError, match=r"first\.weight is in group 1 of the optimizer, and in group 0 in the"
    ):
        swapper.load_checkpoint(tmp_path / "saved", again, groups(again, True))


def test_master_weights_are_not_dropped_in_silence(tmp_path: Path) -> None:
    how: dict[str, Any] = {"dtype": torch.bfloat16}
    Training("nvme", tmp_path, OPTIMIZERS["AdamW"], masters=True, **how).steps(1).save(tmp_path / "saved")
    for way in ("nvme", "none", "plain"):
        with pytest.raises(swapper.ConfigError, match="master_weights"):
            Training(way, tmp_path, OPTIMIZERS["AdamW"], **how).load(tmp_path / "saved")
