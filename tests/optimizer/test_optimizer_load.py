"""`load_state_dict` gives state the dtypes and bits that it has in a plain run: every class, dtype and kernel."""

from __future__ import annotations

import copy
import functools
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from training import MasterWeights
from twins import bits

import swapper

pytestmark = pytest.mark.packs_too

CLASSES: dict[str, dict[str, Any]] = {
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adamax": {},
    "ASGD": {"lambd": 1e-2, "t0": 1},
    "NAdam": {"momentum_decay": 0.1},
    "RAdam": {},
    "RMSprop": {"centered": True, "momentum": 0.9},
    "Rprop": {},
    "SGD": {"momentum": 0.9},
}
KERNELS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def make(name: str, dtype: torch.dtype, options: dict[str, Any]) -> tuple[list[nn.Parameter], Optimizer]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in ((300, 40), (7,))]
    cls = getattr(torch.optim, name)
    return parameters, cls(parameters, lr=1e-2, **CLASSES[name], **options)


def step(parameters: list[nn.Parameter], optimizer: Any, seeds: range) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()
        optimizer.zero_grad()


def wrap(optimizer: Optimizer, nvme_path: Path, **settings: Any) -> Optimizer:
    return swapper.wrap_optimizer(
        optimizer,
        swapper.OffloadConfig(
            nvme_path=nvme_path,
            pool_bytes="4MiB",
            bucket_bytes="64KiB",
            offload_optimizer={"device": "nvme", **settings},
        ),
    )


@pytest.mark.sampled(36)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", CLASSES)
def test_state_that_is_loaded_has_the_bits_of_a_plain_run(
    nvme_path: Path, name: str, kernel: str, dtype: torch.dtype
) -> None:
    def program(swap: bool) -> list[Any]:
        log = []
        parameters, optimizer = make(name, dtype, KERNELS[kernel])
        wrap(optimizer, nvme_path) if swap else None
        step(parameters, optimizer, range(2))
        saved = copy.deepcopy(optimizer.state_dict())
        log.append(bits(saved["state"]))
        later, its = make(name, dtype, KERNELS[kernel])
        wrap(its, nvme_path) if swap else None
        for p, q in zip(later, parameters, strict=True):
            p.data.copy_(q.data)
        its.load_state_dict(saved)
        log.append(bits(its.state_dict()["state"]))
        step(later, its, range(2, 4))
        log += [bits(its.state_dict()["state"]), [bits(p) for p in later]]
        if swap:
            swapper.of(optimizer).close()
            swapper.of(its).close()
        return log

    try:
        plain = program(False)
    except (RuntimeError, TypeError, ValueError) as error:
        pytest.skip(f"torch: {error}")
    if name == "SGD" and kernel == "fused" and dtype in (torch.float16, torch.bfloat16):
        pytest.skip("refused: torch leaves the parameters unchanged")
    assert program(True) == plain


@pytest.mark.parametrize("name", CLASSES)
def test_with_masters_state_is_loaded_as_for_fp32_parameters(nvme_path: Path, name: str) -> None:
    parameters, _ = make(name, torch.bfloat16, {})
    cls = getattr(torch.optim, name)
    reference = MasterWeights(parameters, lambda p: cls(p, lr=1e-2, **CLASSES[name]))
    step(parameters, reference, range(2))
    saved = copy.deepcopy(reference.optimizer.state_dict())
    reference.optimizer.load_state_dict(copy.deepcopy(saved))
    later, optimizer = make(name, torch.bfloat16, {})
    for p, q in zip(later, parameters, strict=True):
        p.data.copy_(q.data)
    wrap(optimizer, nvme_path, master_weights=True)
    for i, master in enumerate(reference.masters):
        saved["state"].setdefault(i, {})["master_param"] = master.detach().clone()
    optimizer.load_state_dict(saved)
    step(parameters, reference, range(2, 4))
    step(later, optimizer, range(2, 4))
    for p, q, master in zip(later, parameters, reference.masters, strict=True):
        assert bits(p) == bits(q)
        entries = swapper.of(optimizer).state(p)
        assert bits(entries.pop("master_param")) == bits(master)
        assert bits(entries) == bits(dict(reference.optimizer.state[master]))
    swapper.of(optimizer).close()


