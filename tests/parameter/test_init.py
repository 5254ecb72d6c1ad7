"""Models that are built on the drive are the ordinary ones, to the bit, and never in memory as a whole."""

from __future__ import annotations

import copy
import errno
import functools
import gc
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupts import interrupted_at, places_of
from isolation import alone
from launcher import run_program
from models import CASES, WIDTH, Gpt2, Mlp, loss_of, tokens, vectors
from repository import BENCHMARK
from sampling import ALL
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrizations
from twins import Run, bits, config_for, facts_of, on_meta, run_twice, small_records, swapper_of, values_of

import swapper
from swapper.io.handle import AsyncIOHandle, FaultPlan
from swapper.storage.mounts import FileSystem
from swapper.storage.store import RecordKey, TensorStore
from swapper.tensors.evicted import EvictedParameter
from swapper.tensors.homes import home_of


@pytest.fixture
def leaves_nothing(nvme_path: Path) -> Iterator[None]:
    """After the test, and when what it made is collected, `nvme_path` is empty."""
    yield
    gc.collect()
    gc.collect()  # What autograd's graphs hold is found when they are gone.
    assert not list(nvme_path.iterdir()), "files were left behind"


MakeModel = Callable[[], nn.Module]


def looks_of(model: nn.Module) -> list[object]:
    """All facts but the identity."""
    return [(name, *facts) for name, _, *facts in facts_of(model)]


def built_twice(nvme_path: Path, make: MakeModel) -> tuple[nn.Module, nn.Module]:
    """The same model the ordinary way and on the drive, compared."""
    torch.manual_seed(0)
    plain = make()
    after = torch.get_rng_state()
    torch.manual_seed(0)
    with small_records(), swapper.init(config_for(nvme_path)):
        model = make()
    assert torch.equal(torch.get_rng_state(), after), "other random numbers were drawn"
    assert looks_of(model) == looks_of(plain)
    assert values_of(model) == values_of(plain)
    return plain, model


def away(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if isinstance(p, EvictedParameter)]


# --- The same bits ----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CASES)
def test_a_model_that_is_never_offloaded_works(name: str, nvme_path: Path, leaves_nothing: None) -> None:
    case = CASES[name]
    plain, model = built_twice(nvme_path, case.make)
    assert len(away(model)) >= len(list(model.parameters())) / 2
    for mode in (True, False):
        noted = []
        for one in (plain, model):
            one.train(mode)
            torch.manual_seed(1)
            outputs = one(*case.inputs(torch.Generator().manual_seed(2)))
            outputs.float().square().mean().backward()
            noted.append([bits(outputs), [bits(p.grad) for p in one.parameters()], values_of(one)])
        assert noted[0] == noted[1]


@pytest.mark.long
@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CASES)
def test_train_after_building_on_the_drive(name: str, nvme_path: Path, leaves_nothing: None) -> None:
    case = CASES[name]

    def program(run: Run) -> None:
        for _ in range(2):
            loss_of(run, case.inputs).backward()
            run.finish_step()
        run.model.eval()
        with torch.no_grad():
            run.note("evaluated", run.model(*case.inputs(run.generator)))

    run_twice(nvme_path, case.make, program, spare_bytes=case.spare_bytes, built_on_disk=True)


class Initialised(nn.Module):
    """Does to its parameters what constructors do, after its modules are complete."""

    def __init__(self, change: Callable[[nn.Module], object]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)])
        self.own = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 64, bias=False)
        change(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = self.head(x @ self.own)
        return y


def tie(model: Initialised) -> None:
    model.head.weight = model.tokens.weight


def apply(model: Initialised) -> None:
    def initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    model.apply(initialise)


def initialise(model: Initialised) -> None:
    nn.init.trunc_normal_(model.own)
    nn.init.orthogonal_(model.head.weight)
    nn.init.kaiming_uniform_(model.tokens.weight, a=5**0.5)
    nn.init.constant_(model.blocks[0][0].bias, 0.5)  # type: ignore[index]


def scale(model: Initialised) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    for p in model.parameters():
        p.data.add_(torch.randn(p.shape))
        p.data = p.data * 2
        p.detach()[0] = 1


def copy_layers(model: Initialised) -> None:
    model.copies = nn.ModuleList([copy.deepcopy(model.blocks[0]) for _ in range(3)])
    assert model.copies[0][0].weight is not model.blocks[0][0].weight  # type: ignore[index]
    nn.init.zeros_(model.copies[1][0].weight)  # type: ignore[index]


def exchange(model: Initialised) -> None:
    with torch.no_grad():
        model.own.set_(torch.ones(WIDTH, WIDTH))
        model.blocks[0][0].weight.set_(torch.full((WIDTH, WIDTH), 2.0))  # type: ignore[index]


def remake(model: Initialised) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone() * 2)
    first = model.blocks[0][0]  # type: ignore[index]
    first.weight = nn.Parameter(first.weight)


