"""Models of all structures train and evaluate to the same bits with their parameters on disk."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import (
    CASES,
    Checkpointed,
    loss_of,
)
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from twins import Run, run_twice

pytestmark = pytest.mark.packs_too

aten = torch.ops.aten

WITH_BLOCKS = ["gpt2 tied", "llama", "mamba", "mixtral", "resnet", "used twice", "lora", "frozen"]
AUTOCAST = ["gpt2 functionally tied", "t5", "mamba", "mixtral", "torch encoder", "resnet channels_last", "lstm", "lora"]


def each(names: Iterable[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", names, ids=lambda name: name.replace(" ", "-").replace(",", ""))


@pytest.mark.long
@pytest.mark.sampled(10)
@each(CASES)
def test_train_accumulate_and_evaluate(name: str, nvme_path: Path) -> None:
    case = CASES[name]

    def program(run: Run) -> None:
        for _ in range(2):
            loss_of(run, case.inputs).backward()
            run.finish_step()
        run.model.eval()
        with torch.no_grad():
            run.note("evaluated without gradients", run.model(*case.inputs(run.generator)))
        with torch.inference_mode():
            run.note("evaluated in inference mode", run.model(*case.inputs(run.generator)))
        run.note("evaluated", run.model(*case.inputs(run.generator)))
        run.model.train()
        for _ in range(3):
            (loss_of(run, case.inputs) / 3).backward()
        run.finish_step("accumulated")
        losses = [loss_of(run, case.inputs) for _ in range(2)]
        sum(losses, torch.zeros(())).backward()
        run.finish_step("several forwards")

    run_twice(nvme_path, case.make, program, spare_bytes=case.spare_bytes)


class CheckpointedInside(nn.Module):
    """Recomputes the forward of a block without calling the block, whose hooks then do not run."""

    def __init__(self, block: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.block = block
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.use_reentrant and not x.requires_grad:
            x = x.detach().requires_grad_()
        y: torch.Tensor = checkpoint(self.block.forward, x, use_reentrant=self.use_reentrant)
        return y


@pytest.mark.long
@pytest.mark.sampled(5)
@each(WITH_BLOCKS)
@pytest.mark.parametrize("wrapper", [Checkpointed, CheckpointedInside], ids=["blocks", "forwards"])
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["saved", "reentrant"])
def test_activation_checkpointing(
    name: str,
    wrapper: Callable[[nn.Module, bool], nn.Module],
    use_reentrant: bool,
    nvme_path: Path,
) -> None:
    case = CASES[name]

    def make() -> nn.Module:
        model = case.make()
        blocks = model.blocks
        assert isinstance(blocks, nn.ModuleList)
        for i, block in enumerate(blocks):
            blocks[i] = wrapper(block, use_reentrant)
        return model

    def program(run: Run) -> None:
        for _ in range(2):
            for _ in range(2):
                loss_of(run, case.inputs).backward()
            run.finish_step()

    run_twice(nvme_path, make, program, spare_bytes=case.spare_bytes)


SAVED_OPERATORS: dict[str, Callable[[Any], bool]] = {
    "products": lambda op: op.overloadpacket in (aten.addmm, aten.mm, aten.bmm, aten.convolution, aten.matmul),
    "some": lambda op: op.overloadpacket in (aten.mul, aten.add, aten.mm, aten.gelu, aten.relu),
    "none": lambda op: False,
}


@pytest.mark.long
@pytest.mark.sampled(5)
@each(WITH_BLOCKS)
@pytest.mark.parametrize("saved", SAVED_OPERATORS)
@pytest.mark.parametrize("functional", [False, True], ids=["blocks", "functions"])
def test_selective_activation_checkpointing(name: str, saved: str, functional: bool, nvme_path: Path) -> None:
    """torch counts the operators of forward and backward, among which may be none of ours."""
    case = CASES[name]

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        chosen = SAVED_OPERATORS[saved](op)
        return CheckpointPolicy.MUST_SAVE if chosen else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    class Selective(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            block = (lambda x: self.block(x)) if functional else self.block
            y: torch.Tensor = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
            return y

    def make() -> nn.Module:
        model = case.make()
        assert isinstance(model.blocks, nn.ModuleList)
        for i, block in enumerate(model.blocks):
            model.blocks[i] = Selective(block)
        return model

    def program(run: Run) -> None:
        for _ in range(2):
            for _ in range(2):
                loss_of(run, case.inputs).backward()
            run.finish_step()

    run_twice(nvme_path, make, program, spare_bytes=case.spare_bytes)


@pytest.mark.long
@pytest.mark.sampled(4)
@each(AUTOCAST)
def test_autocast(name: str, nvme_path: Path) -> None:
    case = CASES[name]
    if name == "lstm":
        try:
            with torch.autocast("cpu", torch.bfloat16):
                case.make()(*case.inputs(torch.Generator()))
        except RuntimeError as error:
            pytest.skip(f"torch itself has no LSTM in bf16 on this processor: {error}")

    def program(run: Run) -> None:
        for _ in range(2):
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = loss_of(run, case.inputs)
                loss.backward()
            run.finish_step()
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            run.model.eval()
            run.note("evaluated", run.model(*case.inputs(run.generator)))

    run_twice(nvme_path, case.make, program, spare_bytes=case.spare_bytes)


@pytest.mark.long
@pytest.mark.sampled(8)
@each(["mlp", "gpt2 tied", "resnet channels_last", "lstm", "mixtral", "odd shapes", "t5"])
@pytest.mark.parametrize("kind", ["SGD", "momentum", "Adafactor", "in memory"])
def test_optimizers(name: str, kind: str, nvme_path: Path) -> None:
    case = CASES[name]

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        decayed = [p for p in model.parameters() if p.dim() > 1]
        groups = [
            {"params": decayed, "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
        ]
        if kind == "SGD":
            return torch.optim.SGD(groups, lr=0.1)
        if kind == "momentum":
            return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        if kind == "Adafactor":
            return torch.optim.Adafactor(groups)
        return torch.optim.AdamW(groups)

    def program(run: Run) -> None:
        for _ in range(3):
            loss_of(run, case.inputs).backward()
            run.finish_step()

    device = "none" if kind == "in memory" else "nvme"
    run_twice(nvme_path, case.make, program, optimizer, spare_bytes=case.spare_bytes, optimizer_device=device)
