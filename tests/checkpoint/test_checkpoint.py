"""`save_checkpoint` and `load_checkpoint`: resumed to the bit, whatever was swapped then and is swapped now."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpt
import pytest
import torch
from test_optimizer_exact import MORE, OPTIMIZERS
from torch import nn
from torch.optim import Optimizer
from twins import bits, small_records

import swapper

Make = Callable[[list[nn.Parameter]], Optimizer]


class Odd(nn.Module):
    """Shapes of all kinds: odd, empty, scalar, channels_last, tied, frozen; buffers; a dtype that is no float."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(401, 96)
        self.first = nn.Linear(96, 77)
        self.conv = nn.Conv2d(3, 64, 5).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(64)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.frozen = nn.Parameter(torch.randn(50, 100), requires_grad=False)
        self.last = nn.Linear(96, 401, bias=False)
        self.last.weight = self.embedding.weight
        self.back = nn.Linear(77, 96)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def loss(self, turn: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(turn)
        tokens = torch.randint(401, (4, 9), generator=generator)
        image = torch.randn(2, 3, 9, 9, generator=generator).to(self.scale.dtype)
        self.calls += 1
        hidden = self.back(torch.tanh(self.first(self.embedding(tokens)))) * self.scale
        pictures = self.norm(self.conv(image)).square().mean() + self.nothing.sum() + self.frozen.mean()
        return nn.functional.cross_entropy(self.last(hidden).flatten(0, 1), tokens.flatten()) + pictures


class Words(gpt.GPT):
    """The examples' model, on data of its own."""

    def __init__(self) -> None:
        super().__init__(gpt.SIZES["tiny"])

    def loss(self, turn: int) -> torch.Tensor:  # type: ignore[override]
        generator = torch.Generator().manual_seed(turn)
        tokens = torch.randint(256, (2, 33), generator=generator)
        return super().loss(tokens[:, :-1], tokens[:, 1:])


def make_model(kind: type[nn.Module] = Odd, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return kind().to(dtype)


def settings_of(way: str, path: Path, masters: bool = False) -> dict[str, Any] | None:
    """The config of a way to keep state; None is no wrapper at all."""
    state = {"device": "nvme", "master_weights": masters}
    common: dict[str, Any] = {"nvme_path": path, "pool_bytes": "24MiB", "bucket_bytes": "256KiB"}
    match way:
        case "nvme":
            return {**common, "offload_optimizer": state}
        case "cut otherwise":
            return {**common, "pool_bytes": "31MiB", "bucket_bytes": "100KiB", "offload_optimizer": state}
        case "drives":
            paths = [path / "one", path / "two"]
            for each in paths:
                each.mkdir(exist_ok=True)
            return {**common, "nvme_path": paths, "offload_optimizer": state}
        case "cpu":
            return {**common, "offload_optimizer": {**state, "device": "cpu"}}
        case "resident":
            return {**common, "offload_optimizer": {**state, "resident_bytes": "1MiB"}}
        case "everything":
            devices = {"offload_param": {"device": "nvme"}, "offload_gradient": {"device": "nvme"}}
            return {**common, **devices, "offload_optimizer": state}
        case "parameters":
            return {**common, "offload_param": {"device": "nvme"}, "offload_optimizer": {"device": "none"}}
        case "none":
            return {**common, "offload_optimizer": {"device": "none"}}
    assert way == "plain"
    return None


ALL = ["nvme", "cut otherwise", "drives", "cpu", "resident", "everything", "parameters", "none", "plain"]


class Training:
    """A model and its optimizer, kept in one of the ways."""

    def __init__(
        self,
        way: str,
        path: Path,
        make: Make,
        kind: type[nn.Module] = Odd,
        dtype: torch.dtype = torch.float32,
        masters: bool = False,
        **more: Any,
    ) -> None:
        self.model = make_model(kind, dtype)
        self.optimizer = make([p for p in self.model.parameters() if p.requires_grad])
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        settings = settings_of(way, path, masters)
        if settings is not None:
            config = swapper.OffloadConfig(**{**settings, **more})
            if config.offload_param.device == "nvme":
                with small_records():
                    swapper.offload(self.model, self.optimizer, config)
            else:
                swapper.wrap_optimizer(self.optimizer, config)
        self.turn = 0
        self.losses: list[Any] = []

    def steps(self, count: int) -> Training:
        for _ in range(count):
            loss = self.model.loss(self.turn)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.losses.append(bits(loss))
            self.turn += 1
        return self

    def save(self, directory: Path) -> swapper.SaveHandle:
        extra = {"turn": self.turn, "scheduler": self.scheduler.state_dict(), "losses": len(self.losses)}
        return swapper.save_checkpoint(directory, self.model, self.optimizer, extra)

    def load(self, directory: Path) -> Training:
        extra = swapper.load_checkpoint(directory, self.model, self.optimizer)
        self.turn = extra["turn"]
        self.scheduler.load_state_dict(extra["scheduler"])
        return self

    def everything(self) -> Any:
        """All bits of it."""
        return bits([dict(self.model.state_dict()), self.optimizer.state_dict()["state"], self.losses])

    def close(self) -> None:
        self.model = self.optimizer = self.scheduler = None
        gc.collect()


def options_of(training: Training) -> Any:
    return [{k: v for k, v in group.items() if k != "params"} for group in training.optimizer.param_groups]


def check_resume(path: Path, make: Make, before: str, after: str, **how: Any) -> None:
    reference = Training("nvme" if how.get("masters") else "plain", path, make, **how).steps(5)
    first = Training(before, path, make, **how).steps(3)
    first.save(path / "saved").wait()
    first.steps(1)  # What is linked must not change any more.
    first.close()
    second = Training(after, path, make, **how).steps(1)  # Its state is there already, and has to go.
    second.losses = reference.losses[:3]
    second.load(path / "saved").steps(2)
    assert second.everything() == reference.everything()
    assert options_of(second) == options_of(reference)


@pytest.mark.parametrize("name", [*OPTIMIZERS, *MORE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_optimizer_resumes_to_the_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    make = {**OPTIMIZERS, **MORE}[name]
    if name == "Muon" and dtype is torch.bfloat16:
        pytest.skip("its update is the same code in another dtype")
    kind = Words if name == "Adafactor" else Odd  # It divides by the length of an empty parameter.
    check_resume(tmp_path, make, "nvme", "cut otherwise", dtype=dtype, kind=kind)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_master_weights_resume_to_the_bit(name: str, tmp_path: Path) -> None:
    how: dict[str, Any] = {"dtype": torch.bfloat16, "masters": True, "kind": Words if name == "Adafactor" else Odd}
    check_resume(tmp_path, OPTIMIZERS[name], "nvme", "cut otherwise", **how)


def some_pairs(ways: list[str]) -> list[tuple[str, str]]:
    """Each of them before and after each third of the others, itself among them."""
    return [(a, b) for i, a in enumerate(ways) for j, b in enumerate(ways) if (i + 2 * j) % 3 == 0]


@pytest.mark.parametrize(("before", "after"), some_pairs(ALL))
def test_from_any_device_to_any_other(before: str, after: str, tmp_path: Path) -> None:
    check_resume(tmp_path, OPTIMIZERS["AdamW"], before, after)


MASTERS = ["nvme", "cut otherwise", "drives", "cpu", "resident", "everything"]


@pytest.mark.parametrize(("before", "after"), some_pairs(MASTERS))
def test_master_weights_from_any_device_to_any_other(before: str, after: str, tmp_path: Path) -> None:
    check_resume(tmp_path, OPTIMIZERS["AdamW"], before, after, dtype=torch.bfloat16, masters=True)


def test_fp16_masters_are_stored_whole(tmp_path: Path) -> None:
    check_resume(tmp_path, OPTIMIZERS["AdamW"], "nvme", "everything", dtype=torch.float16, masters=True, kind=Words)


def test_larger_models_of_many_records(tmp_path: Path) -> None:
    check_resume(tmp_path, OPTIMIZERS["AdamW"], "everything", "everything", kind=Words)


PROGRAM = """
import sys, json
from pathlib import Path
sys.path[:0] = {paths!r}
from test_checkpoint import *
training = Training({way!r}, Path({path!r}), OPTIMIZERS["AdamW"], dtype=torch.bfloat16, masters=True)
if {load!r}:
    training.load(Path({saved!r}))
training.steps({steps!r})
training.save(Path({saved!r})).wait()
"""


def test_a_new_process_resumes_to_the_bit(tmp_path: Path) -> None:
    how: dict[str, Any] = {"dtype": torch.bfloat16, "masters": True}
    reference = Training("nvme", tmp_path, OPTIMIZERS["AdamW"], **how).steps(5)
    paths = [path for path in sys.path if path.startswith(str(Path(__file__).resolve().parents[2]))]
    for way, load, steps in (("everything", False, 3), ("cut otherwise", True, 2)):
        program = PROGRAM.format(
            paths=paths, way=way, path=str(tmp_path), load=load, steps=steps, saved=str(tmp_path / "saved")
        )
        subprocess.run([sys.executable, "-c", program], check=True)
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
