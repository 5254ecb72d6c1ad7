"""`copy.deepcopy` of a module of a swapped model gives an ordinary one, in memory, as libraries of adapters need it."""

from __future__ import annotations

import contextlib
import copy
import errno
import io
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupts import interrupted_at, places_of
from models import CASES, WIDTH, Case, Mlp
from sampling import EVERY
from torch import nn
from torch.optim import Optimizer
from twins import adamw, bits, close, config_for, offloaded, small_records, swapper_of
from weight_files import hollow, state_to_save, write_weights

import swapper
from swapper.storage.mounts import NvmePathError
from swapper.tensors.evicted import is_evicted

SPARE_BYTES = 1 << 20
"""Of pool: what is copied is stepped too."""


def copied_and_trained(model: nn.Module, optimizer: Optimizer, case: Case, seed: int) -> list[Any]:
    """Train, and between the steps put copies of drawn modules in their places, and train those too."""
    drawn, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    seen: list[Any] = []
    for _ in range(3):
        out = model(*case.inputs(generator)).to(torch.float64)
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(bits(out))
        name = drawn.choice([name for name, module in model.named_modules() if name and [*module.parameters()]])
        twin = copy.deepcopy(model.get_submodule(name))
        assert not any(map(is_evicted, [*twin.parameters(), *twin.buffers()]))
        assert {type(p) for p in twin.parameters()} == {nn.Parameter}
        seen.append([name, bits(dict(twin.state_dict()))])
        model.set_submodule(name, twin)
        optimizer.add_param_group({"params": list(twin.parameters())})
        model.train(drawn.random() < 0.8)
    seen.append(bits(dict(model.state_dict())))
    return seen


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4 if EVERY else 1))
@pytest.mark.parametrize("name", CASES)
def test_copies_in_the_places_of_modules_train_as_in_plain_torch(name: str, seed: int, nvme_path: Path) -> None:
    case = CASES[name]

    def make() -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        model = case.make()
        return model, adamw(model)

    want = copied_and_trained(*make(), case, seed)
    model, optimizer = offloaded(nvme_path, make, spare_bytes=case.spare_bytes + SPARE_BYTES)
    try:
        assert copied_and_trained(model, optimizer, case, seed) == want
    finally:
        close(model, optimizer)


def test_copies_outlive_the_model(nvme_path: Path) -> None:
    torch.manual_seed(0)
    model = Mlp()
    want = bits(dict(model.state_dict()))
    with small_records():
        swapper.offload(model, config=config_for(nvme_path))
    model.blocks[0].note = "kept"
    twins = copy.deepcopy(model.blocks)
    swapper_of(model).close(keep_values=False)
    del model
    assert {f"blocks.{key}": value for key, value in bits(dict(twins.state_dict())).items()}.items() <= want.items()
    assert twins[0].note == "kept"
    assert next(iter(twins[0].parameters())).requires_grad


def test_a_copied_parameter_is_one_for_all_that_had_it(nvme_path: Path) -> None:
    model = Mlp()
    with small_records():
        swapper.offload(model, config=config_for(nvme_path))
    first = model.blocks[0][0]  # type: ignore[index]
    twins = copy.deepcopy([first.weight, first, first.weight])
    assert twins[0] is twins[1].weight is twins[2] and type(twins[0]) is nn.Parameter
    assert bits(twins[0]) == bits(first.weight) and twins[0].grad is None
    with torch.no_grad():
        twins[0].zero_()
    assert first.weight.abs().sum() > 0
    swapper_of(model).close()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("name", ["mlp", "torch encoder", "lstm"])
def test_a_copy_is_an_ordinary_module_for_all_that_is_done_with_modules(
    name: str, called: bool, nvme_path: Path
) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make().eval()
    child = next(key for key, module in model.named_children() if [*module.parameters()])
    inputs = torch.randn(3, 5, WIDTH)
    with torch.no_grad():
        want = bits(model.get_submodule(child)(inputs)) if name != "mlp" else bits(model.blocks[0](inputs))
        with small_records():
            swapper.offload(model, config=config_for(nvme_path))
        twin = copy.deepcopy(model.get_submodule(child) if name != "mlp" else model.blocks[0])
        if called:
            assert bits(twin(inputs)) == want
        file = io.BytesIO()
        torch.save(twin, file)
        file.seek(0)
        made = {
            "loaded": torch.load(file, weights_only=False),
            "pickled": pickle.loads(pickle.dumps(twin)),
            "copied": copy.deepcopy(copy.copy(twin)),
            "scripted": torch.jit.script(copy.deepcopy(twin)) if name == "mlp" else twin,
            "itself": twin,
        }
        for way, module in made.items():
            assert bits(module(inputs)) == want, way
            for each in module.modules() if way != "scripted" else ():
                assert not each._forward_hooks and not each._forward_pre_hooks, way
                assert not each._forward_hooks_always_called and "__prepare_scriptable__" not in vars(each), way
        if name != "lstm":  # Which torch does not compile.
            torch.compile(twin, backend="eager", fullgraph=True)(inputs)
        assert bits(model.get_submodule(child)(inputs) if name != "mlp" else model.blocks[0](inputs)) == want
    swapper_of(model).close()


