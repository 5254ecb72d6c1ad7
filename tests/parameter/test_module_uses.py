"""What the use of a module costs, and what it leaves behind: in counts of parameters, records and bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from interrupts import interrupted_at
from sampling import places
from torch import nn
from torch.utils.checkpoint import checkpoint
from twins import adamw, close, offloaded, swapper_of

from swapper.parameter import owner as parameter
from swapper.parameter.swapper import ParameterSwapper
from swapper.storage.cached_records import RecordState
from swapper.tensors.evicted import EvictedParameter

WIDTH = 32
RECORD_BYTES = 2 * 4096 + 4 * (WIDTH * WIDTH + WIDTH)


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What happened to single parameters."""
    names: list[str] = []

    def counting(name: str, function: Callable[..., None]) -> Callable[..., None]:
        def counted(*args: object) -> None:
            names.append(name)
            function(*args)

        return counted

    for name in ("restore", "evict"):
        monkeypatch.setattr(parameter, name, counting(name, getattr(parameter, name)))
    yield names


def chain(count: int) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))
    return model, adamw(model)


def test_a_use_touches_what_the_module_has_and_not_what_its_record_has(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch, touched: list[str]
) -> None:
    swapped = {}
    for group_bytes in (1, 1 << 20):
        with monkeypatch.context() as patch:
            patch.setattr("twins.GROUP_BYTES", group_bytes)
            patch.setattr("twins.BUCKET_BYTES", 1 << 20)
            model, optimizer = offloaded(nvme_path, lambda: chain(60))
        assert len(swapper_of(model)._all) == (60 if group_bytes == 1 else 1)
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.zero_grad()
        touched.clear()
        loss = model(torch.ones(1, WIDTH)).sum()
        in_forward = len(touched)
        loss.backward()
        swapped[group_bytes] = (in_forward, len(touched))
        close(model, optimizer)
    assert swapped[1] == swapped[1 << 20] == (60 * 2 * 2, 60 * 2 * 2), "two parameters came and went, each once"


def test_a_use_by_hand_touches_one_parameter(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch, touched: list[str]
) -> None:
    monkeypatch.setattr("twins.GROUP_BYTES", 1 << 20)
    monkeypatch.setattr("twins.BUCKET_BYTES", 1 << 20)
    model, optimizer = offloaded(nvme_path, lambda: chain(20))
    touched.clear()
    assert torch.isfinite(model[3].weight).all()
    # isfinite, and nothing else
    assert touched == ["restore", "evict"]
    close(model, optimizer)


def test_a_parameter_that_two_uses_have_stays_until_both_are_over(nvme_path: Path) -> None:
    model, optimizer = offloaded(nvme_path, lambda: chain(4))
    swapper = swapper_of(model)
    weight = model[2].weight
    held = swapper.records_of([weight])[0]
    with swapper.present([held]):
        with swapper.present([held]):
            assert type(weight) is nn.Parameter
        assert type(weight) is nn.Parameter
        model(torch.ones(1, WIDTH))
        assert type(weight) is nn.Parameter
        assert len(held.attached) == len(held.plan.locations)
    assert isinstance(weight, EvictedParameter)
    assert not held.attached
    assert not held.holds
    close(model, optimizer)


OTHER_ORDER = torch.ones(32, 32).t()


def test_data_that_do_not_fit_are_refused_and_everything_is_released(nvme_path: Path) -> None:
    model, optimizer = offloaded(nvme_path, lambda: chain(4))
    swapper = swapper_of(model)
    expected = model(torch.ones(1, WIDTH))
    hook = model[1].register_forward_hook(lambda module, args, output: setattr(module.weight, "data", OTHER_ORDER))
    with pytest.raises(parameter.SwapError, match=r"1\.weight was \(32, 32\)"):
        model(torch.ones(1, WIDTH))
    hook.remove()
    assert torch.equal(model(torch.ones(1, WIDTH)), expected)
    assert_at_rest(model, swapper)
    close(model, optimizer)