def parametrize(model: Initialised) -> None:
    parametrizations.weight_norm(model.head)
    parametrizations.orthogonal(model.blocks[1][0])  # type: ignore[index]


def register_buffers(model: Initialised) -> None:
    model.register_buffer("copied", model.own.detach().clone())
    model.register_buffer("mean", model.head.weight.mean(0))


def freeze(model: Initialised) -> None:
    model.blocks.requires_grad_(False)


def convert(model: Initialised) -> None:
    model.blocks.bfloat16()
    model.head.half()


def convert_twice(model: Initialised) -> None:
    model.double()
    model.to(torch.float32)


def drop(model: Initialised) -> None:
    model.unused = nn.Linear(WIDTH, WIDTH)
    del model.unused
    model.blocks[2] = nn.Identity()


def run_it(model: Initialised) -> None:
    model(torch.randn(2, WIDTH)).sum().backward()
    model.zero_grad()


CHANGES = [
    tie, apply, initialise, scale, copy_layers, exchange, remake, parametrize, register_buffers, freeze, convert,
    convert_twice, drop, run_it,
]  # fmt: skip


def test_parameters_made_of_parameters_hold_no_memory_of_the_pool(nvme_path: Path) -> None:
    """As the norms of `torch.nn.utils.parametrizations` make their originals."""
    with small_records(), swapper.init(config_for(nvme_path)):
        layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(6))
        before = [layer.weight.detach().clone() for layer in layers]
        for layer in layers:
            layer.weight = nn.Parameter(layer.weight)
    assert away(layers) == [f"{i}.weight" for i in range(6)]
    for layer, values in zip(layers, before, strict=True):
        assert layer.weight._base is None
        assert torch.equal(layer.weight, values)


@pytest.mark.parametrize("change", CHANGES)
def test_what_constructors_do_with_parameters(
    change: Callable[[Initialised], None], nvme_path: Path, leaves_nothing: None
) -> None:
    make = functools.partial(Initialised, change)
    plain, model = built_twice(nvme_path, make)
    assert isinstance(model, Initialised)
    assert len(away(model)) > 4
    if change is tie:
        assert model.head.weight is model.tokens.weight
    if change is convert:
        return
    for one in (plain, model):
        one(torch.ones(2, WIDTH)).sum().backward()
    assert [bits(p.grad) for p in plain.parameters()] == [bits(p.grad) for p in model.parameters()]


def test_conversions_after_building(nvme_path: Path, leaves_nothing: None) -> None:
    def make() -> nn.Module:
        return Gpt2(functional=False).to(torch.bfloat16)

    plain, model = built_twice(nvme_path, make)
    plain.double()
    model.double()
    assert values_of(model) == values_of(plain)


@pytest.mark.long
def test_a_view_of_a_parameter_keeps_following_it(nvme_path: Path) -> None:
    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.early = nn.Parameter(torch.randn(WIDTH, WIDTH))
            self.register_buffer("row", self.early.detach()[3])
            self.late = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("column", self.late.weight.detach()[:, 3])
            with torch.no_grad():
                self.early.mul_(2)
                self.late.weight.mul_(3)

    plain, model = built_twice(nvme_path, Viewed)
    for one in (plain, model):
        with torch.no_grad():
            for p in one.parameters():
                p.add_(1)
            for b in one.buffers():
                b.mul_(2)
    assert values_of(model) == values_of(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with small_records():
        swapper.offload(model, optimizer, config_for(nvme_path))
    assert set(model.swapper.stays) == {"early", "late.weight"}  # type: ignore[operator, arg-type, union-attr]
    for one, its in ((model, optimizer), (plain, torch.optim.SGD(plain.parameters(), lr=0.1))):
        for p in one.parameters():
            p.grad = torch.ones_like(p)
        its.step()
    assert values_of(model) == values_of(plain)


def test_an_alias_that_initialises_a_parameter(nvme_path: Path) -> None:
    class Aliased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            values = torch.empty(WIDTH, WIDTH)
            self.one = nn.Parameter(values)
            self.others = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(5)])
            values.normal_()

    _, model = built_twice(nvme_path, Aliased)
    assert "one" in away(model)