class Collecting(Optimizer):
    """Keeps tensors within dictionaries and lists, integers among them."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["seen"] = torch.zeros((), dtype=torch.int64)
                    state["nested"] = {"scale": torch.ones(()), "step": torch.zeros(())}
                    state["last"] = deque([torch.zeros(3)])
                state["seen"] += 1
                state["nested"]["scale"] *= 0.7
                state["last"].append(p.grad.flatten()[:3].float() * state["nested"]["scale"])
                p.sub_(p.grad, alpha=group["lr"] * float(state["nested"]["scale"] + state["last"][-1].sum()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_within_other_values_are_loaded_as_in_a_plain_run(nvme_path: Path, dtype: torch.dtype) -> None:
    def program(swap: bool) -> list[Any]:
        parameters, _ = make("SGD", dtype, {})
        optimizer = Collecting(parameters, lr=1e-2)
        wrap(optimizer, nvme_path) if swap else None
        step(parameters, optimizer, range(2))
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        loaded = optimizer.state_dict()["state"][0]
        nested = [bits(loaded["seen"]), bits(loaded["nested"]), bits(list(loaded["last"]))]
        step(parameters, optimizer, range(2, 4))
        if swap:
            swapper.of(optimizer).close()
        return [nested, [bits(p) for p in parameters]]

    assert program(True) == program(False)


class InHalf(Optimizer):
    """Keeps its average in bfloat16, and takes back the cast of `load_state_dict`, as classes of timm do."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        self.kept_in = torch.bfloat16

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("decay", 0.9)
            for p in group["params"]:
                if (entries := self.state.get(p)) and "average" in entries:
                    entries["average"] = entries["average"].to(self.kept_in)
                    entries["count"] = torch.tensor(float(entries["count"]))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    if not (state := self.state[p]):
                        state.update(average=torch.zeros_like(p, dtype=self.kept_in), count=torch.tensor(0.0))
                    state["count"] += 1
                    state["average"].mul_(group.get("decay", 0.9)).add_(p.grad.to(state["average"].dtype))
                    p.sub_(state["average"].to(p.dtype), alpha=group["lr"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_class_makes_of_loaded_state_is_loaded(nvme_path: Path, dtype: torch.dtype) -> None:
    found = []
    for swapped in (False, True):
        generator = torch.Generator().manual_seed(0)
        sizes = ((300, 40), (7,), (3,))
        parameters = [nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in sizes]
        optimizer: Any = InHalf(parameters)
        if swapped:
            config = {"nvme_path": str(nvme_path), "offload_optimizer": {"device": "nvme"}}
            optimizer = swapper.wrap_optimizer(optimizer, config)
        step(parameters[:2], optimizer, range(2))
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        found.append([bits(optimizer.state_dict())])
        step(parameters, optimizer, range(2, 5))
        found[-1] += [bits(optimizer.state_dict()), bits([p.detach() for p in parameters])]
    assert found[0] == found[1]


class AsItsParameter(InHalf):
    """Keeps its average in the dtype of the parameter."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        Optimizer.__setstate__(self, state)
        for p, entries in self.state.items():
            entries["average"] = entries["average"].to(p.dtype)
            assert entries["average"].shape == p.shape


def test_a_class_whose_masters_are_loaded_is_given_parameters_of_their_dtype(nvme_path: Path) -> None:
    parameters = [nn.Parameter(torch.randn(size).to(torch.bfloat16)) for size in ((300, 40), (7,), (3,))]
    optimizer: Any = AsItsParameter(parameters)
    optimizer.kept_in = torch.float32
    config = {"nvme_path": str(nvme_path), "offload_optimizer": {"device": "nvme", "master_weights": True}}
    optimizer = swapper.wrap_optimizer(optimizer, config)
    step(parameters, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(copy.deepcopy(saved))
    assert bits(optimizer.state_dict()) == bits(saved)


class LoadsItself(InHalf):
    """A `load_state_dict` of its own changes what torch's has loaded, one way or another."""

    way: Callable[[LoadsItself, dict[str, Any]], None]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.way(state_dict)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                state = self.state[p]
                state["bits"] = state.get("bits", torch.zeros_like(p, dtype=torch.int64)) * 3 + 1
                state.setdefault("last", deque(maxlen=2)).append(p.grad.flatten()[:2].clone())
                p.mul_(1 - 1e-3 * (state["bits"] % 2)).sub_(state["last"][0].sum(), alpha=1e-3)


def restore(self: LoadsItself, state_dict: dict[str, Any]) -> None:
    """As pytorch_optimizer does it: integers, which torch casts."""
    for p, number in zip(self.param_groups[0]["params"], state_dict["param_groups"][0]["params"], strict=True):
        if (saved := state_dict["state"].get(number)) is not None:
            mine = self.state[p]
            self.state[p] = {k: v if k in ("bits", "last") else mine[k] for k, v in saved.items()}


def edit(self: LoadsItself, state_dict: dict[str, Any]) -> None:
    for entries in self.state.values():
        entries["average"].mul_(0.5)
        entries["bits"] += 1
        entries["last"].append(entries["last"][0] * 2)


def set_items(self: LoadsItself, state_dict: dict[str, Any]) -> None:
    for p in self.state:
        self.state[p]["average"] = self.state[p]["average"] * 0.5
        self.state[p].update(bits=self.state[p]["bits"].long() + 1)
        assert self.state[p]["bits"].dtype is torch.int64


def forget_some(self: LoadsItself, state_dict: dict[str, Any]) -> None:
    first, second, *_ = self.state
    del self.state[first]["last"]
    entries = self.state[second]
    entries["average"].zero_()
    self.state[second] = {**self.state.pop(second), "count": torch.tensor(7.0)}
    assert not entries["average"].any()


def read(self: LoadsItself, state_dict: dict[str, Any]) -> None:
    """Reads all at once, and changes nothing."""
    entries = list(self.state.values())
    assert all(each["average"].isfinite().all() for each in entries)


def change_after(self: LoadsItself, state_dict: dict[str, Any]) -> None:
    """Has all at once, and changes it then."""
    for number, entries in enumerate(list(self.state.values())):
        if number % 2:
            entries["average"].mul_(0.5)
        else:
            entries["average"] = entries["average"] * 0.5
    assert self.state[next(iter(self.state))]["average"] is next(iter(self.state.values()))["average"]


def use_within(self: LoadsItself, state_dict: dict[str, Any]) -> None:
    """Looks at the state as a whole, and steps, between two changes."""
    for entries in self.state.values():
        entries["average"].mul_(0.5)
    seen = [entries["average"].double().sum() for entries in self.state_dict()["state"].values()]
    self.state[next(iter(self.state))]["average"].mul_(float(seen[-1]))
    for p in self.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    self.step()
    self.zero_grad()
    for entries in self.state.values():
        entries["average"] = entries["average"] + 1


def fill_after(self: LoadsItself, state_dict: dict[str, Any]) -> None:
    """What was assigned is the state from then on, and so are its tensors."""
    for p in self.state:
        old = self.state[p]
        entries = self.state[p] = {}
        entries.update(old)
        old["average"].mul_(0.5)
        entries["last"] = deque(old["last"], maxlen=2)


def add_where_there_is_none(self: LoadsItself, state_dict: dict[str, Any]) -> None:
    for p in self.param_groups[0]["params"]:
        self.state[p].setdefault("average", torch.ones_like(p, dtype=self.kept_in))
        self.state[p]["count"] = torch.tensor(7.0)


def load_again(self: LoadsItself, state_dict: dict[str, Any]) -> None:
    set_items(self, state_dict)
    Optimizer.load_state_dict(self, state_dict)


def load_by_itself(self: LoadsItself, state_dict: dict[str, Any]) -> None:
    self.way = functools.partial(restore, self)
    self.load_state_dict(state_dict)
    edit(self, state_dict)


def replace_all(self: LoadsItself, state_dict: dict[str, Any]) -> None:
    """One after another, while the old ones are read; and goes on changing them."""
    old, self.state = self.state, defaultdict(dict)
    for p in list(old):
        self.state[p] = {**old[p]} if len(self.state) % 2 else old.pop(p)
    edit(self, state_dict)


def put_back(self: LoadsItself, state_dict: dict[str, Any]) -> None:
    old, self.state = self.state, defaultdict(dict)
    for p in list(old):
        old[p]["average"].mul_(0.5)
    self.state = old


def all_bits(optimizer: Optimizer) -> list[Any]:
    state = optimizer.state_dict()["state"].values()
    return [bits({k: list(v) if isinstance(v, deque) else v for k, v in entries.items()}) for entries in state]


WAYS = [change_after, use_within, restore, edit, set_items, forget_some, read, fill_after]
WAYS += [add_where_there_is_none, load_again, load_by_itself, replace_all, put_back]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_class_may_change_what_is_loaded(nvme_path: Path, way: Any, dtype: torch.dtype) -> None:
    found = []
    for swapped in (False, True):
        generator = torch.Generator().manual_seed(0)
        parameters = [nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in ((300, 40), (77, 300), (3,))]
        optimizer: Any = LoadsItself(parameters)
        optimizer.way = functools.partial(way, optimizer)
        wrap(optimizer, nvme_path) if swapped else None
        step(parameters[:2], optimizer, range(2))
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(saved)
        found.append([all_bits(optimizer)])
        if swapped:
            with pytest.raises(swapper.SwapError, match="cannot be read"):
                optimizer.state[parameters[0]]["average"]
        step(parameters, optimizer, range(2, 5))
        found[-1] += [all_bits(optimizer), bits([p.detach() for p in parameters])]
        if swapped:
            swapper.unwrap_optimizer(optimizer)
            assert "load_state_dict" not in vars(optimizer)
            optimizer.load_state_dict(saved)
    assert found[0] == found[1]


def test_what_a_class_changed_before_it_raised_is_changed(nvme_path: Path) -> None:
    def fail(self: LoadsItself, state_dict: dict[str, Any]) -> None:
        edit(self, state_dict)
        raise KeyError("of the class")

    found = []
    for swapped in (False, True):
        parameters = [nn.Parameter(torch.full((300, 40), float(n))) for n in range(5)]
        optimizer: Any = LoadsItself(parameters)
        wrap(optimizer, nvme_path) if swapped else None
        step(parameters, optimizer, range(2))
        optimizer.way = functools.partial(fail, optimizer)
        with pytest.raises(KeyError, match="of the class"):
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        found.append([all_bits(optimizer)])
        step(parameters, optimizer, range(2, 4))
        found[-1] += [all_bits(optimizer), bits([p.detach() for p in parameters])]
    assert found[0] == found[1]


def test_masters_stay_where_a_class_puts_entries_together_anew(nvme_path: Path) -> None:
    def change(self: LoadsItself, state_dict: dict[str, Any]) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p] = {key: self.state[p][key] for key in ("average", "bits", "last")}

    parameters = [nn.Parameter(torch.randn(300, 40).bfloat16()) for _ in range(5)]
    optimizer: Any = LoadsItself(parameters)
    optimizer.kept_in = torch.float32
    optimizer.way = functools.partial(change, optimizer)
    wrap(optimizer, nvme_path, master_weights=True)
    step(parameters, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    for number, entries in optimizer.state_dict()["state"].items():
        assert bits(entries["master_param"]) == bits(saved["state"][number]["master_param"])


def test_entries_that_a_class_has_from_before_a_step_are_not_those_after_it(nvme_path: Path) -> None:
    def change(self: LoadsItself, state_dict: dict[str, Any]) -> None:
        entries = self.state[self.param_groups[0]["params"][0]]
        step(self.param_groups[0]["params"], self, range(1))
        entries["average"].mul_(0.5)

    optimizer: Any = wrap(LoadsItself([nn.Parameter(torch.randn(300, 40)) for _ in range(2)]), nvme_path)
    step(optimizer.param_groups[0]["params"], optimizer, range(2))
    optimizer.way = functools.partial(change, optimizer)
    with pytest.raises(swapper.SwapError, match="from before a step"):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_a_class_has_the_state_of_few_parameters_in_memory(nvme_path: Path) -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    def look(self: LoadsItself, state_dict: dict[str, Any]) -> None:
        for p in self.param_groups[0]["params"]:
            entries = self.state[p]
            self.state[p] = {key: value.to(value.dtype) for key, value in entries.items() if key != "last"}
            seen.append(weakref.ref(self.state[p]["average"]))
            assert sum(ref() is not None for ref in seen) <= 3

    optimizer: Any = wrap(LoadsItself([nn.Parameter(torch.randn(30, 40)) for _ in range(20)]), nvme_path)
    step(optimizer.param_groups[0]["params"], optimizer, range(1))
    optimizer.way = functools.partial(look, optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert len(seen) == 20 and not any(ref() is not None for ref in seen)


def test_load_state_dict_that_was_put_on_the_object_is_called_and_stays(nvme_path: Path) -> None:
    optimizer: Any = torch.optim.AdamW([nn.Parameter(torch.randn(300, 40))])

    def load(state_dict: dict[str, Any]) -> None:
        torch.optim.AdamW.load_state_dict(optimizer, state_dict)
        for entries in optimizer.state.values():
            entries["exp_avg"].data.zero_()  # Which the version counter does not have.

    optimizer.load_state_dict = load
    wrap(optimizer, nvme_path)
    step(optimizer.param_groups[0]["params"], optimizer, range(1))
    optimizer.load_state_dict(optimizer.state_dict())
    entries = optimizer.state_dict()["state"][0]
    assert not entries["exp_avg"].any() and entries["exp_avg_sq"].any()
    swapper.unwrap_optimizer(optimizer)
    assert optimizer.load_state_dict is load
    del optimizer.load_state_dict
    wrap(optimizer, nvme_path)
    optimizer.load_state_dict = load
    swapper.unwrap_optimizer(optimizer)
    assert optimizer.load_state_dict is load


HAD: dict[str, tuple[Callable[[Any], Any], Callable[[Any], object]]] = {
    "tensor": (lambda entries: entries["average"], lambda tensor: tensor.mul_(0.5)),
    "detached": (lambda entries: entries["average"].detach(), lambda tensor: tensor.mul_(0.5)),
    "array": (lambda entries: entries["bits"].view(torch.int32).numpy(), lambda array: array.fill(2)),
    "deque": (lambda entries: entries["last"], lambda last: last.append(torch.zeros(2))),
}


@pytest.mark.parametrize("had", HAD)
def test_what_a_class_changes_too_late_is_no_silent_loss(nvme_path: Path, had: str) -> None:
    have, put = HAD[had]

    def change(self: LoadsItself, state_dict: dict[str, Any]) -> None:
        first, *_ = [have(entries) for entries in self.state.values()]
        put(first)

    parameters = [nn.Parameter(torch.randn(300, 40)) for _ in range(5)]
    optimizer: Any = wrap(LoadsItself(parameters), nvme_path)
    step(parameters, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.way = functools.partial(change, optimizer)
    with pytest.raises(swapper.SwapError, match="let go of state"):
        optimizer.load_state_dict(saved)
    optimizer.way = lambda _: None
    optimizer.load_state_dict(saved)
    assert [each["bits"].dtype for each in optimizer.state_dict()["state"].values()] == [torch.float32] * 5


def test_what_a_class_changes_beside_masters_is_loaded(nvme_path: Path) -> None:
    parameters = [nn.Parameter(torch.randn(300, 40).bfloat16()) for _ in range(3)]
    optimizer: Any = LoadsItself(parameters)
    optimizer.kept_in = torch.float32
    optimizer.way = functools.partial(edit, optimizer)
    wrap(optimizer, nvme_path, master_weights=True)
    step(parameters, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    for number, entries in optimizer.state_dict()["state"].items():
        assert bits(entries["average"]) == bits(saved["state"][number]["average"] * 0.5)
        assert bits(entries["master_param"]) == bits(saved["state"][number]["master_param"])
    assert optimizer.swapper.stats().masters_reset == 0
