"""`optimizer.state` of a swapped optimizer, and what reads it: `torch.distributed.checkpoint`, frameworks, users."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer
from twins import bits

import swapper
from swapper.optimizer.conversion import GuardedState

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1e-2),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "SGD-plain": lambda p: torch.optim.SGD(p, lr=1e-2),
}
if hasattr(torch.optim, "Muon"):  # Since torch 2.9.
    OPTIMIZERS["Muon"] = lambda p: torch.optim.Muon(p, lr=1e-2)
OPTIONS = {
    "default": StateDictOptions(),
    "full": StateDictOptions(full_state_dict=True),
    "offloaded": StateDictOptions(full_state_dict=True, cpu_offload=True),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
}
PLACES = {
    "nvme": {"device": "nvme"},
    "cpu": {"device": "cpu"},
    "nvme-masters": {"device": "nvme", "master_weights": True},
    "none-masters": {"device": "none", "master_weights": True},
}


def make(make_optimizer: MakeOptimizer, dtype: torch.dtype = torch.float32) -> tuple[nn.Sequential, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 300, bias=False), nn.GELU(), nn.Linear(300, 24, bias=False)).to(dtype)
    return model, make_optimizer(list(model.parameters()))


def backward(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    model(torch.randn(4, 40, generator=generator).to(dtype)).float().square().mean().backward()


def run(model: nn.Module, optimizer: Optimizer, seeds: range) -> None:
    for seed in seeds:
        backward(model, seed)
        optimizer.step()
        optimizer.zero_grad()


def wrap(optimizer: Optimizer, nvme_path: Path, bucket_bytes: str = "256KiB", **settings: object) -> Optimizer:
    config = swapper.OffloadConfig(
        nvme_path=nvme_path,
        pool_bytes="8MiB",
        bucket_bytes=bucket_bytes,
        offload_optimizer={"device": "nvme", **settings},
    )
    return swapper.wrap_optimizer(optimizer, config)


def close(*optimizers: Optimizer) -> None:
    for optimizer in optimizers:
        swapper.of(optimizer).close()


def state_of(optimizer: Optimizer) -> Any:
    """The bits of all state, by the place of the parameter."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if hasattr(optimizer, "swapper"):
        return [bits(swapper.of(optimizer).state(p)) for p in parameters]
    return [bits(dict(optimizer.state.get(p, {}))) for p in parameters]


# --- torch.distributed.checkpoint.state_dict -------------------------------------------------------------------------


@pytest.mark.sampled(20)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_reading_a_state_dict_changes_no_state(nvme_path: Path, name: str, place: str) -> None:
    settings = PLACES[place]
    model, optimizer = make(OPTIMIZERS[name], torch.bfloat16 if "masters" in place else torch.float32)
    wrap(optimizer, nvme_path, **settings)
    run(model, optimizer, range(2))
    before, weights = state_of(optimizer), bits(model.state_dict())
    for gradients in (False, True):
        if gradients:
            backward(model, 5)
        for options in OPTIONS.values():
            saved = get_optimizer_state_dict(model, optimizer, options=options)
            _, both = get_state_dict(model, optimizer, options=options)
            assert bits(both) == bits(saved)
            if "state" in saved:
                assert [bits(entries) for entries in saved["state"].values()] == [state for state in before if state]
            if state_of(optimizer) == before and any(before) and not gradients:
                set_optimizer_state_dict(model, optimizer, saved, options=options)
            assert state_of(optimizer) == before and bits(model.state_dict()) == weights
    close(optimizer)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_goes_through_dcp_as_in_a_plain_run(nvme_path: Path, name: str, options: str) -> None:
    def program(swap: bool) -> list[Any]:
        log = []
        first, optimizer = make(OPTIMIZERS[name])
        second, later = make(OPTIMIZERS[name])
        if swap:
            wrap(optimizer, nvme_path, device="nvme")
            wrap(later, nvme_path, device="cpu" if options == "full" else "nvme")
        for seeds in (range(0), range(2)):  # The first makes the state, by a step with zeros for gradients and rate.
            run(first, optimizer, seeds)
            saved = get_optimizer_state_dict(first, optimizer, options=OPTIONS[options])
            log += [bits(saved), state_of(optimizer), bits(first.state_dict())]
        second.load_state_dict(first.state_dict())
        try:
            set_optimizer_state_dict(second, later, copy.deepcopy(saved), options=OPTIONS[options])
        except AssertionError as error:  # DCP, of full state dicts without tensors.
            log.append(str(error))
        log.append(state_of(later))
        for model, its in ((first, optimizer), (second, later)):
            run(model, its, range(2, 4))
            log += [bits(model.state_dict()), state_of(its)]
        if swap:
            close(optimizer, later)
        return log

    assert program(True) == program(False)


