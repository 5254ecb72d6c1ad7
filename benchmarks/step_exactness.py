"""Native steps against the optimizer's own class: random and special values, compared bit by bit.

Each round fills parameters, gradients and state with new values, makes one step by the class in plain torch and one
natively, and compares everything that either has written: equal bits, or NaN in both. Rounds take turns with lengths
(each remainder by 64), 1 to 4 threads, the instruction sets that this processor has, learning rates, and counts of
steps. With masters the reference steps fp32 copies of the bf16 parameters. Ends with an error if any bit differs.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/step_exactness.py [--values 1e8] [--only 'SGD*' ...] [--masters] [--list]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from benchmark import keep_result, settings_of, system
from torch import Tensor, nn, optim

import swapper
from swapper.io import _native
from swapper.optimizer import native_step

SPECIAL = (0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-38, 3.4e38, -3.4e38, torch.inf, -torch.inf, torch.nan, 1.0, -1.0, 0.5)
LENGTHS = [*range(64, 128), 999, 16384, 65536 + 7, 131072 + 3]
RATES = (1e-3, 1e-4, 0.1, 1.0, 3e-7, 1e30)
STEPS = (2, 3, 7, 100, 12345, 1000003)
INSTRUCTION_SETS = ("AVX-512", "AVX2", "baseline")


class Lion(optim.Optimizer):
    """A user's own, after Chen et al. 2023."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                update = state["exp_avg"] * group["betas"][0] + p.grad * (1 - group["betas"][0])
                p.add_(update.sign_(), alpha=-group["lr"])
                state["exp_avg"].mul_(group["betas"][1]).add_(p.grad, alpha=1 - group["betas"][1])


class Replacing(optim.Optimizer):
    """A user's Adam that makes new tensors, of its state too, and needs a square with and without its root."""

    def __init__(self, params: Any, lr: float = 1e-3, floor: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "floor": floor})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                m = state["exp_avg"] * b1 + p.grad * (1 - b1)
                v = state["exp_avg_sq"] * b2 + p.grad * p.grad * (1 - b2)
                root = v.sqrt() + 1e-8
                if group["floor"]:
                    root = root + v * group["floor"]
                    m = m + state["exp_avg_sq"] * 1e-3
                state["exp_avg"], state["exp_avg_sq"] = m, v
                p.addcdiv_(m, root, value=-group["lr"] / (1 - b1 ** state["step"]))


