"""`swapper.offload` as a whole: what lives how long, who gets what of the pool, what is refused, how much memory."""

from __future__ import annotations

import copy
import errno
import functools
import gc
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from launcher import run_program
from torch import nn

import swapper
from swapper import ConfigError, OffloadConfig, ParameterSwapper, SwapError
from swapper.io.handle import AsyncIOHandle, FaultPlan
from swapper.parameter import records as parameter_records
from swapper.parameter.cache import BY_ADDRESS, Held
from swapper.process.warnings import warn_once
from swapper.storage.buffers import Lease
from swapper.storage.store import TensorStore
from swapper.tensors.evicted import EvictedParameter

WIDTH = 256
RECORD_BYTES = 4 * (WIDTH * WIDTH + WIDTH) + 8192
"""The most that the record of a layer takes."""


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))


def make_config(
    nvme_path: Path, *, resident_bytes: int | str = 0, pool_bytes: str = "8MiB", **more: Any
) -> OffloadConfig:
    return OffloadConfig(
        nvme_path=nvme_path,
        pool_bytes=pool_bytes,
        bucket_bytes="1MiB",
        offload_optimizer={"device": "nvme"},
        offload_gradient={"device": "nvme"},
        offload_param={"device": "nvme", "resident_bytes": resident_bytes},
        **more,
    )


