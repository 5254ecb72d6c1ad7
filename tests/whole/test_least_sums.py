"""The least sums that construction accepts are enough for training: `pool_bytes` and `device_bytes`, drawn programs.

Each program is a model, one to three optimizers with windows that may overlap, and settings. It is built with sums that
are too small, then with what each refusal names, and is trained with exactly that, to the bits of the plain program.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling import ALL, EVERY, SEED
from torch import nn
from training import same_bits

import swapper
from swapper.errors import ConfigError
from swapper.parameter import records as parameter_records
from swapper.sizes import parse_size

COUNT = 200 if EVERY else 60
NUMBERS = sorted({*range(COUNT), 121, 186}) if ALL else (121, 186)
DEVICE_NUMBERS = range(COUNT if EVERY else COUNT // 2) if ALL else (13, 19)
"""Of programs. By default some that found no room before steps in backward gave back what they kept."""

STEPS = 3
WIDE = 64


class Gated(nn.Module):
    """A module that uses a parameter of its own around another module."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(hidden, WIDE))
        self.inner = nn.Linear(WIDE, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x) @ self.gain
        return out


class Short(nn.Module):
    """Many parameters that are short."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.shifts = nn.ParameterList(torch.rand(WIDE) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for shift in self.shifts:
            x = x + shift
        return x


def block_of(kind: str, size: int, others: Sequence[nn.Module]) -> nn.Module:
    if kind == "tied":
        return next((other for other in others if isinstance(other, nn.Sequential)), nn.Identity())
    if kind == "gated":
        return Gated(size)
    if kind == "short":
        return Short(size // 8)
    block = nn.Sequential(nn.Linear(WIDE, size), nn.GELU(), nn.Linear(size, WIDE))
    if kind == "transposed":
        block[0].weight.data = block[0].weight.data.t().contiguous().t()
    return block


@dataclass(frozen=True)
class Program:
    """What is drawn.

    Attributes:
        blocks: kind and size of each.
        owners: the optimizers, each the numbers of its blocks; a block may be in none.
        begin: the step at which each is made.
        order: in which they step; `between`: after which of them the model is evaluated, and blocks of it trained.
    """

    blocks: tuple[tuple[str, int], ...]
    owners: tuple[tuple[int, ...], ...]
    begin: tuple[int, ...]
    order: tuple[int, ...]
    between: tuple[str, ...]
    dtype: torch.dtype
    masters: bool
    state: str
    gradient: str
    parameter: str
    in_backward: bool
    passes: int
    step_device: str
    bucket_kib: int
    group_bytes: int
    resident_kib: int


def draw(number: int, on_device: bool) -> Program:
    chance = random.Random(str(number + 1000 * SEED))
    kinds = ["linear"] * 4 + ["gated", "short", "transposed", "tied"]
    blocks = tuple((chance.choice(kinds), chance.choice([8, 64, 200, 256])) for _ in range(chance.randint(2, 7)))
    count = chance.choice([1, 2, 3, 3])
    at = [chance.randrange(count) for _ in blocks]
    at[:count] = range(count)
    at[len(blocks) :] = []
    owners = tuple(tuple(i for i, owner in enumerate(at) if owner == n) for n in range(count))
    dtype = chance.choice([torch.float32, torch.float32, torch.bfloat16])
    parameter = chance.choice(["nvme", "nvme", "nvme", "cpu", "none"]) if on_device else chance.choice(["nvme", "none"])
    state = chance.choice(["nvme", "nvme", "cpu"])
    drawn = Program(
        blocks=blocks,
        owners=tuple(owner for owner in owners if owner),
        begin=tuple(chance.choice([0, 0, 1]) for _ in range(3)),
        order=tuple(chance.sample(range(3), 3)),
        between=tuple(chance.choice(["", "evaluate", "train"]) for _ in range(3)),
        dtype=dtype,
        masters=dtype is not torch.float32 and chance.random() < 0.7,
        state=state,
        gradient=chance.choice(["nvme", "cpu", "none"]) if on_device else chance.choice(["nvme", "none"]),
        parameter=parameter,
        in_backward=chance.random() < 0.6,
        passes=chance.choice([1, 1, 2]),
        step_device=chance.choice(["cpu", "device", "device"]) if on_device else "cpu",
        bucket_kib=chance.choice([16, 48, 96, 200]),
        group_bytes=chance.choice([4_000, 20_000, 40_000, 1 << 24]),
        resident_kib=chance.choice([0, 0, 0, 40, 150]),
    )
    return replace(drawn, state="none") if chance.random() < 0.2 else drawn


def model_of(program: Program, device: str) -> nn.Sequential:
    torch.manual_seed(0)
    made: list[nn.Module] = []
    for kind, size in program.blocks:
        made.append(block_of(kind, size, made))
    return nn.Sequential(*made).to(device, program.dtype)


def parameters_of(program: Program, model: nn.Sequential) -> list[list[nn.Parameter]]:
    """Those of each optimizer; a tied one is the first's. Without those that have none."""
    seen: dict[nn.Parameter, None] = {}
    found: list[list[nn.Parameter]] = []
    for owner in program.owners:
        mine = dict.fromkeys(p for i in owner for p in model[i].parameters() if p not in seen)
        seen.update(mine)
        found.append(list(mine))
    return found


