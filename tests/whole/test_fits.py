"""What one fit has held is given back before the next: the pool, engines and files, without the garbage collector."""

from __future__ import annotations

import gc
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from isolation import alone
from torch import nn

import swapper
from swapper.parameter.cache import ParameterCache
from swapper.session import Shared

FITS = 20
ALLOWED_BYTES = 20 << 20
NVME = {"device": "nvme"}
WIDTH = 1500  # The state of a fit is 5 MB, and its gradients are 2.4: one fit in five that stays is too much.


def config_of(path: str, **settings: Any) -> dict[str, Any]:
    return {"nvme_path": path, "pool_bytes": "48MiB", "bucket_bytes": "4MiB", "offload_optimizer": NVME, **settings}


def resident_bytes() -> int:
    """Memory of this process, locked and shared memory included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def net(bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(200, WIDTH, bias), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 200, bias))


@contextmanager
def without_collector() -> Iterator[None]:
    torch.set_num_threads(1)
    # The first optimizer of a process imports torch._dynamo, and stays in the frames of that.
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def growth(fit: Callable[[int], object], path: str, fits: int = FITS) -> dict[str, int]:
    """What grew from the second fit to the last, each of whose results stays referenced until the next one."""

    def directories() -> int:
        return sum(name.startswith("swapper-") for name in os.listdir(path))

    gc.collect()
    before = directories()  # Of a model that another kind of fit has, with its Trainer.
    found: list[tuple[int, int, int]] = []
    for number in range(fits):
        kept = fit(number)
        found.append((resident_bytes(), directories() - before, len(os.listdir("/proc/self/task"))))
    assert kept is not found
    grown = zip(("bytes", "directories", "threads"), found[-1], found[1], strict=True)
    return {name: last - second for name, last, second in grown} | {"directories": found[-1][1]}


def assert_nothing_stays(found: dict[str, dict[str, int]]) -> None:
    assert found
    for name, grown in found.items():
        assert grown["bytes"] <= ALLOWED_BYTES, (name, grown)
        assert grown["directories"] <= 2, (name, grown)  # That of the last fit, and of what it replaced.
        assert grown["threads"] <= 1, (name, grown)


# --- Plain PyTorch --------------------------------------------------------------------------------------------------


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        model(torch.randn(2, 200)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


def wrapped(path: str, **settings: Any) -> Callable[[int], object]:
    def fit(number: int) -> object:
        model = net()
        optimizer = swapper.wrap_optimizer(adam(model), config_of(path, **settings))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        train(model, optimizer)
        scheduler.step()
        return model, optimizer, scheduler

    return fit


def offloaded(path: str, **settings: Any) -> Callable[[int], object]:
    def fit(number: int) -> object:
        model = net()
        _, optimizer = swapper.offload(model, adam(model), config_of(path, offload_param=NVME, **settings))
        train(model, optimizer)
        return model, optimizer

    return fit


def same_model(path: str) -> Callable[[int], object]:
    model = net()

    def fit(number: int) -> object:
        optimizer = swapper.wrap_optimizer(adam(model), config_of(path, offload_gradient=NVME))
        train(model, optimizer)
        return optimizer

    return fit


def wrap_and_unwrap(path: str) -> Callable[[int], object]:
    model = net()
    optimizer = adam(model)

    def fit(number: int) -> object:
        swapper.wrap_optimizer(optimizer, config_of(path, offload_gradient=NVME))
        train(model, optimizer)
        return swapper.unwrap_optimizer(optimizer)

    return fit


def in_init(path: str) -> Callable[[int], object]:
    def fit(number: int) -> object:
        config = swapper.OffloadConfig(**config_of(path, offload_param=NVME))
        with swapper.init(config):
            model = net()
        _, optimizer = swapper.offload(model, adam(model), config)
        train(model, optimizer)
        return model, optimizer

    return fit


def init_raises(path: str) -> Callable[[int], object]:
    def fit(number: int) -> object:
        config = swapper.OffloadConfig(**config_of(path, offload_param=NVME))
        try:
            with swapper.init(config):
                net()
                raise RuntimeError("in the middle of a constructor")
        except RuntimeError as error:
            return error

    return fit


def step_raises(path: str) -> Callable[[int], object]:
    def fit(number: int) -> object:
        model = net()
        _, optimizer = swapper.offload(model, adam(model), config_of(path, offload_param=NVME, offload_gradient=NVME))
        train(model, optimizer)
        optimizer.param_groups[0]["betas"] = (0.9,)
        try:
            train(model, optimizer)
        except ValueError as error:
            return error
        raise AssertionError("it did not raise")

    return fit


def saved_and_loaded(path: str) -> Callable[[int], object]:
    def fit(number: int) -> object:
        model = net()
        _, optimizer = swapper.offload(model, adam(model), config_of(path, offload_param=NVME))
        train(model, optimizer)
        swapper.save_checkpoint(f"{path}/checkpoint", model, optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
        swapper.load_checkpoint(f"{path}/checkpoint", model, optimizer)
        return model, optimizer

    return fit


PLAIN: dict[str, Callable[[str], Callable[[int], object]]] = {
    "wrapped": wrapped,
    "with gradients": lambda path: wrapped(path, offload_gradient=NVME),
    "in memory": lambda path: wrapped(path, offload_optimizer={"device": "cpu"}),
    "stepped in backward": lambda path: wrapped(path, offload_optimizer={**NVME, "step_in_backward": True}),
    "offloaded": lambda path: offloaded(path, offload_gradient=NVME),
    "offloaded, stepped in backward": lambda path: offloaded(
        path, offload_gradient=NVME, offload_optimizer={**NVME, "step_in_backward": True}
    ),
    "the same model": same_model,
    "wrapped and unwrapped": wrap_and_unwrap,
    "built in init": in_init,
    "init raises": init_raises,
    "a step raises": step_raises,
    "saved and loaded": saved_and_loaded,
}


def plain_loops(path: str) -> dict[str, dict[str, int]]:
    with without_collector():
        return {name: growth(make(path), path, 8) for name, make in PLAIN.items()}


@pytest.mark.thorough("it shows that the measure of the others is right")
def test_a_loop_of_plain_pytorch_holds_one_fit(nvme_path: Path) -> None:
    assert_nothing_stays(alone(plain_loops, str(nvme_path)))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": net,
    "transformer": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(200, 2, 64, batch_first=True), 2),
    "strided": lambda: nn.Sequential(
        nn.Unflatten(1, (8, 5, 5)), nn.Conv2d(8, 64, 3).to(memory_format=torch.channels_last), nn.Flatten()
    ),
}


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("in_backward", [False, True], ids=["step", "step in backward"])
def test_what_belongs_to_an_optimizer_and_a_model_dies_with_them(
    layers: str, in_backward: bool, nvme_path: Path
) -> None:
    settings = config_of(
        str(nvme_path),
        offload_param=NVME,
        offload_gradient=NVME,
        offload_optimizer={**NVME, "step_in_backward": in_backward},
    )
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    gc.collect()
    gc.disable()
    try:
        model = LAYERS[layers]()
        model, optimizer = swapper.offload(model, adam(model), settings)
        train(model, optimizer)
        of_optimizer, of_model = swapper.of(optimizer), model.swapper
        assert isinstance(of_model, ParameterCache)
        parts = (model, optimizer, of_optimizer, of_model, of_optimizer.gradients, of_optimizer._pool)
        living = [weakref.ref(part) for part in (*parts, *model.parameters())]
        del model, optimizer, of_optimizer, of_model, parts
        assert [reference() for reference in living if reference() is not None] == []
    finally:
        gc.enable()
    assert os.listdir(nvme_path) == []


def test_backward_goes_on_when_nobody_has_the_model_any_more(nvme_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 200, requires_grad=True)

    def loss_of(model: nn.Module) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().sum()
        return loss

    torch.manual_seed(1)
    loss_of(net()).backward()
    plain, x.grad = x.grad, None
    torch.manual_seed(1)
    model, _ = swapper.offload(net(), [], config_of(str(nvme_path), offload_param=NVME))
    loss = loss_of(model)
    del model
    loss.backward()
    assert plain is not None and torch.equal(x.grad, plain)


def test_engines_of_equal_settings_on_a_drive_are_one(nvme_path: Path) -> None:
    alone(engines_are_shared, str(nvme_path))  # Where no engine of an earlier test is about to end.


def engines_are_shared(nvme_path: str) -> None:
    def engines() -> int:
        tasks = Path("/proc/self/task").iterdir()
        return sum((task / "comm").read_text().strip() == "swapper-io" for task in tasks)

    models = [net() for _ in range(4)]
    optimizers = [swapper.wrap_optimizer(adam(model), config_of(nvme_path)) for model in models[:3]]
    assert engines() == 1
    other = swapper.wrap_optimizer(adam(models[3]), config_of(nvme_path, aio={"queue_depth": 8}))
    assert engines() == 2
    for model, optimizer in zip(models, [*optimizers, other], strict=True):
        train(model, optimizer)
    for optimizer in optimizers:
        train(models[2], optimizers[2])  # It goes on when the others have let go.
        optimizer.swapper.close()  # type: ignore[attr-defined]
    until(lambda: engines() == 1)
    other.swapper.close()  # type: ignore[attr-defined]
    until(lambda: engines() == 0)


def until(condition: Callable[[], bool]) -> None:
    """A thread that was joined may still be listed for a moment."""
    stop = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < stop
        time.sleep(0.01)


def test_configs_of_fits_that_are_over_are_not_kept(nvme_path: Path) -> None:
    def config() -> swapper.OffloadConfig:
        return swapper.OffloadConfig(**config_of(str(nvme_path), offload_param=NVME))

    first = config()
    model, _ = swapper.offload(net(), [], first)
    store = model.swapper.store  # type: ignore[union-attr]
    shared = Shared.existing(first)
    assert shared is not None
    kept = config()
    for number in range(20):
        assert Shared.join(kept if number == 3 else config(), store)  # type: ignore[arg-type]
        assert len(shared._joined) <= 2
    assert Shared.existing(kept) is Shared.existing(first) is shared
    assert sum(each is shared for each in Shared._all.values()) == len(shared._joined) + 1
    other = config()
    Shared._all[id(other)] = shared  # As if one that is gone had had the id.
    assert Shared.existing(other) is None
    del Shared._all[id(other)]
    model.swapper.close()  # type: ignore[operator, union-attr]


def test_a_pool_takes_what_its_plan_can_use(nvme_path: Path) -> None:
    """A model of 66 parameters took 1 GiB."""
    before = resident_bytes()
    model = nn.Sequential(nn.Linear(10, 5), nn.Linear(5, 1), nn.Linear(1, 2), nn.Linear(2, 1, bias=False))
    assert sum(p.numel() for p in model.parameters()) < 70
    optimizer = swapper.wrap_optimizer(adam(model), {"nvme_path": str(nvme_path), "offload_optimizer": NVME})
    model(torch.randn(2, 10)).sum().backward()
    optimizer.step()
    assert swapper.of(optimizer)._pool.ready_bytes <= 2 << 20
    assert resident_bytes() - before < 20 << 20
    swapper.of(optimizer).close()

    large = nn.Linear(1000, 1500)
    optimizer = swapper.wrap_optimizer(adam(large), {"nvme_path": str(nvme_path), "offload_optimizer": NVME})
    stats, pool = swapper.of(optimizer).stats(), swapper.of(optimizer)._pool
    assert stats.pool_bytes == 1 << 30  # What it may take.
    state_bytes = 3 * 1500 * 1001 * 4
    assert pool.ready_bytes <= state_bytes + (8 << 20)
    for _ in range(2):
        large(torch.randn(2, 1000)).sum().backward()
        optimizer.step()
    ready_bytes = pool.ready_bytes
    assert ready_bytes <= state_bytes + (8 << 20), "no step takes more than was made ready"
    # What comes later gets what it needs, up to `pool_bytes`.
    more = nn.Linear(2000, 1500)
    optimizer.add_param_group({"params": list(more.parameters())})
    for _ in range(2):
        more(large(torch.randn(2, 1000)).repeat(1, 2)[:, :2000]).sum().backward()
        optimizer.step()
    swapper.of(optimizer).flush()
    assert ready_bytes < pool.ready_bytes <= state_bytes * 4
    swapper.of(optimizer).close()
    assert pool.ready_bytes == 0


# --- Lightning and Fabric -------------------------------------------------------------------------------------------


def lightning_fits(path: str, names: list[str]) -> dict[str, dict[str, int]]:
    warnings.simplefilter("ignore")
    import logging

    import lightning as L

    from swapper.fabric import SwapStrategy as FabricStrategy
    from swapper.lightning import SwapDDPStrategy, SwapStrategy

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    data = torch.utils.data.DataLoader(torch.randn(4, 200), batch_size=2)  # type: ignore[arg-type]

    class Module(L.LightningModule):
        def __init__(self, error: type[BaseException] | None = None) -> None:
            super().__init__()
            self.net = net()
            self.error = error

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            if self.error is not None and index == 1:
                raise self.error("in a step")
            loss: torch.Tensor = self.net(batch).square().sum()
            return loss

        def validation_step(self, batch: torch.Tensor, index: int) -> None:
            self.net(batch)

        def test_step(self, batch: torch.Tensor, index: int) -> None:
            self.net(batch)

        def predict_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            out: torch.Tensor = self.net(batch)
            return out

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adam(self)

    def trainer(strategy: Any) -> L.Trainer:
        return L.Trainer(
            max_steps=2,
            strategy=strategy,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    def fit(
        model: Module | None = None, kind: Any = SwapStrategy, then: Callable[[L.Trainer], object] | None = None,
        **settings: Any,
    ) -> Callable[[int], object]:  # fmt: skip
        def run(number: int) -> object:
            made = trainer(kind(config_of(path, **settings)))
            made.fit(model or Module(), data)
            if then is not None:
                then(made)
            return made

        return run

    def save(made: L.Trainer) -> None:
        made.save_checkpoint(f"{path}/checkpoint")

    def raises(error: type[BaseException]) -> Callable[[int], object]:
        def run(number: int) -> object:
            made = trainer(SwapStrategy(config_of(path, offload_gradient=NVME)))
            try:
                made.fit(Module(error), data)
            except (ValueError, SystemExit) as caught:
                return made, caught
            raise AssertionError("it did not raise")

        return run

    model = Module()  # One, because a model without a fit is in memory, and Lightning leaves it to the collector.

    def without_fit(number: int) -> object:
        made = trainer(SwapStrategy(config_of(path, offload_param=NVME)))
        made.validate(model, data, verbose=False)
        made.test(model, data, verbose=False)
        made.predict(model, data)
        return made

    def fabric(number: int) -> object:
        made = L.Fabric(accelerator="cpu", devices=1, strategy=FabricStrategy(config_of(path, offload_param=NVME)))
        module = net()
        model, optimizer = made.setup(module, adam(module))
        for _ in range(2):
            made.backward(model(torch.randn(2, 200)).square().sum())
            optimizer.step()
            optimizer.zero_grad()
        return made, model, optimizer

    once = trainer(SwapStrategy(config_of(path)))

    def same_trainer(number: int) -> object:
        once.fit_loop.epoch_progress.reset()
        once.fit(Module(), data)
        return once

    scenarios: dict[str, Callable[[int], object]] = {
        "new models": fit(),
        "the same model": fit(Module()),
        "everything": fit(offload_param=NVME, offload_gradient=NVME),
        "the same model, everything": fit(Module(), offload_param=NVME, offload_gradient=NVME),
        "in memory": fit(offload_optimizer={"device": "cpu"}),
        "saved": fit(then=save),
        "ddp": fit(kind=SwapDDPStrategy),
        "an error": raises(ValueError),
        "Ctrl-C": raises(KeyboardInterrupt),
        "no fit": without_fit,
        "the same Trainer": same_trainer,
        "fabric": fabric,
    }
    with without_collector():
        return {name: growth(scenarios[name], path) for name in names}


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "names",
    [
        ["new models", "the same model", "fabric", "no fit"],
        ["everything", "the same model, everything", "in memory", "saved"],
        ["ddp", "an error", "Ctrl-C", "the same Trainer"],
    ],
    ids=" and ".join,
)
def test_twenty_fits_hold_no_more_than_two(names: list[str], nvme_path: Path) -> None:
    assert_nothing_stays(alone(lightning_fits, str(nvme_path), names, timeout_s=240))