# --- What `optimizer.state` says -------------------------------------------------------------------------------------


def adamw(p: list[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(p, lr=1e-2)


def test_it_says_which_parameters_have_state_and_its_names(nvme_path: Path) -> None:
    model, optimizer = make(adamw)
    frozen, trained = model.parameters()
    wrap(optimizer, nvme_path)
    state = optimizer.state
    assert isinstance(state, defaultdict) and not state and len(state) == 0 and frozen not in state
    assert list(state) == [] and state.get(frozen) is None and len(state[frozen]) == 0
    assert state[frozen].get("step", 3) == 3 and not state[frozen].items() and state == {}
    backward(model, 0)
    frozen.grad = None
    optimizer.step()
    assert optimizer.state is state and state and len(state) == 1 and list(state.keys()) == [trained]
    assert trained in state and frozen not in state and state != {}
    entry = state[trained]
    assert list(entry) == ["step", "exp_avg", "exp_avg_sq"] and "step" in entry and len(entry) == 3
    assert "exp_avg" in repr(entry) and "1 parameters" in repr(state)
    with pytest.raises(KeyError):
        entry["other"]
    close(optimizer)
    assert not state


READS: dict[str, Callable[[Any], object]] = {
    "item": lambda s: s["exp_avg"],
    "get": lambda s: s.get("exp_avg"),
    "items": lambda s: s.items(),
    "values": lambda s: s.values(),
    "dict": lambda s: dict(s),
    "eq": lambda s: s == {},
    "ne": lambda s: s != {},
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "set": lambda s: s.__setitem__("exp_avg", torch.zeros(3)),
    "del": lambda s: s.__delitem__("exp_avg"),
    "pop": lambda s: s.pop("exp_avg", None),
    "update": lambda s: s.update(exp_avg=0),
    "setdefault": lambda s: s.setdefault("x", {}),
    "clear": lambda s: s.clear(),
}


@pytest.mark.parametrize("read", READS)
def test_values_are_refused_and_it_is_said_what_to_do(nvme_path: Path, read: str) -> None:
    model, optimizer = make(adamw)
    wrap(optimizer, nvme_path)
    run(model, optimizer, range(1))
    before = state_of(optimizer)
    entry = optimizer.state[model[0].weight]
    with pytest.raises(swapper.SwapError, match=r"optimizer\.swapper\.state\(parameter\)"):
        READS[read](entry)
    assert state_of(optimizer) == before
    close(optimizer)


@pytest.mark.parametrize("name", ["AdamW", "NAdam", "ASGD", "Adagrad", "Rprop", "Adafactor"])
def test_single_numbers_are_read_as_in_plain(nvme_path: Path, name: str) -> None:
    """Schedules and logs read them: the number of the step, the mean of squares of transformers' Adafactor."""

    def make_optimizer(p: list[nn.Parameter]) -> Optimizer:
        if name == "Adafactor":
            from transformers.optimization import Adafactor

            return Adafactor(p, scale_parameter=True, relative_step=True, warmup_init=True, lr=None)
        kind: type[Optimizer] = getattr(torch.optim, name)
        return kind(p)

    plain_model, plain = make(make_optimizer)
    model, optimizer = make(make_optimizer)
    wrap(optimizer, nvme_path)
    numbers = 0
    for seed in range(3):
        run(plain_model, plain, range(seed, seed + 1))
        run(model, optimizer, range(seed, seed + 1))
        for p, expected in zip(model.parameters(), plain_model.parameters(), strict=True):
            for key, value in plain.state[expected].items():
                if isinstance(value, torch.Tensor) and value.numel() > 1:
                    with pytest.raises(swapper.SwapError, match=r"swapper\.state"):
                        optimizer.state[p][key]
                    continue
                assert value is None or optimizer.state[p].get(key) is optimizer.state[p][key]
                if value is not None:
                    assert type(optimizer.state[p][key]) is type(value) and optimizer.state[p][key] == value
                    numbers += 1
    assert numbers
    close(optimizer)


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda t: t.zero_(),
    "data": lambda t: t.data.fill_(7),
    "detached": lambda t: t.detach().add_(1),
    "numpy": lambda t: t.numpy().fill(7),
}


@pytest.mark.parametrize("uses", ["step", "state_dict", "unwrap"])
@pytest.mark.parametrize("write", WRITES)
def test_a_number_that_is_written_to_raises_and_the_state_stays(nvme_path: Path, write: str, uses: str) -> None:
    model, optimizer = make(adamw)
    wrap(optimizer, nvme_path)
    run(model, optimizer, range(2))
    before = state_of(optimizer)
    WRITES[write](optimizer.state[model[0].weight]["step"])
    use: dict[str, Callable[[], object]] = {
        "step": optimizer.step,
        "state_dict": optimizer.state_dict,
        "unwrap": lambda: swapper.unwrap_optimizer(optimizer),
    }
    with pytest.raises(swapper.SwapError, match="single values of it cannot be changed"):
        use[uses]()
    assert state_of(optimizer) == before and optimizer.state[model[0].weight]["step"] == 2
    use[uses]()  # It is said once, and what was written is forgotten.
    if uses != "unwrap":
        close(optimizer)


@pytest.mark.parametrize("native", ["on", "off"])
@pytest.mark.parametrize("place", ["none", "nvme"])
def test_a_profiler_that_reads_the_state_in_a_step(nvme_path: Path, place: str, native: str) -> None:
    """torch's looks for its tensors when it follows Python: those that are away it cannot, and need not, see."""
    models = [nn.Sequential(*(nn.Linear(96, 96) for _ in range(3))) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        optimizer = OPTIMIZERS["AdamW"](list(model.parameters()))
        if model is models[1]:
            config = swapper.OffloadConfig(
                nvme_path=nvme_path,
                pool_bytes="2MiB",
                bucket_bytes="128KiB",
                offload_optimizer={"device": "nvme", "native_step": native},
                offload_param={"device": place},
                offload_gradient={"device": place},
            )
            swapper.offload(model, optimizer, config)
        for _ in range(3):
            model(torch.ones(2, 96)).sum().backward()
            with torch.profiler.profile(with_stack=True, profile_memory=True, record_shapes=True):
                optimizer.step()
            optimizer.zero_grad()
    assert bits(list(models[0].parameters())) == bits(list(models[1].parameters()))
    swapper.of(optimizer).close()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_the_mapping_is_not_copied(nvme_path: Path, duplicate: Callable[[object], object]) -> None:
    model, optimizer = make(adamw)
    wrap(optimizer, nvme_path)
    run(model, optimizer, range(1))
    with pytest.raises(swapper.SwapError, match="state_dict"):
        duplicate(optimizer.state)
    assert dict(optimizer.state).keys() == {**optimizer.state}.keys() == optimizer.state.copy().keys()
    assert optimizer.state | {} == optimizer.state and len(dict(optimizer.state)) == 2
    close(optimizer)


def test_a_walk_of_a_framework_leaves_the_state_alone(nvme_path: Path) -> None:
    from lightning.fabric.utilities.optimizer import _optimizer_to_device

    model, optimizer = make(adamw)
    wrap(optimizer, nvme_path)
    run(model, optimizer, range(2))
    before = state_of(optimizer)
    _optimizer_to_device(optimizer, torch.device("cpu"))
    for p, entry in optimizer.state.items():
        optimizer.state[p] = entry
    assert state_of(optimizer) == before
    second = optimizer.state[model[2].weight]
    with pytest.raises(swapper.SwapError, match="another parameter"):
        optimizer.state[model[0].weight] = second
    close(optimizer)


# --- What is done to `optimizer.state` -------------------------------------------------------------------------------

Action = Callable[[nn.Sequential, Optimizer], object]


def pop_one(model: nn.Sequential, optimizer: Optimizer) -> object:
    return optimizer.state.pop(model[0].weight)


def pop_twice(model: nn.Sequential, optimizer: Optimizer) -> object:
    optimizer.state.pop(model[2].weight, None)
    with pytest.raises(KeyError):
        optimizer.state.pop(model[2].weight)
    with pytest.raises(KeyError):
        del optimizer.state[model[2].weight]
    return optimizer.state.pop(model[2].weight, 7)


def pop_the_last(model: nn.Sequential, optimizer: Optimizer) -> object:
    _, entries = optimizer.state.popitem()
    optimizer.state.popitem()
    with pytest.raises(KeyError):
        optimizer.state.popitem()
    return entries


def delete_one(model: nn.Sequential, optimizer: Optimizer) -> object:
    del optimizer.state[model[0].weight]
    return len(optimizer.state)


def clear(model: nn.Sequential, optimizer: Optimizer) -> object:
    optimizer.state.clear()
    return len(optimizer.state)


def put_back(model: nn.Sequential, optimizer: Optimizer) -> object:
    entries = optimizer.state.pop(model[0].weight)
    entries = {
        key: value * 2 if key != "step" and isinstance(value, torch.Tensor) else value for key, value in entries.items()
    }
    optimizer.state[model[0].weight] = entries
    return entries


def update(model: nn.Sequential, optimizer: Optimizer) -> object:
    popped = {p: optimizer.state.pop(p) for p in list(optimizer.state)}
    optimizer.state.update(popped)
    assert optimizer.state.setdefault(model[0].weight, {}) is not None
    return list(popped.values())


def hand_over(model: nn.Sequential, optimizer: Optimizer) -> object:
    """A parameter is replaced by another, which goes on with its state."""
    entries = optimizer.state.pop(model[0].weight)
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    optimizer.param_groups[0]["params"][0] = model[0].weight
    optimizer.state[model[0].weight] = entries
    return entries


def empty_entries(model: nn.Sequential, optimizer: Optimizer) -> object:
    optimizer.state[model[0].weight] = {}
    return None


ACTIONS: dict[str, Action] = {
    action.__name__: action
    for action in (pop_one, pop_twice, pop_the_last, delete_one, clear, put_back, update, hand_over, empty_entries)
}


@pytest.mark.parametrize("place", ["nvme", "cpu"])
@pytest.mark.parametrize("action", ACTIONS)
def test_what_is_done_to_it_is_done_as_in_a_plain_run(nvme_path: Path, action: str, place: str) -> None:
    def program(swap: bool, bucket_bytes: str) -> list[Any]:
        log = []
        model, optimizer = make(OPTIMIZERS["Adam"])
        if swap:
            wrap(optimizer, nvme_path, device=place, bucket_bytes=bucket_bytes)
        for start in (0, 2):
            run(model, optimizer, range(start, start + 2))
            log.append(bits(ACTIONS[action](model, optimizer)))
            log.append(state_of(optimizer))
        run(model, optimizer, range(4, 6))
        log += [bits(model.state_dict()), state_of(optimizer), bits(optimizer.state_dict()["state"])]
        if swap:
            close(optimizer)
        return log

    plain = program(False, "")
    assert program(True, "1MiB") == plain
    assert program(True, "64KiB") == plain


@pytest.mark.parametrize("place", ["nvme-masters", "none-masters"])
@pytest.mark.parametrize("bucket_bytes", ["64KiB", "1MiB"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_of_the_others_stay_when_one_is_forgotten(
    nvme_path: Path, dtype: torch.dtype, bucket_bytes: str, place: str
) -> None:
    model, optimizer = make(adamw, dtype)
    wrap(optimizer, nvme_path, bucket_bytes=bucket_bytes, **PLACES[place])
    run(model, optimizer, range(2))
    first, second = model[0].weight, model[2].weight
    # Masters that are ties, whose bits are packed together for all segments of a record.
    for p in (first, second):
        entries = swapper.of(optimizer).state(p)
        entries["master_param"] = p.detach().float() + torch.finfo(dtype).eps * p.detach().float().abs() / 2
        optimizer.state[p] = entries
    with torch.no_grad():
        for p in (first, second):
            p.copy_(swapper.of(optimizer).state(p)["master_param"].to(dtype))
    kept = state_of(optimizer)
    popped = optimizer.state.pop(first)
    assert state_of(optimizer) == [{}, kept[1]] and bits(popped) == kept[0]
    optimizer.state[first] = popped
    assert state_of(optimizer) == kept
    del optimizer.state[second]
    assert state_of(optimizer) == [kept[0], {}]
    run(model, optimizer, range(2, 3))
    assert swapper.of(optimizer).state(second)["step"] == 1 and swapper.of(optimizer).state(first)["step"] == 3
    close(optimizer)


def test_what_cannot_be_state_is_refused_and_nothing_changed(nvme_path: Path) -> None:
    model, optimizer = make(adamw)
    wrap(optimizer, nvme_path)
    run(model, optimizer, range(1))
    before = state_of(optimizer)
    for key, value in (("key", {}), (model[0].weight, 3), (nn.Parameter(torch.zeros(3)), {"step": 1})):
        with pytest.raises(swapper.SwapError):
            optimizer.state[key] = value
    with pytest.raises(ValueError, match="should have shape"):
        optimizer.state[model[0].weight] = {"exp_avg": torch.zeros(3)}
    with pytest.raises(swapper.ConfigError, match="master_weights"):
        optimizer.state[model[0].weight] = {"master_param": torch.zeros_like(model[0].weight)}
    weight = model[0].weight
    for without_values in (torch.zeros_like(weight, device="meta"), torch.zeros_like(weight).to_sparse()):
        with pytest.raises(ValueError, match=r"'exp_avg' .* only dense values can be loaded"):
            optimizer.state[weight] = {"exp_avg": without_values}
        loaded = optimizer.state_dict()
        loaded["state"][0]["exp_avg"] = without_values
        with pytest.raises(ValueError, match=r"'exp_avg' .* only dense values can be loaded"):
            optimizer.load_state_dict(loaded)
    assert state_of(optimizer) == before
    run(model, optimizer, range(1, 2))
    close(optimizer)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_class_sees_a_plain_state_and_a_step_that_fails_leaves_the_guard(
    nvme_path: Path, error: type[BaseException]
) -> None:
    seen: list[type] = []

    class Failing(torch.optim.SGD):
        fail = False

        def step(self, closure: Any = None) -> Any:
            seen.append(type(self.state))
            if Failing.fail:
                raise error("in the middle")
            return super().step(closure)

    model, optimizer = make(lambda p: Failing(p, lr=1e-2, momentum=0.9))
    wrap(optimizer, nvme_path)
    run(model, optimizer, range(1))
    assert set(seen) == {defaultdict} and isinstance(optimizer.state, GuardedState)
    Failing.fail = True
    backward(model, 1)
    with pytest.raises(error):
        optimizer.step()
    assert isinstance(optimizer.state, GuardedState) and len(optimizer.state) == 2
    with pytest.raises(swapper.SwapError, match="refused"):
        optimizer.state.pop(model[0].weight)
    with pytest.raises(swapper.SwapError, match="refused"):
        optimizer.state[model[0].weight] = {"momentum_buffer": torch.zeros_like(model[0].weight)}
    close(optimizer)


@pytest.mark.parametrize("gradients", ["none", "nvme"])
def test_it_goes_with_step_in_backward_and_gradients_on_the_drive(nvme_path: Path, gradients: str) -> None:
    def program(swap: bool) -> list[Any]:
        model, optimizer = make(OPTIMIZERS["Adam"])
        if swap:
            config = swapper.OffloadConfig(
                nvme_path=nvme_path,
                pool_bytes="8MiB",
                bucket_bytes="64KiB",
                offload_optimizer={"device": "nvme", "step_in_backward": True},
                offload_gradient={"device": gradients},
            )
            swapper.offload(model, optimizer, config)
        log = [bits(get_optimizer_state_dict(model, optimizer))]
        run(model, optimizer, range(2))
        log.append(bits(get_optimizer_state_dict(model, optimizer)))
        backward(model, 2)
        if swap:
            assert len(optimizer.state) == 2
            with pytest.raises(swapper.SwapError, match=r"call step\(\) first"):
                optimizer.state.pop(model[0].weight)
            with pytest.raises(swapper.SwapError, match=r"call step\(\) first"):
                get_optimizer_state_dict(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        log.append(bits(optimizer.state.pop(model[0].weight)))
        run(model, optimizer, range(3, 5))
        log += [state_of(optimizer), bits(model.state_dict())]
        if swap:
            close(optimizer)
        return log

    assert program(True) == program(False)


def test_the_users_own_mapping_comes_back_and_nothing_keeps_the_swapper(nvme_path: Path) -> None:
    model, optimizer = make(adamw)
    own = optimizer.state
    run(model, optimizer, range(1))
    expected = state_of(optimizer)
    wrap(optimizer, nvme_path)
    assert not own and optimizer.state is not own
    swapper.unwrap_optimizer(optimizer)
    assert optimizer.state is own and state_of(optimizer) == expected
    wrap(optimizer, nvme_path)
    guard, reference = optimizer.state, weakref.ref(swapper.of(optimizer))
    gc.collect()
    gc.disable()
    try:
        del optimizer
        assert reference() is None and not guard
    finally:
        gc.enable()
    with pytest.raises(swapper.SwapError, match="gone"):
        guard[model[0].weight] = {}


@pytest.mark.parametrize("after", ["step", "close"])
def test_state_that_torch_refuses_to_load_is_let_go(nvme_path: Path, after: str) -> None:
    model, optimizer = make(adamw)
    wrap(optimizer, nvme_path)
    run(model, optimizer, range(1))
    refused = optimizer.state_dict()
    kept = torch.zeros_like(model[0].weight)
    refused["state"][0]["exp_avg"] = kept
    refused["param_groups"].append({"params": []})
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(refused)
    gone = weakref.ref(kept)
    del refused, kept
    if after == "step":
        run(model, optimizer, range(1, 2))
    close(optimizer)
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bucket_bytes", ["16KiB", "64KiB"])
@pytest.mark.parametrize("place", ["nvme-masters", "none-masters"])
def test_small_state_of_parameters_that_buckets_cut(
    place: str, bucket_bytes: str, dtype: torch.dtype, nvme_path: Path
) -> None:
    """It stays in memory, and what state dicts are written to has no room for it."""
    lengths = [1, 63, 100, 1000, 2048, 3000, 3072, 4000, 4032, 4064, 4090, 4094, 4095, 4096, 4097, 5000]
    for length in lengths:
        parameters = [nn.Parameter(torch.ones(length, dtype=dtype)), nn.Parameter(torch.ones(70, 70, dtype=dtype))]
        plain = [nn.Parameter(p.detach().float()) for p in parameters]
        optimizers = [torch.optim.AdamW(each, lr=1e-2) for each in (parameters, plain)]
        swapper.wrap_optimizer(
            optimizers[0],
            {
                "nvme_path": nvme_path,
                "pool_bytes": "8MiB",
                "bucket_bytes": bucket_bytes,
                "offload_optimizer": PLACES[place],
            },
        )
        for seed in range(2):
            for p, q in zip(parameters, plain, strict=True):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
                q.grad = p.grad.float()
            for each in optimizers:
                each.step()
            state = optimizers[0].state_dict()
            for i, expected in optimizers[1].state_dict()["state"].items():
                assert bits(state["state"][i]["exp_avg_sq"]) == bits(expected["exp_avg_sq"]), length
                assert bits(state["state"][i]["master_param"]) == bits(plain[i].detach()), length
            optimizers[0].load_state_dict(state)
        close(optimizers[0])