def assert_at_rest(model: nn.Module, swapper: ParameterSwapper) -> None:
    for held in swapper._all:
        assert not held.holds
        assert not held.attached
        assert not held.viewed()
    assert not swapper._ended
    cached = [swapper._cache.records.get(held.key) for held in swapper._all]
    assert all((record is not None) >= bool(held.values) for record, held in zip(cached, swapper._all, strict=True))
    assert swapper._cache.records.length_bytes == sum(record.lease.length_bytes for record in cached if record)
    assert not any(record and record.state is RecordState.LIVE for record in cached)
    assert all(isinstance(p, EvictedParameter) for p in model.parameters())
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


# --- Ctrl-C ---


PLACES = {
    "parameter/owner.py": 197,
    "parameter/cache.py": 197,
    "tensors/evicted": 151,
    "storage/access_order.py": 997,
    "storage/cache.py": 397,
    "storage/cache_policies.py": 997,
    "parameter/saved_tensors.py": 67,
    "parameter/forward_hooks.py": 23,
}
"""Each so-manieth place of a file: a prime number, so that every kind of place comes."""


@pytest.mark.parametrize(("file_name", "stride"), PLACES.items())
def test_ctrl_c_anywhere_in_a_pass_leaves_the_values_and_nothing_in_use(
    file_name: str, stride: int, nvme_path: Path
) -> None:
    plain, _ = chain(5)
    model, optimizer = offloaded(nvme_path, lambda: chain(5))
    swapper = swapper_of(model)
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0))
    plain(x).square().sum().backward()
    expected = [(p.detach(), p.grad) for p in plain.parameters()]

    def go() -> None:
        model(x).square().sum().backward()
        model.zero_grad()
        with torch.no_grad():
            model(x)

    for n in places(stride, sample=3 * stride):
        if not interrupted_at(n, go, file_name):
            break
        model.zero_grad()
        model(x).square().sum().backward()
        assert_at_rest(model, swapper)
        for p, (value, gradient) in zip(model.parameters(), expected, strict=True):
            assert torch.equal(p, value)
            assert gradient is not None
            assert torch.equal(p.grad, gradient)  # type: ignore[arg-type]
    assert n > 0
    close(model, optimizer)


# --- Forward only ---