class Bounded(optim.Optimizer):
    """A user's own, of bounds, powers and tensors of zeros."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                m, v, last = (state.get(key, torch.zeros_like(p)) for key in ("exp_avg", "exp_avg_sq", "last"))
                m = m * 0.9 + p.grad.clamp(max=3.0) + last.clamp_(-0.5, 0.5)
                v = v * 0.99 + p.grad**2 * 0.01
                update = (v + 1e-10).rsqrt() * m + (m.abs() ** 0.5).clamp(min=1e-3) ** -1
                p.sub_(update.square().clamp_(1e-6, 10.0), alpha=group["lr"])
                last.zero_().sub_(p.grad)
                state.update(exp_avg=m, exp_avg_sq=v, last=last)


swapper.register_elementwise(Lion)
swapper.register_elementwise(Replacing)
swapper.register_elementwise(Bounded)


def combined(cls: type[optim.Optimizer], *flags: dict[str, Any]) -> Iterator[tuple[str, tuple[Any, dict[str, Any]]]]:
    """The class without any of `flags`, with each of them, and with all; in each way of calling kernels."""
    ways: list[dict[str, Any]] = [{}, {"foreach": True}, {"fused": True}]
    if cls in (Lion, Replacing, Bounded):
        ways = ways[:1]
    elif cls not in (optim.Adam, optim.AdamW, optim.SGD, optim.Adagrad):
        ways = ways[:2]
    together: dict[str, Any] = {}
    for each in flags:
        together |= each
    for way in ways:
        for options in [{}, *flags, *([together] if len(flags) > 1 else [])]:
            names = [key if value is True else f"{key}={value}" for key, value in {**options, **way}.items()]
            yield "-".join([cls.__name__, *names]).replace(" ", ""), (cls, {**options, **way})


DECAY, MAXIMIZE = {"weight_decay": 0.1}, {"maximize": True}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    name: case
    for cls, *flags in (
        (optim.AdamW, {"weight_decay": 0.0}, MAXIMIZE, {"betas": (0.3, 0.4)}, {"eps": 0.0}, {"amsgrad": True}),
        (optim.Adam, DECAY, MAXIMIZE, {"betas": (0.3, 0.4)}, {"amsgrad": True}),
        (optim.SGD, DECAY, MAXIMIZE),
        (optim.SGD, {"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.3}, DECAY, MAXIMIZE),
        (optim.SGD, {"momentum": 0.9, "nesterov": True}, DECAY, MAXIMIZE),
        (optim.Adagrad, DECAY, MAXIMIZE, {"lr_decay": 0.1}),
        (optim.RMSprop, DECAY, MAXIMIZE, {"momentum": 0.9}, {"centered": True}),
        (optim.NAdam, DECAY, MAXIMIZE, {"decoupled_weight_decay": True}),
        (optim.RAdam, DECAY, MAXIMIZE, {"decoupled_weight_decay": True}),
        (optim.ASGD, DECAY, MAXIMIZE),
        (optim.Adamax, DECAY, MAXIMIZE),
        (optim.Adadelta, DECAY, MAXIMIZE),
        (Lion, {"weight_decay": 0.0}),
        (Replacing, {"floor": 0.1}),
        (Bounded,),
    )
    for name, case in combined(cls, *flags)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=float, default=1e8, help="of each case")
    parser.add_argument("--only", nargs="+", metavar="CASE", default=list(CASES), help="names, or patterns of them")
    parser.add_argument("--masters", action="store_true", help="bf16 parameters with masters, else fp32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="only print the names of the cases")
    parser.add_argument("--save", action="store_true", help="keep the result in results/")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    arguments = parser.parse_args()
    chosen = [name for name in CASES if any(fnmatch(name, each) for each in arguments.only)]
    if arguments.list:
        print(*chosen, sep="\n")
        return
    print(f"{system()}; {'bf16 with masters' if arguments.masters else 'fp32'}", flush=True)
    rows = []
    for name in chosen:
        row = tried(name, int(arguments.values), arguments.masters, arguments.seed)
        rows.append(row)
        print(f"{name:<64} {row['values']:>12,} values, {row['native']:>4.0%} native, {row['s']:.0f} s", flush=True)
    mode = "masters" if arguments.masters else "fp32"
    keep_result(
        arguments, f"step-exactness-{mode}", {"system": system(), "arguments": settings_of(arguments), "rows": rows}
    )


def tried(name: str, count: int, masters: bool, seed: int) -> dict[str, Any]:
    """Compare rounds until `count` values were. Raises SystemExit if a bit differs."""
    generator = torch.Generator().manual_seed(seed)
    sets = [number for number in range(len(INSTRUCTION_SETS)) if _native.has_instruction_set(number)][:2]
    values, round_, native, segments, start = 0, 0, 0, 0, time.perf_counter()
    while values < count:
        number = sets[round_ % len(sets)]
        native_step.best_instruction_set = lambda number=number: number  # type: ignore[attr-defined,misc]
        torch.set_num_threads(1 + round_ // len(sets) % 4)
        what = f"{name}, round {round_}, {INSTRUCTION_SETS[number]}, {torch.get_num_threads()} threads"
        stats = compare(name, masters, generator, round_, min(1 << 22, max(1 << 17, count // 24)), what)
        values += stats[0]
        native += stats[1]
        segments += stats[2]
        round_ += 1
    return {"case": name, "values": values, "native": native / segments, "s": time.perf_counter() - start}


def compare(
    name: str, masters: bool, generator: torch.Generator, round_: int, most: int, what: str
) -> tuple[int, int, int]:
    """One round. Returns the number of values, of segments stepped natively, and of all."""
    cls, options = CASES[name]
    lengths = [*LENGTHS, most]
    pool = values_of(generator, round_, 2 * most)

    def draw(numel: int) -> Tensor:
        begin = int(torch.randint(len(pool) - numel, (), generator=generator))
        return pool[begin : begin + numel].clone()

    options = {**options, "lr": RATES[torch.randint(len(RATES), (), generator=generator)]}
    start = [draw(n) for n in lengths]
    if masters:  # Rounded half as often as a master of fp16 weights would be.
        start = [(x.view(torch.int32) & -32768).view(torch.float32) if i % 2 else x for i, x in enumerate(start)]
        # A rounded NaN has one payload in vectors of torch and another elsewhere: it would be taken for an edit.
        start = [x.nan_to_num(0.25, torch.inf, -torch.inf) for x in start]
    plain_parameters = [nn.Parameter(x.bfloat16().float() if masters else x.clone()) for x in start]
    parameters = [nn.Parameter(x.bfloat16() if masters else x.clone()) for x in start]
    plain, mine = cls(plain_parameters, **options), cls(parameters, **options)
    gradient_dtype = torch.bfloat16 if masters else torch.float32
    for p, q in zip(plain_parameters, parameters, strict=True):
        q.grad = torch.ones(p.shape).to(gradient_dtype)
        p.grad = q.grad.to(torch.float32, copy=True)
    plain.step()
    mine.step()  # Some classes look at their parameters once.
    mine.state.clear()
    steps = STEPS[round_ % len(STEPS)]
    made = plain.state_dict()["state"]
    state = {i: made.get(i, {}) for i in range(len(lengths))}  # Plain SGD makes none.
    for i, entries in state.items():
        for key, value in entries.items():
            if isinstance(value, Tensor) and value.dim():
                value.copy_(draw(value.numel()))
                if key.startswith(("exp_avg_sq", "square_avg", "sum", "max_exp", "acc_delta")) and round_ % 3:
                    value.abs_()
            elif key == "step":
                entries[key] = torch.full_like(value, steps) if isinstance(value, Tensor) else steps
        if masters:
            entries["master_param"] = start[i]
    section = {"device": "cpu", "master_weights": masters, "native_step": "on"}
    config = swapper.OffloadConfig(pool_bytes="512MiB", bucket_bytes="64MiB", offload_optimizer=section)
    mine = swapper.wrap_optimizer(mine, config)
    with torch.no_grad():
        for p, q, x in zip(plain_parameters, parameters, start, strict=True):
            p.copy_(x)
            q.copy_(x)
            q.grad = draw(q.numel()).to(gradient_dtype)
            p.grad = q.grad.to(torch.float32, copy=True)
    mine.load_state_dict({"state": state, "param_groups": mine.state_dict()["param_groups"]})
    plain.load_state_dict(
        {
            "state": {i: {k: v for k, v in each.items() if k != "master_param"} for i, each in state.items()},
            "param_groups": plain.state_dict()["param_groups"],
        }
    )
    plain.step()
    mine.step()
    swapped = swapper.of(mine)
    for p, q in zip(plain_parameters, parameters, strict=True):
        state_of_mine = swapped.state(q)
        assert_same(p.detach().bfloat16() if masters else p, q, what, "parameter")
        if masters:
            assert_same(p, state_of_mine.pop("master_param"), what, "master")
        for key, value in plain.state[p].items():
            assert_same(value, state_of_mine.pop(key), what, key)
        if state_of_mine:
            raise SystemExit(f"{what}: there is more state: {list(state_of_mine)}")
    stats = swapped.stats()
    if masters and stats.masters_reset:
        raise SystemExit(f"{what}: masters were made anew, so nothing was tried")
    swapped.close()
    return sum(lengths), stats.segments_native, stats.segments_native + stats.segments_by_class


_pools: dict[tuple[int, int], Tensor] = {}


def values_of(generator: torch.Generator, round_: int, numel: int) -> Tensor:
    """Values that some rounds take what they need from, each array from a place of its own."""
    key = round_ // 8, numel
    if key not in _pools:
        _pools.clear()
        _pools[key] = any_values(numel, generator)
    return _pools[key]


def any_values(numel: int, generator: torch.Generator) -> Tensor:
    """Half random bits or special values, half of usual sizes, from 2**-40 on."""
    usual = torch.randn(numel, generator=generator)
    scale = torch.randint(-40, 2, (numel,), generator=generator, dtype=torch.int32)
    usual = torch.ldexp(usual, scale)
    bits = torch.randint(-(1 << 31), 1 << 31, (numel,), generator=generator).to(torch.int32).view(torch.float32)
    special = torch.tensor(SPECIAL)
    kind = torch.randint(16, (numel,), generator=generator, dtype=torch.uint8)
    picked = special[torch.randint(len(special), (numel,), generator=generator)]
    return torch.where(kind == 0, picked, torch.where(kind < 8, bits, usual))


def assert_same(expected: Any, mine: Any, what: str, name: str) -> None:
    """Raises SystemExit unless both have equal bits, or NaN in both."""
    if not isinstance(expected, Tensor):
        if expected != mine:
            raise SystemExit(f"{what}: {name} is {mine}, and the class has {expected}")
        return
    a, b = expected.detach().reshape(-1), mine.detach().reshape(-1)
    kind = torch.int16 if a.element_size() == 2 else torch.int32
    differs = (a.view(kind) != b.view(kind)) & ~(a.isnan() & b.isnan())
    if a.dtype != b.dtype or differs.any():
        at = int(differs.nonzero()[0])
        raise SystemExit(
            f"{what}: {name} of {a.numel()} elements differs in {int(differs.sum())}, first at {at}: "
            f"{float(b[at]).hex()}, and the class has {float(a[at]).hex()}"
        )


if __name__ == "__main__":
    main()