def test_scripted_modules_stay_in_memory(nvme_path: Path) -> None:
    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = nn.Linear(WIDTH, WIDTH)
            with pytest.warns((DeprecationWarning, FutureWarning)):
                self.scripted = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.scripted(self.plain(x))
            return y

    plain, model = built_twice(nvme_path, lambda: nn.Sequential(Scripted()))
    assert away(model) == ["0.plain.weight", "0.plain.bias"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with small_records():
        swapper.offload(model, optimizer, config_for(nvme_path))
    for one, its in ((plain, torch.optim.AdamW(plain.parameters(), lr=1e-2)), (model, optimizer)):
        for _ in range(2):
            one(torch.ones(2, WIDTH)).sum().backward()
            its.step()
    assert values_of(model) == values_of(plain)
    model.swapper.close()  # type: ignore[operator, union-attr]
    optimizer.swapper.close()  # type: ignore[attr-defined]


@pytest.mark.long
@pytest.mark.parametrize("in_backward", [True, False])
def test_everything_on_the_drive(in_backward: bool, nvme_path: Path, leaves_nothing: None) -> None:
    torch.manual_seed(0)
    plain = Gpt2(functional=False).bfloat16().float()
    config = config_for(
        nvme_path,
        offload_gradient={"device": "nvme"},
        offload_optimizer={"device": "nvme", "step_in_backward": in_backward},
    )
    torch.manual_seed(0)
    with small_records(), swapper.init(config):
        model = Gpt2(functional=False).bfloat16().float()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with small_records():
        swapper.offload(model, optimizer, config)
    for one, its in ((plain, torch.optim.AdamW(plain.parameters(), lr=1e-2)), (model, optimizer)):
        for seed in range(3):
            torch.manual_seed(seed)
            one(*tokens(torch.Generator().manual_seed(seed))).square().mean().backward()
            its.step()
            its.zero_grad()
    assert values_of(model) == values_of(plain)
    model.swapper.close()  # type: ignore[operator, union-attr]
    optimizer.swapper.close()  # type: ignore[attr-defined]


def test_parameters_that_are_short_wait_in_memory(nvme_path: Path) -> None:
    with swapper.init(config_for(nvme_path)):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 63))
    assert away(model) == ["0.weight"]


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_sparse_parameters_stay_in_memory(layout: torch.layout, nvme_path: Path) -> None:
    config = config_for(nvme_path)
    with swapper.init(config):
        model = nn.Sequential(nn.Linear(64, 64))
        sparse = torch.eye(64).to_sparse(layout=layout)
        model.register_parameter("sparse", nn.Parameter(sparse, requires_grad=False))
    assert away(model) == ["0.weight"]
    swapper.offload(model, config=config)
    assert swapper_of(model).stays["sparse"] == f"its layout is {layout}"
    assert type(model.sparse) is nn.Parameter
    assert torch.equal(model.sparse.to_dense(), torch.eye(64))
    swapper_of(model).close()


def test_a_model_on_the_meta_device_stays_there(nvme_path: Path) -> None:
    with swapper.init(config_for(nvme_path)), torch.device("meta"):
        model = Mlp()
    assert all(p.is_meta for p in model.parameters())


# --- Handing over to offload ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("same", [True, False], ids=["same config", "another config"])
@pytest.mark.parametrize("optimizer_device", ["nvme", "none"])
def test_offload_takes_the_parameters_over(
    same: bool, optimizer_device: str, nvme_path: Path, leaves_nothing: None
) -> None:
    torch.manual_seed(0)
    plain = Mlp(12)
    config = config_for(nvme_path, offload_optimizer={"device": optimizer_device})
    torch.manual_seed(0)
    with small_records(), swapper.init(config):
        model = Mlp(12)
    ids = [id(p) for p in model.parameters()]
    other = config_for(nvme_path, offload_optimizer={"device": optimizer_device})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    assert len(list(nvme_path.iterdir())) == 1
    with small_records():
        swapper.offload(model, optimizer, config if same else other)
    assert len(list(nvme_path.iterdir())) == 1, "the builder's files are gone"
    assert len(list(next(nvme_path.iterdir()).glob("*-param-*"))) == len(model.swapper._all)  # type: ignore[operator, arg-type, union-attr]
    assert [id(p) for p in model.parameters()] == ids
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for one, its in ((plain, reference), (model, optimizer)):
        for seed in range(2):
            one(*vectors(torch.Generator().manual_seed(seed))).square().mean().backward()
            its.step()
            its.zero_grad()
    assert values_of(model) == values_of(plain)
    model.swapper.close()  # type: ignore[operator, union-attr]
    optimizer.swapper.close()  # type: ignore[attr-defined]