class Plain:
    """The reference: steps copies where a step is to be made, and the parameters get them back."""

    def __init__(self, parameters: list[nn.Parameter], program: Program) -> None:
        self.parameters = parameters
        place = parameters[0].device if program.step_device == "device" else torch.device("cpu")
        dtype = torch.float32 if program.masters else program.dtype
        self.copies = [nn.Parameter(p.detach().to(place, dtype, copy=True)) for p in parameters]
        self.optimizer = torch.optim.AdamW(self.copies, lr=1e-3)

    def step(self) -> None:
        for p, mine in zip(self.parameters, self.copies, strict=True):
            mine.grad = None if p.grad is None else p.grad.to(mine)
        self.optimizer.step()
        with torch.no_grad():
            for p, mine in zip(self.parameters, self.copies, strict=True):
                p.copy_(mine)


class Trained:
    """One run: `optimizers` are those of the plain program, or swapped ones."""

    def __init__(self, program: Program, model: nn.Sequential, config: swapper.OffloadConfig | None) -> None:
        self.program = program
        self.model = model
        self.config = config
        self.generator = torch.Generator().manual_seed(1)
        self.optimizers: dict[int, Any] = {}
        self.noted: list[float] = []

    def begin(self, step: int) -> None:
        parameters = parameters_of(self.program, self.model)
        new = {
            n: mine
            for n, mine in enumerate(parameters)
            if mine and self.program.begin[n] == step and n not in self.optimizers
        }
        if self.config is None:
            self.optimizers |= {n: Plain(mine, self.program) for n, mine in new.items()}
            return
        made = {n: torch.optim.AdamW(mine, lr=1e-3) for n, mine in new.items()}
        if made or step == 0:
            swapper.offload(self.model, list(made.values()), self.config)
        self.optimizers |= made

    def loss(self, blocks: Sequence[nn.Module] | None = None) -> torch.Tensor:
        p = next(self.model.parameters())
        x = torch.randn(4, WIDE, generator=self.generator).to(p.device, self.program.dtype)
        if blocks is None:
            return self.model(x).float().square().mean()
        return torch.stack([block(x).float().square().mean() for block in blocks]).sum()

    def pass_over(self, blocks: Sequence[nn.Module] | None = None) -> None:
        for _ in range(self.program.passes):
            loss = self.loss(blocks)
            loss.backward()
            self.noted.append(loss.item())

    def step(self, n: int, *, over: bool) -> None:
        """With `over`, the step was made in backward, by the plain program right after it."""
        if self.config is not None or not over:
            self.optimizers[n].step()
        for p in parameters_of(self.program, self.model)[n]:
            p.grad = None

    def train(self) -> list[float]:
        program = self.program
        for step in range(STEPS):
            self.begin(step)
            self.pass_over()
            mine = [n for n in program.order if n in self.optimizers]
            if self.config is None and program.in_backward:
                for n in mine:
                    self.optimizers[n].step()
            for n in mine:
                self.step(n, over=program.in_backward)
                if program.between[n] == "evaluate":
                    with torch.no_grad():
                        self.noted.append(self.loss().item())
                # Not of tied blocks: they may be another optimizer's, whose window is not over.
                blocks = [self.model[i] for i in program.owners[n] if program.blocks[i][0] != "tied"]
                if program.between[n] == "train" and any(True for each in blocks for _ in each.parameters()):
                    if self.is_shared(blocks, n):
                        continue
                    self.pass_over(blocks)
                    if self.config is None and program.in_backward:
                        self.optimizers[n].step()
                    self.step(n, over=program.in_backward)
            for p in self.model.parameters():
                p.grad = None
        return self.noted

    def is_shared(self, blocks: Sequence[nn.Module], n: int) -> bool:
        mine = set(parameters_of(self.program, self.model)[n])
        return any(p not in mine for block in blocks for p in block.parameters())

    def close(self) -> None:
        if (kept := vars(self.model).get("swapper")) is not None:
            kept.close(keep_values=True)
        for optimizer in self.optimizers.values():
            swapper.of(optimizer).close()