def whole_copies(model: nn.Module, optimizer: Optimizer, case: Case, seed: int) -> list[Any]:
    """Train a model, copies of it, and copies of those, in a drawn order."""
    drawn, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    trained, seen = [(model, optimizer)], []
    for _ in range(6):
        one, its = drawn.choice(trained)
        out = one(*case.inputs(generator)).to(torch.float64)
        out.square().mean().backward()
        its.step()
        its.zero_grad()
        seen.append(bits(out))
        if drawn.random() < 0.5:
            within = swapper.gathered(one.parameters()) if drawn.random() < 0.3 else contextlib.nullcontext()
            with within:
                twin = copy.deepcopy([one, nn.Sequential(one)][drawn.random() < 0.5])
            twin = twin[0] if isinstance(twin, nn.Sequential) and not isinstance(one, nn.Sequential) else twin
            assert not any(map(is_evicted, [*twin.parameters(), *twin.buffers()]))
            trained.append((twin, adamw(twin)))
    return [*seen, *(bits(dict(one.state_dict())) for one, _ in trained)]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4 if EVERY else 1))
@pytest.mark.parametrize("name", CASES)
def test_copies_of_the_whole_model_train_as_in_plain_torch(name: str, seed: int, nvme_path: Path) -> None:
    case = CASES[name]

    def make() -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        model = case.make()
        return model, adamw(model)

    try:
        want = whole_copies(*make(), case, seed)
    except RuntimeError as error:  # Of `weight_norm`, whose weights are no leaves.
        assert "deepcopy" in str(error)
        pytest.skip("torch does not copy it")
    model, optimizer = offloaded(nvme_path, make, spare_bytes=case.spare_bytes + (8 << 20))
    try:
        assert whole_copies(model, optimizer, case, seed) == want
    finally:
        close(model, optimizer)