class Model(nn.Module):
    """As language models are: tied ends, an encoder that is also called alone, blocks that may be checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.encoder = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12))
        self.checkpointed = ""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.checkpointed:
                x = checkpoint(block, x, use_reentrant=self.checkpointed == "reentrant")
            else:
                x = block(x)
        return x @ self.embedding.weight.T

    def generate(self, tokens: torch.Tensor, count: int) -> torch.Tensor:
        for _ in range(count):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], 1)
        return tokens


TOKENS = torch.arange(6).reshape(2, 3)


def train(model: Model, optimizer: torch.optim.Optimizer, checkpointed: str = "") -> None:
    model.checkpointed = checkpointed
    model(TOKENS).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.checkpointed = ""


def evaluate(model: Model, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model(TOKENS)


def infer(model: Model, optimizer: torch.optim.Optimizer) -> None:
    with torch.inference_mode():
        model(TOKENS)


def generate(model: Model, optimizer: torch.optim.Optimizer) -> None:
    with torch.inference_mode():
        model.generate(TOKENS, 4)


def encode_and_decode(model: Model, optimizer: torch.optim.Optimizer) -> None:
    with torch.inference_mode():
        model.encoder(torch.ones(1, WIDTH))
        model.generate(TOKENS, 3)


def forward_only(model: Model, optimizer: torch.optim.Optimizer) -> None:
    model(TOKENS)


LOOPS: dict[str, tuple[list[Callable[[Model, torch.optim.Optimizer], None]], int]] = {
    "evaluate": ([evaluate], 1),
    "infer": ([infer], 1),
    "generate": ([generate], 4),
    "encode and decode": ([encode_and_decode], 4),
    "train, evaluate": ([train, evaluate], 4),
    "train, evaluate twice": ([train, train, evaluate, evaluate], 8),
    "with gradients that nobody wants": ([forward_only], 1),
    "train, then only forward": ([train, forward_only], 4),
    "checkpointed": ([lambda m, o: train(m, o, "not"), evaluate], 5),
    "reentrant": ([lambda m, o: train(m, o, "reentrant"), evaluate], 5),
}
"""What a program does again and again, and how often it goes through the model in that, a step and a recomputation
(which comes right before the use in backward) included."""


@pytest.mark.sampled(5)
@pytest.mark.parametrize("spare_records", [0, 4])
@pytest.mark.parametrize("name", LOOPS)
def test_a_pass_reads_at_most_the_model_and_keeps_what_it_can(
    name: str, spare_records: int, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twins.GROUP_BYTES", 1)

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Model()
        model.embedding.weight.data.mul_(0.1)
        # Without state, whose records would share the pool.
        return model, torch.optim.SGD(model.parameters(), lr=1e-3)

    model, optimizer = offloaded(nvme_path, make, spare_bytes=spare_records * RECORD_BYTES, optimizer_device="none")
    assert isinstance(model, Model)
    swapper = swapper_of(model)
    loop, passes = LOOPS[name]
    model_bytes = sum(held.plan.file_bytes for held in swapper._all)
    assert model_bytes > swapper._budget_bytes * 1.5, "what is measured is a model that the pool does not hold"
    kept_bytes = swapper._budget_bytes - 3 * RECORD_BYTES
    read = []
    for _ in range(6):
        before = swapper.metrics.bytes_read
        for action in loop:
            action(model, optimizer)
        read.append(swapper.metrics.bytes_read - before)
    assert max(read[1:]) <= passes * model_bytes, [each / model_bytes for each in read]
    if spare_records:
        assert min(read[2:]) <= passes * (model_bytes - kept_bytes // 2), "some of the model stays where it is"
    close(model, optimizer)


def test_evaluation_between_steps_does_not_disturb_them(nvme_path: Path) -> None:
    """A step after evaluation reads no more than one after a step."""
    model, optimizer = offloaded(nvme_path, lambda: chain(16), spare_bytes=4 * RECORD_BYTES, optimizer_device="none")
    swapper = swapper_of(model)

    def step() -> int:
        before = swapper.metrics.bytes_read
        model(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return swapper.metrics.bytes_read - before

    def look() -> None:
        with torch.no_grad():
            model(torch.ones(2, WIDTH))

    steps = [step() for _ in range(4)]
    for _ in range(3):
        look()
        look()
        after = [step() for _ in range(3)]
        assert max(after) <= max(steps[1:]) + 3 * RECORD_BYTES, (steps, after)
    close(model, optimizer)


# --- Writes that no version counter sees ---


def through_numpy(weight: torch.Tensor) -> None:
    array = weight.detach().numpy()
    array *= 2


def through_the_storage(weight: torch.Tensor) -> None:
    torch.empty(0, dtype=weight.dtype).set_(weight.untyped_storage(), 0, weight.shape, weight.stride()).mul_(2)


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "data": lambda weight: weight.data.mul_(2),
    "data of a view": lambda weight: weight.detach().view(-1).data.mul_(2),
    "numpy": through_numpy,
    "storage": through_the_storage,
    "in place": lambda weight: weight.mul_(2),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("when", ["before", "after", "by hand"])
def test_a_write_in_inference_to_frozen_parameters_is_never_lost(when: str, name: str, nvme_path: Path) -> None:
    """Nothing but the bytes tells of most of them, so the bytes are compared at every eviction."""
    outputs = []
    for swapped in (False, True):
        model, optimizer = chain(12) if not swapped else offloaded(nvme_path, lambda: chain(12))
        model.requires_grad_(False)
        changed = [model[i] for i in (0, 3, 7)]

        def write(module: nn.Module, *_: object) -> None:
            WRITES[name](module.weight)

        hooks = []
        for module in changed:
            if when == "before":
                hooks.append(module.register_forward_pre_hook(write))
            elif when == "after":
                hooks.append(module.register_forward_hook(write))
        with torch.inference_mode(name != "in place"), torch.no_grad():
            for _ in range(3):
                outputs.append(model(torch.ones(1, WIDTH)).clone())
                for module in changed if when == "by hand" else ():
                    write(module)
        for hook in hooks:
            hook.remove()
        outputs.append(torch.cat([p.detach().flatten().clone() for p in model.parameters()]))
        if swapped:
            assert swapper_of(model).metrics.reads > 12
            close(model, optimizer)
    for plain, mine in zip(outputs[:4], outputs[4:], strict=True):
        assert torch.equal(plain, mine)