def settings_of(program: Program, path: Path, pool_bytes: int, device_bytes: int | None) -> swapper.OffloadConfig:
    resident = {"resident_bytes": program.resident_kib << 10}
    return swapper.OffloadConfig(
        nvme_path=path,
        pool_bytes=pool_bytes,
        bucket_bytes=program.bucket_kib << 10,
        gradient_accumulation_steps=program.passes,
        offload_optimizer={
            "device": program.state, "master_weights": program.masters, "step_in_backward": program.in_backward,
            "step_device": program.step_device, **(resident if program.state == "nvme" else {}),
        },
        offload_gradient={"device": program.gradient},
        offload_param={
            "device": program.parameter, "device_bytes": device_bytes,
            **(resident if program.parameter == "nvme" else {}),
            "device_resident_bytes": program.resident_kib << 10 if device_bytes is not None else 0,
        },
    )  # fmt: skip


def train_with_the_least(program: Program, path: Path, device: str) -> tuple[list[float], nn.Sequential, int, int]:
    """What training noted, with the sums that the last refusal named. And the model, and the sums."""
    pool_bytes, device_bytes = 1, 1
    for _ in range(12):
        model = model_of(program, device)
        with_device = device != "cpu" and program.parameter != "none"
        run: Trained | None = None
        try:
            config = settings_of(program, path, pool_bytes, device_bytes if with_device else None)
            run = Trained(program, model, config)
            noted = run.train()
            run.close()
            return noted, model, pool_bytes, device_bytes
        except ConfigError as error:
            if run is not None:
                run.close()
            if found := re.search(r"device_bytes: .* set it to at least (\d+)", str(error)):
                assert int(found[1]) > device_bytes, error
                device_bytes = int(found[1])
                continue
            if found := re.search(r"et pool_bytes to at least '?(\d+[KM]?i?B?)", str(error)):
                assert parse_size(found[1]) > pool_bytes, error
                pool_bytes = parse_size(found[1])
                continue
            raise
    raise AssertionError("the refusals name more and more")


def check(program: Program, path: Path, device: str) -> tuple[int, int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parameter_records, "GROUP_BYTES", program.group_bytes)
        plain = model_of(program, device)
        expected = Trained(program, plain, None).train()
        noted, model, pool_bytes, device_bytes = train_with_the_least(program, path, device)
    assert noted == expected
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert same_bits(p.cpu(), q.cpu()), name
    return pool_bytes, device_bytes


@pytest.mark.parametrize("number", NUMBERS)
def test_the_least_of_the_pool_is_enough(number: int, nvme_path: Path) -> None:
    check(draw(number, on_device=False), nvme_path, "cpu")


@pytest.mark.parametrize("number", DEVICE_NUMBERS)
def test_the_least_of_the_pool_and_of_a_device_is_enough(number: int, nvme_path: Path, device: str) -> None:
    check(draw(number, on_device=True), nvme_path, device)