def test_a_model_that_offload_refuses_stays_as_it_was(nvme_path: Path) -> None:
    plain, model = built_twice(nvme_path, lambda: Mlp(3, 128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with pytest.raises(swapper.ConfigError, match="pool_bytes"):
        swapper.offload(model, optimizer, config_for(nvme_path, pool_bytes="150KiB"))
    assert not hasattr(optimizer, "swapper")
    assert values_of(model) == values_of(plain)
    x = torch.randn(2, 128)
    assert bits(model(x)) == bits(plain(x))
    with small_records():
        swapper.offload(model, optimizer, config_for(nvme_path))
    assert values_of(model) == values_of(plain)
    model.swapper.close()  # type: ignore[operator, union-attr]
    optimizer.swapper.close()  # type: ignore[attr-defined]


def test_a_part_of_a_model_is_offloaded(nvme_path: Path) -> None:
    plain, model = built_twice(nvme_path, lambda: Mlp(8))
    part = model.blocks[2:5]  # type: ignore[index, union-attr]
    assert isinstance(part, nn.ModuleList)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-2)
    with small_records():
        swapper.offload(part, optimizer, config_for(nvme_path))
    reference = torch.optim.AdamW(plain.blocks[2:5].parameters(), lr=1e-2)  # type: ignore[index, union-attr]
    x = torch.randn(2, WIDTH)
    for one, its in ((plain, reference), (model, optimizer)):
        for _ in range(2):
            one(x).square().mean().backward()
            its.step()
    assert values_of(model) == values_of(plain)


def test_save_and_load_without_offload(nvme_path: Path) -> None:
    plain, model = built_twice(nvme_path, lambda: Mlp(40))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = {name: tensor + 1 for name, tensor in torch.load(file).items()}
    for one in (plain, model):
        one.load_state_dict(other)
    assert values_of(model) == values_of(plain)


# --- Memory -----------------------------------------------------------------------------------------------------------

MODEL_BYTES = 60 * 1024 * 1024 * 4


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", ["blocks", "list", "meta", "converted"])
def test_a_model_larger_than_memory_is_built(way: str, nvme_path: Path) -> None:
    """The model is 240 MB, the pool 32 MB."""
    program = f"""
import sys, torch, swapper
from torch import nn
sys.path.insert(0, {str(BENCHMARK.parent)!r})
from memory import Peak
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1024, 1024)
    def forward(self, x):
        return self.linear(x)
config = swapper.OffloadConfig(nvme_path={str(nvme_path)!r}, pool_bytes="32MiB", bucket_bytes="4MiB",
                               offload_param={{"device": "nvme"}}, offload_optimizer={{"device": "none"}})
with swapper.init(config):
    small = nn.Sequential(Block(), Block())
small(torch.randn(1, 1024)).sum().backward()
torch.optim.SGD(small.parameters(), lr=0.1)  # Imports a lot.
from swapper.session import Shared
Shared.existing(config).pool.make_ready(32 << 20)
with Peak() as before:
    import time; time.sleep(0.05)
way = {way!r}
with Peak() as peak:
    if way == "meta":
        with torch.device("meta"):
            model = nn.Sequential(*[Block() for _ in range(60)])
        swapper.materialize(model, config)
    else:
        with swapper.init(config):
            if way == "list":
                model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(60)])
            else:
                model = nn.Sequential(*[Block() for _ in range(60)])
            if way == "converted":
                model.bfloat16()
                model.float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    swapper.offload(model, optimizer, config)
    with torch.no_grad():
        model(torch.randn(1, 1024))
print(peak.bytes - before.bytes)
"""
    output = run_program([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True).stdout
    assert MODEL_BYTES > 5 * 40e6
    assert int(output) < 40e6, "the pool, which was there before, and a bucket or two"


# --- What goes wrong --------------------------------------------------------------------------------------------------


def no_hooks_are_left() -> bool:
    return not torch_module._global_module_registration_hooks and not torch_module._global_parameter_registration_hooks


def test_an_exception_in_the_constructor(nvme_path: Path, leaves_nothing: None) -> None:
    def fail(model: nn.Module) -> None:
        raise RuntimeError("not today")

    with pytest.raises(RuntimeError, match="not today"), small_records(), swapper.init(config_for(nvme_path)):
        Initialised(fail)
    assert no_hooks_are_left()
    with small_records(), swapper.init(config_for(nvme_path)):
        assert len(away(Initialised(lambda model: None))) > 4


def test_what_is_left_after_an_exception_says_that_its_values_are_gone(nvme_path: Path) -> None:
    with pytest.raises(RuntimeError), small_records(), swapper.init(config_for(nvme_path)):
        model = Mlp()
        raise RuntimeError
    with pytest.raises(swapper.SwapError, match="closed"):
        model(torch.randn(2, WIDTH))


@pytest.mark.long
def test_ctrl_c_anywhere_leaves_nothing(nvme_path: Path) -> None:
    config = config_for(nvme_path)

    def build() -> None:
        with small_records(), swapper.init(config):
            Mlp(2)

    build()
    gc.collect()
    struck = 0
    for place in places_of(build, "parameter/building.py", sample=None if ALL else 15):
        struck += interrupted_at(place, build, "parameter/building.py")
        assert no_hooks_are_left()
        gc.collect()
        assert not list(nvme_path.iterdir()), place
    assert struck >= (60 if ALL else 10)
    build()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_a_drive_that_fails_while_parameters_are_put_away(
    number: int, nvme_path: Path, monkeypatch: pytest.MonkeyPatch, leaves_nothing: None
) -> None:
    for at in (1, 2, 5, 9):
        plan = FaultPlan(fail_errno=number)
        plan.fail_write_at = at
        monkeypatch.setattr("swapper.session.AsyncIOHandle", functools.partial(AsyncIOHandle, faults=plan))
        config = config_for(nvme_path, pool_bytes="64KiB")
        with pytest.raises(swapper.SwapIOError) as caught, small_records(), swapper.init(config):
            model = Mlp(16)
            [p.sum() for p in model.parameters()]
        assert caught.value.errno == number
        assert caught.value.operation == "write"
        assert no_hooks_are_left()
        gc.collect()


def test_too_little_space_is_said_with_the_sum(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "swapper.storage.store.file_systems",
        lambda directories: [FileSystem(tuple(range(len(directories))), 20_000)],
    )
    with (
        pytest.raises(swapper.SwapIOError, match="are free") as caught,
        swapper.init(config_for(nvme_path)),
    ):
        nn.Sequential(nn.Linear(128, 128))
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.long
def test_a_read_that_fails_is_not_silent(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = FaultPlan()
    monkeypatch.setattr("swapper.session.AsyncIOHandle", functools.partial(AsyncIOHandle, faults=plan))
    plain, model = built_twice(nvme_path, lambda: Mlp(250))
    plan.fail_read_at = 1
    with pytest.raises(swapper.SwapIOError):
        [p.sum() for p in model.parameters()]
    assert values_of(model) == values_of(plain)


class Keeping(nn.Linear):
    """Has a view of its weight when it was called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.weight.detach()
        return super().forward(x)


@pytest.mark.long
def test_what_user_code_has_views_of_stays_while_it_is_written_again(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch, leaves_nothing: None
) -> None:
    """The memory becomes the views' only when the drive has done with it."""
    plan = FaultPlan(fail_errno=errno.EIO, fail_write_at=1, delay_us=30_000)
    monkeypatch.setattr("swapper.session.AsyncIOHandle", functools.partial(AsyncIOHandle, faults=plan))
    make = lambda: nn.Sequential(Keeping(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))  # noqa: E731
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    with small_records(), swapper.init(config_for(nvme_path)):
        model = make()
    write, x = TensorStore.write, torch.ones(2, WIDTH)

    def refuse(store: TensorStore, key: RecordKey, *arguments: Any) -> Any:
        if key.number == 0:
            raise swapper.SwapIOError(errno.ENOSPC, "write")
        return write(store, key, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(TensorStore, "write", refuse)
        for _ in range(2):  # It has failed, and cannot be made again: before the forward, and after it.
            with pytest.raises(swapper.SwapIOError):
                model(x)
    with small_records():
        swapper.offload(model, config=config_for(nvme_path))
    assert "0.weight" in model.swapper.stays  # type: ignore[operator, union-attr]
    with torch.no_grad():
        model[0].kept.add_(1)  # type: ignore[operator, union-attr]
        plain[0].weight.add_(1)  # type: ignore[arg-type, union-attr]
    assert values_of(model) == values_of(plain)
    model.swapper.close()  # type: ignore[operator, union-attr]


def test_a_parameter_that_the_pool_cannot_hold_twice_is_refused(nvme_path: Path) -> None:
    config = config_for(nvme_path, pool_bytes="300KiB")
    message = r"Linear.weight.* 256 KiB.* pool_bytes to at least \d+"
    with pytest.raises(swapper.ConfigError, match=message), swapper.init(config):
        nn.Sequential(nn.Linear(256, 256))
    assert no_hooks_are_left()


def test_init_within_init_is_refused(nvme_path: Path) -> None:
    config = config_for(nvme_path)
    with swapper.init(config):
        message = r"swapper\.init is used within swapper\.init"
        with pytest.raises(swapper.SwapError, match=message), swapper.init(config):
            pass
        model = nn.Linear(64, 64)
        assert away(model) == []
    assert away(model) == ["weight"]
    assert no_hooks_are_left()


def test_a_config_that_swaps_no_parameters_is_refused(nvme_path: Path) -> None:
    config = config_for(nvme_path, offload_param={"device": "none"})
    with pytest.raises(swapper.ConfigError, match=r"offload_param\.device"), swapper.init(config):
        pass


def _use_in_a_fork(nvme_path: Path) -> tuple[int, bool]:
    with small_records(), swapper.init(config_for(nvme_path)):
        model = Mlp(4)
    before = values_of(model)
    child = os.fork()
    if child == 0:
        try:
            values_of(model)
        except swapper.SwapError:
            os._exit(7)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status), values_of(model) == before


def test_a_forked_child_is_told(nvme_path: Path) -> None:
    assert alone(_use_in_a_fork, nvme_path) == (7, True)


# --- From the meta device ---------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.head = nn.Linear(WIDTH, 64, bias=False)
        self.head.weight = self.tokens.weight
        self.tokens.weight.marked = True  # type: ignore[attr-defined]
        self.blocks[1].weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.blocks(self.norm(x)))
        return y


def initialise_module(module: nn.Module) -> None:
    for p in module.parameters(recurse=False):
        nn.init.normal_(p, std=0.02)
    for buffer in module.buffers(recurse=False):
        buffer.fill_(1)


@pytest.mark.parametrize("initialiser", [None, initialise_module], ids=["reset_parameters", "own"])
def test_materialize(initialiser: Callable[[nn.Module], None] | None, nvme_path: Path, leaves_nothing: None) -> None:
    plain = on_meta(Tied).to_empty(device="cpu")
    torch.manual_seed(0)
    assert isinstance(plain, Tied)
    plain.head.weight = plain.tokens.weight
    for module in plain.modules():
        if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            (initialiser or (lambda module: module.reset_parameters()))(module)
    torch.manual_seed(0)
    with small_records():
        model = on_meta(Tied)
        assert swapper.materialize(model, config_for(nvme_path), initialiser) is model
    assert isinstance(model, Tied)
    assert values_of(model) == values_of(plain)
    assert looks_of(model) == looks_of(plain)
    assert model.head.weight is model.tokens.weight
    assert model.tokens.weight.marked  # type: ignore[attr-defined]
    assert "tokens.weight" in away(model)
    assert all(not b.is_meta and type(b) is torch.Tensor for b in model.buffers())
    x = torch.randn(3, WIDTH)
    assert bits(model(x)) == bits(plain(x))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with small_records():
        swapper.offload(model, optimizer, config_for(nvme_path))
    assert values_of(model) == values_of(plain)
    model.swapper.close()  # type: ignore[operator, union-attr]
    optimizer.swapper.close()  # type: ignore[attr-defined]


def test_materialize_names_the_module_that_nothing_initialises(nvme_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(Own()))
    with pytest.raises(swapper.ConfigError, match=r"initialiser: 1\.0 \(Own\) has scale on the meta device"):
        swapper.materialize(model, config_for(nvme_path))
    assert all(p.is_meta for p in model.parameters())
    assert not list(nvme_path.iterdir())


def test_materialize_leaves_what_has_values(nvme_path: Path) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), on_meta(lambda: nn.Linear(WIDTH, WIDTH)))
    first = model[0].weight
    before = bits(first)
    with small_records():
        swapper.materialize(model, config_for(nvme_path))
    assert model[0].weight is first
    assert bits(first) == before
    assert home_of(model[1].weight) is not None


def test_an_initialiser_that_fails(nvme_path: Path, leaves_nothing: None) -> None:
    def fail(module: nn.Module) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        swapper.materialize(on_meta(Mlp), config_for(nvme_path), fail)
    assert no_hooks_are_left()