@pytest.fixture(autouse=True)
def _short_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record for each layer."""
    monkeypatch.setattr(parameter_records, "GROUP_BYTES", 300_000)


def offloaded(config: OffloadConfig) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = make_model()
    return swapper.offload(model, torch.optim.AdamW(model.parameters(), lr=1e-3), config)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(4, WIDTH, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain_losses(steps: int = 3) -> list[float]:
    model = make_model()
    return train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), steps)


def swapper_of(model: nn.Module) -> ParameterSwapper:
    found = model.swapper
    assert isinstance(found, ParameterSwapper)
    return found


# --- Lifetimes ---


def test_files_go_with_model_and_optimizer(nvme_path: Path) -> None:
    model, optimizer = offloaded(make_config(nvme_path))
    assert train(model, optimizer) == plain_losses()
    assert len(list(nvme_path.iterdir())) == 1
    del model, optimizer
    gc.collect()
    assert list(nvme_path.iterdir()) == []


def test_a_part_of_the_model_outlives_it(nvme_path: Path) -> None:
    model, optimizer = offloaded(make_config(nvme_path))
    layer = model[3]
    expected = layer.weight.detach().clone()
    del model, optimizer
    gc.collect()
    assert torch.equal(layer.weight, expected)
    assert torch.equal(
        layer(torch.ones(1, WIDTH)), torch.nn.functional.linear(torch.ones(1, WIDTH), expected, layer.bias)
    )
    del layer
    gc.collect()
    assert list(nvme_path.iterdir()) == []


def test_closed_with_its_values_it_is_an_ordinary_model(nvme_path: Path) -> None:
    model, optimizer = offloaded(make_config(nvme_path))
    losses = train(model, optimizer)
    swapper_of(model).close(keep_values=True)
    swapper.unwrap_optimizer(optimizer)
    assert list(nvme_path.iterdir()) == []
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert not hasattr(model, "swapper")
    generator = torch.Generator().manual_seed(1)
    loss = model(torch.randn(4, WIDTH, generator=generator)).square().mean()
    loss.backward()
    optimizer.step()
    assert loss.item() < losses[0]


VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "data": lambda p: p.data,
    "detached": lambda p: p.detach(),
    "row": lambda p: p.detach()[0],
    "transposed": lambda p: p.data.t() if p.dim() == 2 else p.data,
    "array": lambda p: p.detach().numpy(),
}


@pytest.mark.parametrize("which", ["all", "one"])
@pytest.mark.parametrize("view", VIEWS)
def test_closed_with_its_values_it_has_those_of_views(view: str, which: str, nvme_path: Path) -> None:
    """Moving averages and clipping by hand keep views: they follow the parameters, and the parameters them."""
    model, optimizer = offloaded(make_config(nvme_path))
    train(model, optimizer, 1)
    parameters = list(model.parameters())[:: 1 if which == "all" else 100]
    views = [VIEWS[view](p) for p in parameters]
    swapper_of(model).close(keep_values=True)
    for _ in range(2):
        train(model, optimizer, 1)
        for kept, p in zip(views, parameters, strict=True):
            now = VIEWS[view](p)
            assert bool((kept == now).all())
            kept *= 0.5
            assert bool((kept == VIEWS[view](p)).all()) and bool((kept == now).all())
    swapper.unwrap_optimizer(optimizer)
    del model, optimizer, parameters
    gc.collect()
    assert list(nvme_path.iterdir()) == [] and all(bool((kept == kept + 0).all()) for kept in views)


def test_closed_with_its_values_its_optimizer_goes_on(nvme_path: Path) -> None:
    model, optimizer = offloaded(make_config(nvme_path))
    losses = train(model, optimizer, 2)
    swapper_of(model).close(keep_values=True)
    assert [*losses, *train(model, optimizer, 1)][:2] == plain_losses(2)
    plain = make_model()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    train(plain, plain_optimizer, 2)
    train(plain, plain_optimizer, 1)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_offload_in_inference_mode_is_for_training_too(nvme_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with torch.inference_mode():
        swapper.offload(model, optimizer, make_config(nvme_path))
        model(torch.ones(1, WIDTH))
    assert train(model, optimizer) == plain_losses()


def closed(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    swapper_of(model).close(keep_values=True)


def unwrapped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    swapper.unwrap_optimizer(optimizer)


def loaded(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    saved = copy.deepcopy(optimizer.state_dict())
    swapper.of(optimizer).reset()
    optimizer.load_state_dict(saved)


def assigned(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        optimizer.state[p] = swapper.of(optimizer).state(p)


@pytest.mark.parametrize("action", [closed, unwrapped, loaded, assigned], ids=lambda action: action.__name__)
def test_what_is_given_back_or_loaded_in_inference_mode_is_trained_after_it(
    action: Callable[[nn.Module, torch.optim.Optimizer], None], nvme_path: Path
) -> None:
    plain = make_model()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    train(plain, plain_optimizer)
    model, optimizer = offloaded(make_config(nvme_path))
    train(model, optimizer)
    with torch.inference_mode():
        action(model, optimizer)
    assert train(model, optimizer) == train(plain, plain_optimizer)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_after_init_in_inference_mode_the_pool_is_for_training_too(nvme_path: Path) -> None:
    config = make_config(nvme_path)
    with torch.inference_mode(), swapper.init(config):
        evaluated = make_model()
    assert train(*offloaded(config)) == plain_losses()
    del evaluated


def test_addresses_of_parameters_that_are_away_differ_and_last(nvme_path: Path) -> None:
    model, _ = offloaded(make_config(nvme_path, pool_bytes=f"{least_pool_bytes(nvme_path, 0)}B"))
    addresses = [p.data_ptr() for p in model.parameters()]
    assert len(set(addresses)) == len(addresses)
    assert addresses == [p.data_ptr() for p in model.parameters()]


def test_closed_without_its_values_any_use_raises(nvme_path: Path) -> None:
    model, optimizer = offloaded(make_config(nvme_path))
    swapper_of(model).close()
    with pytest.raises(SwapError, match="closed"):
        model(torch.ones(1, WIDTH))
    with pytest.raises(SwapError, match="closed"):
        model[0].weight.sum()
    assert model[0].weight.shape == (WIDTH, WIDTH)
    swapper.of(optimizer).close()
    assert list(nvme_path.iterdir()) == []


def test_two_models_share_one_config_and_its_pool(nvme_path: Path) -> None:
    config = make_config(nvme_path)
    pairs = [offloaded(config), offloaded(config)]
    assert [train(*pair) for pair in pairs] == [plain_losses()] * 2
    assert len(list(nvme_path.iterdir())) == 1
    first = pairs.pop(0)
    del first
    gc.collect()
    assert train(*pairs[0])
    assert len(list(nvme_path.iterdir())) == 1


def test_an_exit_without_closing_leaves_no_files(nvme_path: Path) -> None:
    program = f"""