def is_in_file(tensor: torch.Tensor, directory: Path) -> bool:
    """Whether the values are those of a file without a name in `directory`."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(each, 16) for each in line.split()[0].split("-"))
        if start <= tensor.data_ptr() < stop:
            return str(directory) in line and "(deleted)" in line
    return False


class Renaming(nn.Module):
    """It has an attribute of the name that swapper uses, and buffers of some length."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.swapper: Any = None
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.randint(0, 9, (WIDTH, 4096)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.linear(x) + self.table[:, 0] if self.swapper is None else self.swapper(x)
        return found


class CopiesItself(nn.Sequential):
    """Its class has a way of its own."""

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiesItself:
        return CopiesItself(*(copy.deepcopy(each, memo) for each in self))


@pytest.mark.parametrize("kind", [nn.Sequential, CopiesItself])
@pytest.mark.parametrize("shallow", [False, True], ids=["", "of a shallow copy"])
def test_copies_keep_what_is_the_users(kind: type[nn.Sequential], shallow: bool, nvme_path: Path) -> None:
    torch.manual_seed(0)
    model = kind(Renaming(), Renaming())
    want, x = bits(model(torch.ones(2, WIDTH))), torch.ones(2, WIDTH)
    swapper.offload(model, config=config_for(nvme_path, pool_bytes="8MiB"))
    original = model
    if shallow:
        model = copy.copy(model)
        model.note = "of the shallow one"  # type: ignore[assignment]
    twin = copy.deepcopy(model)
    assert type(twin) is kind and "swapper" not in vars(twin) and not any(map(is_evicted, twin.buffers()))
    assert vars(twin[0])["swapper"] is None and bits(twin(x)) == want == bits(original(x))
    assert kind is CopiesItself or not shallow or twin.note == "of the shallow one"
    assert all(is_in_file(each.table, nvme_path) for each in twin)
    swapper_of(original).close()


def test_experts_that_come_one_by_one_are_copied(nvme_path: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, num_local_experts=4, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.MixtralForCausalLM(config).eval().save_pretrained(tmp_path)
    tokens = torch.arange(12).reshape(2, 6)
    model = swapper.from_pretrained(tmp_path, swapper.OffloadConfig(nvme_path=nvme_path, pool_bytes="32MiB"))
    with torch.no_grad():
        want = bits(model(input_ids=tokens).logits)
        twin = copy.deepcopy(model)
        swapper_of(model).close()
        assert bits(twin(input_ids=tokens).logits) == want
    for each in twin.modules():
        assert not each._forward_pre_hooks and not each._forward_pre_hooks_with_kwargs and not each._forward_hooks


def test_a_copy_of_the_whole_model_takes_the_drive_and_not_memory(nvme_path: Path) -> None:
    """It has files of its own, without names, which outlive the model."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    want = bits(model.state_dict())
    swapper.offload(model, config=config_for(nvme_path))
    twin = copy.deepcopy(model)
    swapper_of(model).close(keep_values=False)
    del model
    assert bits(twin.state_dict()) == want and "swapper" not in vars(twin)
    for each in twin:
        assert is_in_file(each.weight, nvme_path)
        assert not is_in_file(each.bias, nvme_path), "small ones are in memory"
    assert b"swapper" not in pickle.dumps(twin), "who loads it needs no swapper"
    swapper.offload(twin, config=config_for(nvme_path))  # To a place of its own.
    assert bits(twin.state_dict()) == want
    swapper_of(twin).close()


def test_a_copy_that_the_drive_has_no_room_for_is_an_error(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    want = bits(model.state_dict())
    swapper.offload(model, config=config_for(nvme_path))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched, pytest.raises(NvmePathError, match="No space left"):
        patched.setattr(os, "posix_fallocate", full)
        copy.deepcopy(model)
    assert bits(copy.deepcopy(model).state_dict()) == want == bits(model.state_dict())
    swapper_of(model).close()


def test_a_copy_that_ctrl_c_cuts_off_takes_nothing_from_the_model(nvme_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH)))
    want = bits(model.state_dict())
    with small_records():
        swapper.offload(model, config=config_for(nvme_path))
    parameters, before = swapper_of(model), [set(vars(each)) for each in model.modules()]
    struck = 0
    for place in places_of(lambda: copy.deepcopy(model), "parameter/forward_hooks.py"):
        struck += interrupted_at(place, lambda: copy.deepcopy(model), "parameter/forward_hooks.py")
        assert [set(vars(each)) for each in model.modules()] == before and swapper_of(model) is parameters
    assert struck > 5 and bits(copy.deepcopy(model).state_dict()) == want
    swapper_of(model).close()


def test_a_copy_of_a_model_in_files_needs_a_place_for_it(nvme_path: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    want = bits(plain.state_dict())
    path = write_weights(tmp_path / "weights.safetensors", state_to_save(plain))
    model, _ = swapper.offload(hollow(plain), config=swapper.OffloadConfig(pool_bytes="2MiB"), weights=path)
    with pytest.raises(swapper.ConfigError, match="a copy of the model"):
        copy.deepcopy(model)
    with swapper.gathered(model.parameters()):
        assert bits(copy.deepcopy(model).state_dict()) == want
    model.swapper.close(keep_values=False)
    config = swapper.OffloadConfig(pool_bytes="2MiB", nvme_path=nvme_path)
    model, _ = swapper.offload(hollow(plain), config=config, weights=path)
    assert bits(copy.deepcopy(model).state_dict()) == want
    model.swapper.close(keep_values=False)


def test_a_copy_is_on_the_device_that_the_module_is_on(device: str, nvme_path: Path) -> None:
    on = torch.device(device, 0)
    torch.manual_seed(0)
    model = Mlp().to(on)
    want = {key: value.cpu() for key, value in model.state_dict().items()}
    with small_records():
        swapper.offload(model, config=config_for(nvme_path))
    twins = copy.deepcopy(model.blocks)
    assert {p.device for p in twins.parameters()} == {on}
    for key, value in twins.state_dict().items():
        assert bits(value.cpu()) == bits(want[f"blocks.{key}"])
    inputs = torch.randn(3, WIDTH).to(on)
    assert bits(twins[0](inputs).cpu()) == bits(model.blocks[0](inputs).cpu())  # type: ignore[index]
    swapper_of(model).close()


def test_a_parameter_that_was_made_of_a_swapped_one_is_an_ordinary_one_where_it_is_copied_or_swapped(
    nvme_path: Path,
) -> None:
    """`weight_norm` and others make them by `torch.nn.Parameter(p)`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    config = swapper.OffloadConfig(nvme_path=nvme_path, pool_bytes="4MiB", offload_param={"device": "nvme"})
    swapper.offload(model, config=config)
    nn.utils.parametrizations.weight_norm(model[0])
    x = torch.randn(4, 128)
    twin = copy.deepcopy(model)
    assert {type(p) for p in twin.parameters()} == {nn.Parameter}
    assert torch.equal(twin(x), model(x))

    swapper_of(model).close(keep_values=True)
    assert bits(pickle.loads(pickle.dumps([*model.parameters()]))) == bits([*model.parameters()])
    swapper.offload(model, config=config)
    assert not swapper_of(model).stays
    assert torch.equal(twin(x), model(x))
    swapper_of(model).close()