import torch, swapper
from pathlib import Path
model = torch.nn.Linear(300, 300)
config = swapper.OffloadConfig(nvme_path={str(nvme_path)!r}, offload_param={{"device": "nvme"}})
model, optimizer = swapper.offload(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
model(torch.ones(1, 300)).sum().backward()
optimizer.step()
"""
    run_program([sys.executable, "-c", program], check=True)
    assert list(nvme_path.iterdir()) == []


def test_a_read_that_ctrl_c_cut_off_from_its_use_is_made_again(nvme_path: Path) -> None:
    model, _ = offloaded(make_config(nvme_path, pool_bytes=f"{least_pool_bytes(nvme_path, 0)}B"))
    expected = make_model()(torch.ones(1, WIDTH))
    used = swapper_of(model)
    model(torch.ones(1, WIDTH))
    held = next(held for held in used._all if used._cache.records.get(held.key) is None)
    used._cache.require(held.key, held.length_bytes)
    used._cache.fetch(held.key)  # As between the wait and the opening of the record.
    assert torch.equal(model(torch.ones(1, WIDTH)), expected)


def test_an_opening_that_ctrl_c_cut_off_leaves_no_address(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = offloaded(make_config(nvme_path))
    used = swapper_of(model)
    while used._cache.pool.reclaim():
        pass
    before, own_view, calls = len(BY_ADDRESS), Lease.own_view, iter(range(9))

    def cut_off(self: Lease, *args: Any) -> torch.Tensor:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return own_view(self, *args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Lease, "own_view", cut_off)
        model[0](torch.ones(1, WIDTH))
    while used._cache.pool.reclaim():
        pass
    assert len(BY_ADDRESS) == before


@pytest.mark.timeout(240)
def test_a_late_write_that_ctrl_c_cuts_off_at_its_beginning_is_late_no_more(nvme_path: Path) -> None:
    class Interrupted(list[Held]):
        def __iter__(self) -> Iterator[Held]:
            yield from list(self[:])
            if not interrupted:
                interrupted.append(True)
                signal.raise_signal(signal.SIGINT)

    interrupted: list[bool] = []
    model, optimizer = offloaded(make_config(nvme_path))
    parameters = swapper_of(model)
    with pytest.raises(KeyboardInterrupt), parameters._written_late(Interrupted(parameters._all)):
        pass
    assert [held.late for held in parameters._all] == [0] * len(parameters._all)
    parameters.close()
    swapper.of(optimizer).close()


def test_values_that_autograd_gets_back_stay_where_they_are_until_it_has_a_view_of_them(nvme_path: Path) -> None:
    """Another thread may need their memory before."""
    model, _ = offloaded(make_config(nvme_path))
    used = swapper_of(model)
    held = used._all[0]
    location = held.plan.locations[0]
    values = used.saved(held, 0, location.parameter._version, location.given)
    while used._cache.pool.reclaim():
        pass
    assert held.opened
    assert held.viewed()
    del values
    while used._cache.pool.reclaim():
        pass
    assert not held.opened


def test_reading_ahead_stops_at_a_record_of_which_nothing_is_stored(nvme_path: Path) -> None:
    """As after an exception while a model is taken over."""
    model, _ = offloaded(make_config(nvme_path))
    used = swapper_of(model)
    while used._cache.pool.reclaim():
        pass
    used._cache.discard(used._all[1].key)
    assert torch.equal(model[0](torch.ones(1, WIDTH)), make_model()[0](torch.ones(1, WIDTH)))


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # torch uses it for some of them.
def test_forward_derivatives_have_the_bits_of_the_plain_model(nvme_path: Path) -> None:
    tangents = []
    x, direction = torch.ones(2, WIDTH), torch.full((2, WIDTH), 0.5)
    for model in (make_model(), offloaded(make_config(nvme_path))[0]):
        with fwAD.dual_level():
            tangents.append(fwAD.unpack_dual(model(fwAD.make_dual(x, direction))).tangent)
    assert tangents[0] is not None
    assert torch.equal(tangents[0], tangents[1])


# --- The pool ---


def least_pool_bytes(nvme_path: Path, resident_bytes: int) -> int:
    """The smallest pool that is accepted, by what the refusals say."""
    pool_bytes = 3 * (1 << 20) + resident_bytes
    while True:
        try:
            model, optimizer = offloaded(
                make_config(nvme_path, resident_bytes=resident_bytes, pool_bytes=f"{pool_bytes}B")
            )
        except ConfigError as error:
            found = re.search(r"[Ss]et pool_bytes to at least '?(\d+)", str(error))
            assert found is not None, error
            assert int(found[1]) > pool_bytes
            pool_bytes = int(found[1])
            continue
        swapper_of(model).close()
        swapper.of(optimizer).close()
        return pool_bytes


def test_resident_records_are_not_read_and_the_others_are(nvme_path: Path) -> None:
    reads = {}
    for resident_bytes in (0, 8 * RECORD_BYTES):
        pool_bytes = least_pool_bytes(nvme_path, resident_bytes)
        model, optimizer = offloaded(make_config(nvme_path, resident_bytes=resident_bytes, pool_bytes=f"{pool_bytes}B"))
        used = swapper_of(model)
        writes = used.metrics.writes
        assert train(model, optimizer) == plain_losses()
        reads[resident_bytes] = used.metrics.reads
        assert used.metrics.writes >= writes + 3 * 8, "what changed is written all the same"
    assert reads[0] > 3 * 8
    assert reads[8 * RECORD_BYTES] == 0


def test_resident_bytes_count_in_what_is_needed(nvme_path: Path) -> None:
    pool_bytes = least_pool_bytes(nvme_path, 8 * RECORD_BYTES)
    with pytest.raises(ConfigError, match=r"pool_bytes.*resident"):
        offloaded(make_config(nvme_path, resident_bytes=8 * RECORD_BYTES, pool_bytes=f"{pool_bytes - 4096}B"))


def test_a_step_reads_what_it_needs_once(nvme_path: Path) -> None:
    """Nothing that was read ahead is dropped and read again, however small the pool."""
    model, optimizer = offloaded(make_config(nvme_path, pool_bytes="5MiB"))
    train(model, optimizer, 2)
    used = swapper.of(optimizer)
    used.flush()
    before = used.stats()
    train(model, optimizer, 2)
    after = used.stats()
    records = sum(1 for bucket in used._plan.buckets if bucket.length_bytes)
    assert after.reads - before.reads <= 2 * records * 1.2


# --- What is refused ---


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda model: [model], "list is not a torch.nn.Module"),
        (lambda model: type(model), "Sequential is not a torch.nn.Module"),
        (lambda model: model.to("meta"), "parameter 0.weight is on the meta device"),
    ],
    ids=["no model", "class", "meta"],
)
def test_what_is_no_model_is_refused(prepare: Callable[[nn.Module], Any], message: str, nvme_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match=message):
        swapper.offload(prepare(model), optimizer, make_config(nvme_path))
    assert list(nvme_path.iterdir()) == []


def test_a_model_is_offloaded_once(nvme_path: Path) -> None:
    model, _ = offloaded(make_config(nvme_path))
    with pytest.raises(ConfigError, match="offloaded already"):
        swapper.offload(model, torch.optim.AdamW(model.parameters()), make_config(nvme_path))


def alternate(model: nn.Sequential, optimizers: list[torch.optim.Optimizer], rounds: int) -> None:
    """Step each optimizer in turn, as the two of a GAN."""
    for number in range(rounds):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
        for optimizer in optimizers:
            for each in optimizers:
                each.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()


def halves(model: nn.Sequential) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.AdamW(model[:4].parameters(), lr=1e-3),
        torch.optim.SGD(model[4:].parameters(), lr=1e-3, momentum=0.9),
    ]


def test_several_optimizers_of_one_model_are_offloaded_together(nvme_path: Path) -> None:
    plain = make_model()
    alternate(plain, halves(plain), 4)
    model = make_model()
    _, optimizers = swapper.offload(model, halves(model), make_config(nvme_path))
    alternate(model, optimizers, 4)
    assert all(isinstance(p, EvictedParameter) for p in model.parameters() if p.dim() == 2)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    assert all(swapper.of(optimizer).stats().bytes_written for optimizer in optimizers)


def test_an_offloaded_model_takes_a_new_optimizer(nvme_path: Path) -> None:
    plain = make_model()
    for _ in range(2):
        alternate(plain, [torch.optim.AdamW(plain.parameters(), lr=1e-3)], 2)
    config = make_config(nvme_path)
    model = make_model()
    for _ in range(2):
        _, optimizer = swapper.offload(model, torch.optim.AdamW(model.parameters(), lr=1e-3), config)
        alternate(model, [optimizer], 2)
        swapper.of(optimizer).close()
    assert all(isinstance(p, EvictedParameter) for p in model.parameters() if p.dim() == 2)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_new_optimizer_for_which_the_pool_is_too_small_is_refused(nvme_path: Path) -> None:
    config = make_config(nvme_path, pool_bytes="5MiB")
    model = make_model()
    _, optimizer = swapper.offload(model, torch.optim.SGD(model.parameters(), lr=1e-3), config)
    swapper.of(optimizer).close()
    new = [torch.optim.AdamW(model.parameters(), lr=1e-3) for _ in range(4)]
    with pytest.raises(ConfigError, match="pool_bytes"):
        swapper.offload(model, new, config)
    assert not any(hasattr(optimizer, "swapper") for optimizer in new)
    _, again = swapper.offload(model, torch.optim.SGD(model.parameters(), lr=1e-3), config)
    alternate(model, [again], 1)


def test_wrap_optimizer_alone_refuses_parameters_on_disk(nvme_path: Path) -> None:
    model = make_model()
    with pytest.raises(ConfigError, match=r"swapper\.offload\(model, optimizer, config\)"):
        swapper.wrap_optimizer(torch.optim.AdamW(model.parameters()), make_config(nvme_path))


def test_a_failed_offload_leaves_model_and_optimizer_as_they_were(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: ParameterSwapper, model: nn.Module) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ParameterSwapper, "_install", fail)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with pytest.raises(KeyboardInterrupt):
        swapper.offload(model, optimizer, make_config(nvme_path))
    assert not hasattr(optimizer, "swapper")
    assert all(type(p) is nn.Parameter for p in model.parameters())
    gc.collect()
    assert list(nvme_path.iterdir()) == []
    assert train(model, optimizer) == plain_losses()


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, KeyboardInterrupt])
def test_a_failed_offload_of_a_model_larger_than_the_pool_loses_no_value(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch, error: int | type[KeyboardInterrupt]
) -> None:
    """At most four of the eight records fit the pool. The drive fails in each of the writes, at its start or later."""
    plan = FaultPlan(fail_errno=error if isinstance(error, int) else errno.EIO, delay_us=1000)
    monkeypatch.setattr("swapper.session.AsyncIOHandle", functools.partial(AsyncIOHandle, faults=plan))
    config = OffloadConfig(
        nvme_path=nvme_path,
        pool_bytes=f"{4 * RECORD_BYTES}B",
        bucket_bytes="300KiB",
        offload_optimizer={"device": "none"},
        offload_param={"device": "nvme"},
    )
    expected = [p.detach().clone() for p in make_model().parameters()]
    write, failed, later = TensorStore.write, 0, 0
    for n in range(1, 9):
        left = n

        def cut_off(store: TensorStore, *args: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
            return write(store, *args)

        if isinstance(error, int):
            plan.fail_write_at = n
        else:
            monkeypatch.setattr(TensorStore, "write", cut_off)
        model = make_model()
        try:
            swapper.offload(model, config=config)
            try:
                model.swapper.flush()  # type: ignore[operator, union-attr]
            except (swapper.SwapIOError, KeyboardInterrupt):
                later += 1
        except (swapper.SwapIOError, KeyboardInterrupt) as raised:
            failed += 1
            assert raised.errno == error if isinstance(raised, swapper.SwapIOError) else raised
            assert not hasattr(model, "swapper")
            assert all(type(p) is nn.Parameter for p in model.parameters())
            assert all(map(torch.equal, model.parameters(), expected))
        del model
        gc.collect()
        assert list(nvme_path.iterdir()) == []
    assert failed > 0 and failed + later == 8, "each failure is told, at once or by the next call"


def test_parameters_in_host_memory_are_where_they_are_said_once(
    nvme_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    config = OffloadConfig(nvme_path=nvme_path, offload_param={"device": "cpu"})
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert train(*offloaded(config)) == plain_losses()
    assert sum("is the same as none" in record.message for record in caplog.records) == 1


# --- Fork ---


def test_a_forked_child_finds_parameters_in_use_evicted(nvme_path: Path) -> None:
    model, _ = offloaded(make_config(nvme_path))
    outcome: list[str] = []

    def fork(module: nn.Module, args: Any, output: Any) -> None:
        receiver, sender = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                text = "values"
                weight = module.weight
                assert isinstance(weight, EvictedParameter)
                assert weight.shape == (WIDTH, WIDTH)
                weight.sum()
            except SwapError as error:
                text = str(error)
            except BaseException as error:
                text = repr(error)
            os.write(sender, text.encode())
            os._exit(0)
        os.waitpid(child, 0)
        outcome.append(os.read(receiver, 1000).decode())

    model[2].register_forward_hook(fork)
    model(torch.ones(1, WIDTH))
    assert "forked process" in outcome[0]
    assert torch.isfinite(model(torch.ones(1, WIDTH))).all()  # The parent goes on.


# --- Memory ---

_PEAK = """
import json, sys
sys.path.insert(0, {benchmarks!r})
from memory import Peak
import torch, swapper
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(1024, {width}), nn.Linear({width}, 1024)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

torch.manual_seed(0)
model = nn.Sequential(*(Block() for _ in range({blocks})))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
if {swapped}:
    config = swapper.OffloadConfig(
        nvme_path={nvme_path!r}, pool_bytes="96MiB", bucket_bytes="8MiB",
        offload_optimizer={{"device": "nvme", "step_in_backward": {in_backward}}},
        offload_gradient={{"device": "nvme"}}, offload_param={{"device": "nvme"}},
    )
    model, optimizer = swapper.offload(model, optimizer, config)
import ctypes
ctypes.CDLL(None).malloc_trim(0)
def step():
    loss = model(torch.randn(16, 1024)).square().mean()
    loss.backward()
    if {swapped}:
        optimizer.step()
    optimizer.zero_grad()
if {swapped}:
    step()
with Peak() as peak:
    for _ in range(3):
        step()
print(json.dumps(peak.bytes))
"""


def _peak_bytes(nvme_path: Path, *, width: int, blocks: int, swapped: bool, in_backward: bool = False) -> int:
    program = _PEAK.format(
        benchmarks=str(Path(__file__).resolve().parents[2] / "benchmarks"),
        width=width,
        blocks=blocks,
        swapped=swapped,
        in_backward=in_backward,
        nvme_path=str(nvme_path),
    )
    output = run_program([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True).stdout
    return int(json.loads(output))


@pytest.mark.long
@pytest.mark.unsanitized("its memory counts as the process's")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("width", [2048, 2200], ids=["segments of one length", "segments of several"])
@pytest.mark.parametrize("in_backward", [False, True], ids=["step at the end", "step in backward"])
def test_memory_does_not_grow_with_the_model(in_backward: bool, width: int, nvme_path: Path) -> None:
    """The baseline is the forward and backward of a model that is one block long: what a block takes, and no more.

    The model is 24 blocks of at least 16.8 MB: 400 MB of parameters, as much of gradients, twice as much of state.
    Beside the baseline there may be the pool, the scratch of torch in a step (2 x bucket_bytes), the activations, and
    100 MB.
    """
    blocks = 24
    baseline = _peak_bytes(nvme_path, width=width, blocks=1, swapped=False)
    peak = _peak_bytes(nvme_path, width=width, blocks=blocks, swapped=True, in_backward=in_backward)
    activation_bytes = blocks * 16 * (width * 2 + 1024 * 2) * 4
    assert peak <= baseline + (96 << 20) + 2 * (8 << 20) + activation_bytes + 100_000_000
    assert blocks * 16_800_000 > 3 * ((96 << 20) + 100_000_000) / 2, "the parameters alone would not fit that"


# --- The dry run ---


def test_check_counts_what_offload_then_takes(nvme_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config(nvme_path)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    report = swapper.check(model, optimizer, config)
    assert "parameters that are moved away" in capsys.readouterr().out
    assert list(nvme_path.iterdir()) == []
    swapper.offload(model, optimizer, config)
    train(model, optimizer, 2)
    before = (swapper.of(optimizer).stats(), swapper_of(model).metrics.bytes_read)
    swapper.of(optimizer).flush()
    swapper_of(model).flush()
    files = list(next(nvme_path.iterdir()).glob("*.safetensors"))
    assert report.disk_bytes == sum(file.stat().st_size for file in files)
    train(model, optimizer, 1)
    after = (swapper.of(optimizer).stats(), swapper_of(model).metrics.bytes_read)
    moved = after[0].bytes_read - before[0].bytes_read + after[1] - before[1]
    moved += after[0].gradients.bytes_read - before[0].gradients.bytes_read
    assert 0 < moved <= report.step_read_bytes
    assert report.model_bytes < sum(p.nbytes for p in model.parameters()) / 10


def test_check_refuses_the_pool_that_offload_refuses(nvme_path: Path) -> None:
    config = make_config(nvme_path)
    model = nn.Linear(1100, 1100)  # 4.8 MB, and its place is needed twice.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with pytest.raises(ConfigError, match="Set pool_bytes to at least"):
        swapper.check(model, optimizer, config)
    with pytest.raises(ConfigError, match="pool_bytes"):
        swapper.offload(model, optimizer, config)
