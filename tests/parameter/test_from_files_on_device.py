"""A model on an accelerator whose weights stay in files has the bits of the one that is all on it."""

from __future__ import annotations

import errno
import functools
import gc
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupts import interrupted_at
from models import CASES, Case, Mlp
from quantised import make_quantised
from sampling import places
from torch import nn
from torch.utils._pytree import tree_map_only
from twins import bits, config_for, small_records, swapper_of, values_of
from weight_files import hollow, state_to_save, write_shards, write_weights

import swapper
from swapper.io.handle import AsyncIOHandle, FaultPlan
from swapper.parameter import from_files
from swapper.tensors.inner import inner_tensors

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(autouse=True)
def _all_move(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Models of tests are small: so are the records, and what stays."""
    monkeypatch.setattr(from_files, "_SMALL_BYTES", 300)
    with small_records():
        yield


@pytest.fixture
def device(device: str) -> torch.device:
    """The first device of the type: see `accelerators`."""
    return torch.device(device, 0)


def another(case: Case, seed: int = 99) -> nn.Module:
    torch.manual_seed(seed)
    model = case.make()
    with torch.no_grad():
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.uniform_()
    return model.eval()


def run(model: nn.Module, case: Case, device: torch.device, rounds: int = 3) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    torch.manual_seed(5)
    with torch.no_grad():
        inputs = [case.inputs(generator) for _ in range(rounds)]
        moved = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), inputs)
    with torch.no_grad(), device:  # Some make tensors in their forward.
        return [bits(model(*each)) for each in moved]


def offloaded(nvme_path: Path, path: Path, case: Case, device: torch.device, how: str, **settings: Any) -> nn.Module:
    """The model with its weights in files, when it was in memory of the device, of the host, or had no memory."""
    torch.manual_seed(0)
    model = case.make().eval()
    model = hollow(model) if how == "meta" else model.to(device) if how == "device" else model
    there = None if how == "device" else device
    return swapper.offload(model, config=config_for(nvme_path, **settings), weights=path, device=there)[0]


def fill_buffers(model: nn.Module, reference: nn.Module) -> None:
    """Those that are not persistent are in no file."""
    with torch.no_grad():
        for buffer, expected in zip(model.buffers(), reference.buffers(), strict=True):
            buffer.copy_(expected)


def least_of(field: str, offload: Any) -> int:
    """The least of a setting that will do, as the error of less says."""
    with pytest.raises(swapper.ConfigError) as error:
        offload()
    found = re.search(rf"set {field} to at least (\d+)", str(error.value))
    assert found is not None, error.value
    return int(found[1])


@pytest.mark.sampled(16)
@pytest.mark.parametrize("room", ["least", "default", "all"])
@pytest.mark.parametrize("how", ["device", "host", "meta"])
@pytest.mark.parametrize("name", CASES)
def test_every_structure_has_the_bits_of_the_model_on_the_device(
    name: str, how: str, room: str, nvme_path: Path, tmp_path: Path, device: torch.device
) -> None:
    case = CASES[name]
    reference = another(case)
    path = write_weights(tmp_path / "weights.safetensors", reference.state_dict(), 24)
    reference.to(device)
    changes = name == "bags"  # Those with `max_norm` change their weights in forward.
    param: dict[str, Any] = {"device": "nvme", "copy_on_write": changes}
    if room == "least":
        ask = lambda: offloaded(nvme_path, path, case, device, how, offload_param={**param, "device_bytes": 1})  # noqa: E731
        param["device_bytes"] = least_of("it", ask)
    elif room == "all":
        param["device_bytes"] = "64MiB"
    model = offloaded(nvme_path, path, case, device, how, offload_param=param)
    assert {each.device for each in (*model.parameters(), *model.buffers())} == {device}
    fill_buffers(model, reference)
    assert run(model, case, device) == run(reference, case, device)
    if name != "strided" or how == "device":  # One with holes stays, and keeps them.
        assert values_of(model) == values_of(reference)
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in reference.parameters()]
    assert changes or swapper_of(model).stats().bytes_written == 0
    swapper_of(model).close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["llama", "gpt2 tied", "mixtral", "llama bf16", "lora"])
def test_gradients_have_the_bits_of_the_model_on_the_device(
    name: str, nvme_path: Path, tmp_path: Path, device: torch.device
) -> None:
    case = CASES[name]
    reference = another(case)
    path = write_weights(tmp_path / "weights.safetensors", reference.state_dict(), 24)
    model = offloaded(nvme_path, path, case, device, "meta")
    fill_buffers(model, reference)
    found = []
    for each in (model, reference.to(device)):
        generator = torch.Generator().manual_seed(3)
        inputs = [case.inputs(generator) for _ in range(2)]
        for moved in tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), inputs):
            with device:
                each(*moved).float().square().mean().backward()
        found.append([bits(p.grad) for p in each.parameters()])
    assert found[0] == found[1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(12))
def test_any_shards_pools_and_rooms(seed: int, nvme_path: Path, tmp_path: Path, device: torch.device) -> None:
    """Two models in one pool, what is resident in either memory, copies ahead or none; used by turns."""
    chance = random.Random(seed)
    cases = [CASES[chance.choice(["llama", "gpt2 tied", "odd shapes", "llama bf16", "vit"])] for _ in range(2)]
    config = config_for(
        nvme_path,
        pool_bytes=chance.choice([256, 400, 2048]) << 10,
        offload_param={
            "device": "nvme",
            "device_bytes": chance.choice([None, "1MiB"]),
            "resident_bytes": chance.choice([0, 30_000]),
            "device_resident_bytes": chance.choice([0, 30_000]),
        },
    )
    both = []
    for i, case in enumerate(cases):
        reference = another(case, i)
        residues = [chance.randrange(64) for _ in range(chance.randint(1, 3))]
        index = write_shards(tmp_path / f"model{i}", state_to_save(reference), chance, residues)
        model = hollow(case.make()).eval()
        swapper.offload(model, config=config, weights=index, device=device)
        fill_buffers(model, reference)
        both.append((case, model, reference.to(device)))
    for _ in range(4):
        case, model, reference = chance.choice(both)
        rounds = chance.randint(1, 2)
        assert run(model, case, device, rounds) == run(reference, case, device, rounds)
    for _, model, reference in both:
        assert values_of(model) == values_of(reference)
        assert swapper_of(model).stats().bytes_written == 0
        swapper_of(model).close()


# --- Which device -----------------------------------------------------------------------------------------------------


def test_the_device_is_the_one_that_is_named_or_where_the_model_is_or_the_default(
    nvme_path: Path, tmp_path: Path, device: torch.device
) -> None:
    state = another(CASES["mlp"]).state_dict()
    path = write_weights(tmp_path / "weights.safetensors", state)

    def where(model: nn.Module, given: Any = None) -> set[str]:
        swapper.offload(model, config=config_for(nvme_path), weights=path, device=given)
        swapper_of(model).close(keep_values=True)
        assert bits(dict(model.state_dict())) == bits({name: each.to(device) for name, each in state.items()})
        return {str(p.device) for p in model.parameters()}

    for given in (device, str(device), device.type, 0):
        assert where(hollow(Mlp()), given) == {str(device)}
    assert where(Mlp(), device) == where(Mlp().to(device)) == {str(device)}
    with device:
        assert where(hollow(Mlp())) == {str(device)}
    with torch.device("meta"):
        hidden = Mlp()
        assert where(hidden) == {"cpu"}
    assert where(Mlp().to(device), "cpu") == {"cpu"} == where(hollow(Mlp()))
    mixed = hollow(Mlp())
    mixed.register_buffer("here", torch.ones(3, device=device), persistent=False)
    swapper.offload(mixed, config=config_for(nvme_path), weights=path)
    assert {str(p.device) for p in mixed.parameters()} == {str(device)}


def test_devices_that_cannot_work_are_refused_by_name(nvme_path: Path, tmp_path: Path, device: torch.device) -> None:
    path = write_weights(tmp_path / "weights.safetensors", another(CASES["mlp"]).state_dict())
    config = config_for(nvme_path)

    def refused(model: nn.Module, given: Any, text: str, config: swapper.OffloadConfig = config) -> None:
        with pytest.raises(swapper.ConfigError, match=text):
            swapper.offload(model, config=config, weights=path, device=given)

    refused(hollow(Mlp()), "meta", "device: meta is neither the CPU nor an accelerator")
    for given in ("hpu", 1.5, "nothing"):  # The first has a module that torch does not always have.
        refused(hollow(Mlp()), given, f"device: {given} cannot be used")
    with pytest.raises(swapper.ConfigError, match="device: a model without weights=PATH stays where it is"):
        swapper.offload(Mlp(), config=config, device=device)
    refused(Mlp().to(device), None, r"aio\.gds: on asks", config_for(nvme_path, aio={"gds": "on"}))
    if torch.accelerator.device_count() > 1:
        several = Mlp().to(device)
        several.register_buffer("there", torch.ones(3, device=torch.device(device.type, 1)))
        refused(several, None, "weights: the model is on several devices")
    wrapped = make_quantised("coded", 1)
    refused(wrapped, device, r"0\.base\.weight is a CodedTensor on cpu")


@pytest.mark.parametrize("kind", ["coded", "int8"])
def test_quantised_weights(kind: str, nvme_path: Path, tmp_path: Path, device: torch.device) -> None:
    torch.manual_seed(1)
    reference = make_quantised(kind, 6)
    state: dict[str, torch.Tensor] = {}
    for name, value in reference.state_dict().items():
        state.update((inner.name, inner.tensor) for inner in inner_tensors(name, value))
    path = write_weights(tmp_path / "weights.safetensors", state, 7)
    reference.to(device)
    model = make_quantised(kind, 6).to(device)
    swapper.offload(model, config=config_for(nvme_path), weights=path)
    x = torch.randn(3, reference[0].down.in_features).to(device)
    with torch.no_grad():
        assert all(bits(model(x)) == bits(reference(x)) for _ in range(2))
    assert swapper_of(model).metrics.reads and not swapper_of(model).metrics.bytes_written
    swapper_of(model).close(keep_values=True)
    assert bits(dict(model.state_dict())) == bits(dict(reference.state_dict()))


@pytest.mark.parametrize("name", ["Params4bit", "Int8Params"])
def test_what_would_be_quantised_by_its_move_is_refused_by_name(
    name: str, nvme_path: Path, tmp_path: Path, device: torch.device
) -> None:
    known = {"quant_state": None} if name == "Params4bit" else {"CB": None, "SCB": None, "has_fp16_weights": False}
    of_bitsandbytes = type(name, (nn.Parameter,), {"__module__": "bitsandbytes.nn.modules"})
    model = Mlp()
    path = write_weights(tmp_path / "weights.safetensors", model.state_dict())
    weight = model.blocks[1][0].weight
    assert isinstance(weight, nn.Parameter)
    model.blocks[1][0].weight = of_bitsandbytes(weight.detach(), requires_grad=False)
    vars(model.blocks[1][0].weight).update(known)
    with pytest.raises(swapper.ConfigError, match=rf"blocks\.1\.0\.weight is a {name}, which bitsandbytes quantises"):
        swapper.offload(model, config=config_for(nvme_path), weights=path, device=device)
    assert not hasattr(model, "swapper") and list(nvme_path.iterdir()) == []


class _Marked(nn.Parameter):
    pass


class _Knowing(nn.Module):
    """Knows its tensors by a list, too."""

    mean: torch.Tensor
    sparse: torch.Tensor

    def __init__(self, *, uses_weight: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.randn(()))
        self.marked = _Marked(torch.randn(8))
        self.register_buffer("mean", torch.randn(()))
        self.register_buffer("sparse", torch.eye(2).to_sparse_csr(), persistent=False)
        self.known = [self.linear.weight, self.scale, self.mean]
        self.uses_weight = uses_weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.known[0].to(x.device) if self.uses_weight else self.linear.weight
        return x @ weight * self.known[1] + self.known[2]


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("uses_weight", [False, True])
def test_a_tensor_that_the_module_knows_by_other_ways_has_no_former_values(
    uses_weight: bool, nvme_path: Path, tmp_path: Path, device: torch.device
) -> None:
    reference = _Knowing(uses_weight=uses_weight)
    path = write_weights(tmp_path / "weights.safetensors", reference.state_dict())
    model = swapper.offload(
        _Knowing(uses_weight=uses_weight), config=config_for(nvme_path), weights=path, device=device
    )[0]
    assert type(model.marked) is _Marked and model.marked.device == device == model.sparse.device
    x = torch.ones(2, WIDTH)
    with torch.no_grad():
        if uses_weight:
            with pytest.raises(swapper.SwapError, match=r"linear\.weight was on another device"):
                model(x.to(device))
        else:
            there = (x.to(device) @ reference.linear.weight.to(device)) * reference.scale + reference.mean
            assert bits(model(x.to(device))) == bits(there)
    swapper_of(model).close(keep_values=True)
    assert values_of(model.linear) == values_of(reference.linear.to(device))


# --- Memory -----------------------------------------------------------------------------------------------------------

WIDTH = 128
RECORD_BYTES = 4 * WIDTH * WIDTH


def stack(layers: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def allocated(device: torch.device) -> int:
    gc.collect()
    torch.accelerator.synchronize()
    return torch.accelerator.memory_allocated(device)


@pytest.mark.parametrize("device_bytes", [None, "1MiB"], ids=["default", "more"])
def test_memory_is_what_check_says_for_any_number_of_layers(
    device_bytes: str | None, nvme_path: Path, tmp_path: Path, device: torch.device
) -> None:
    taken, said = [], []
    param = {"device": "nvme", "device_bytes": device_bytes}
    config = config_for(nvme_path, offload_param=param, pool_bytes="384KiB", bucket_bytes="80KiB")
    for layers in (5, 40):
        path = write_weights(tmp_path / "weights.safetensors", stack(layers).state_dict(), 40)
        report = swapper.check(hollow(stack(layers)), config=config, weights=path, device=device)
        assert "device memory that they come to" in str(report)
        before = allocated(device)
        x = torch.ones(1, WIDTH).to(device)
        model = swapper.offload(hollow(stack(layers)), config=config, weights=path, device=device)[0]
        torch.accelerator.reset_peak_memory_stats(device)
        with torch.no_grad():
            for _ in range(3):
                model(x)
        torch.accelerator.synchronize()
        peak = torch.accelerator.max_memory_allocated(device) - before
        assert peak <= report.device_bytes + 8192, (layers, report)
        taken.append(peak)
        said.append(report.device_bytes)
        swapper_of(model).close()
        del model, x
        assert allocated(device) <= before + 1024  # The value that evicted parameters share is kept.
    assert device_bytes is not None or taken[1] <= taken[0] + 35 * 2048


@pytest.mark.parametrize("records", [3, 4, 6, 9])
def test_a_round_reads_what_the_pool_does_not_hold_and_two_records(
    records: int, nvme_path: Path, tmp_path: Path, device: torch.device
) -> None:
    layers = 12
    path = write_weights(tmp_path / "weights.safetensors", stack(layers).state_dict(), 40)
    record_bytes = RECORD_BYTES + 2 * 4096  # its pages, and one for the shift
    config = config_for(nvme_path, pool_bytes=records * record_bytes, offload_optimizer={"device": "none"})
    model = swapper.offload(hollow(stack(layers)), config=config, weights=path, device=device)[0]
    owner = swapper_of(model)
    assert {held.length_bytes for held in owner._all} == {record_bytes}
    read = []
    with torch.no_grad():
        for _ in range(6):
            before = owner.metrics.bytes_read
            model(torch.ones(1, WIDTH).to(device))
            read.append(owner.metrics.bytes_read - before)
    # On average: what comes ahead, and in which round, is a matter of when copies up are over.
    assert sum(read[1:]) <= (len(read[1:]) * (layers - records + 2) + 1) * record_bytes
    swapper_of(model).close()


def test_what_stays_on_the_device_takes_no_room_in_the_pool(
    nvme_path: Path, tmp_path: Path, device: torch.device
) -> None:
    path = write_weights(tmp_path / "weights.safetensors", stack(12).state_dict(), 40)
    param = {"device": "nvme", "device_resident_bytes": 6 * RECORD_BYTES}
    config = config_for(nvme_path, pool_bytes=6 * (RECORD_BYTES + 2 * 4096), offload_param=param)
    model = swapper.offload(hollow(stack(12)), config=config, weights=path, device=device)[0]
    with torch.no_grad():
        for _ in range(6):
            before = swapper_of(model).metrics.bytes_read
            model(torch.ones(1, WIDTH).to(device))
    assert swapper_of(model).metrics.bytes_read == before
    swapper_of(model).close()


# --- What fails -------------------------------------------------------------------------------------------------------


def test_a_device_without_memory_leaves_the_model_as_it_was(
    nvme_path: Path, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(from_files, "_SMALL_BYTES", 64 << 10)
    path = write_weights(tmp_path / "weights.safetensors", nn.Linear(WIDTH, WIDTH).state_dict())
    plain = torch.Tensor.to

    def full(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args == (device,):
            raise torch.OutOfMemoryError("no memory")
        return plain(tensor, *args, **kwargs)

    model = hollow(nn.Linear(WIDTH, WIDTH))
    before = dict(model.named_parameters())
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(torch.Tensor, "to", full)
        swapper.offload(model, config=config_for(nvme_path), weights=path, device=device)
    assert dict(model.named_parameters()) == before and not hasattr(model, "swapper")
    assert list(nvme_path.iterdir()) == []


def test_a_device_that_runs_full_is_raised_and_works_again(
    nvme_path: Path, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_weights(tmp_path / "weights.safetensors", stack(6).state_dict())
    config = config_for(nvme_path, pool_bytes="384KiB")
    model = swapper.offload(hollow(stack(6)), config=config, weights=path, device=device)[0]
    x = torch.ones(2, WIDTH).to(device)
    with torch.no_grad():
        expected = bits(model(x))
        empty, count = torch.empty, 0

        def full(*args: Any, **kwargs: Any) -> torch.Tensor:
            nonlocal count
            if kwargs.get("device") == device and args and args[0] == WIDTH * WIDTH:
                count += 1
                if count % 2:
                    raise torch.OutOfMemoryError("no memory")
            return empty(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", full)
            failed = 0
            for _ in range(8):
                try:
                    assert bits(model(x)) == expected
                except torch.OutOfMemoryError:
                    failed += 1
            assert failed
        assert bits(model(x)) == expected
    swapper_of(model).close()


@pytest.mark.parametrize("at", [1, 4])
def test_a_read_that_fails_is_raised_and_read_again(
    at: int, nvme_path: Path, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES["gpt2 tied"]
    reference = another(case)
    path = write_weights(tmp_path / "weights.safetensors", reference.state_dict())
    plan = FaultPlan()
    monkeypatch.setattr("swapper.session.AsyncIOHandle", functools.partial(AsyncIOHandle, faults=plan))
    model = offloaded(nvme_path, path, case, device, "meta", pool_bytes="128KiB")
    fill_buffers(model, reference)
    expected = run(reference.to(device), case, device, 1)
    plan.fail_read_at = plan.reads + at
    failed = 0
    for _ in range(3):
        try:
            assert run(model, case, device, 1) == expected
        except swapper.SwapIOError as error:
            failed += 1
            assert (error.errno, error.path) == (errno.EIO, str(path))
    assert plan.reads >= plan.fail_read_at
    assert failed in ([1] if at == 1 else [0, 1])  # One that is not needed yet is read again when it is.


@pytest.mark.long
@pytest.mark.parametrize("how", ["device", "host", "meta"])
def test_ctrl_c_anywhere_leaves_all_as_it_was_or_done(
    how: str, nvme_path: Path, tmp_path: Path, device: torch.device
) -> None:
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = Mlp(2)
        model.register_buffer("table", torch.arange(4.0) + seed)
        model.register_buffer("kept", torch.arange(4.0), persistent=False)
        return model

    reference = make(99)
    path = write_weights(tmp_path / "weights.safetensors", reference.state_dict(), 24)
    config = config_for(nvme_path)
    model = nn.Module()

    def go() -> None:
        swapper.offload(model, config=config, weights=path, device=device)

    files = ("api/from_files.py", "parameter/from_files.py", "parameter/swapper.py")
    for n in places(3, sample=40):
        model = make(5)
        model = hollow(model) if how == "meta" else model.to(device) if how == "device" else model
        before = [*model.parameters(), *model.buffers()]
        was_cut_off = interrupted_at(n, go, *files)
        if "swapper" in vars(model):
            assert {each.device for each in (*model.parameters(), *model.buffers())} == {device}, n
            assert values_of(model) == values_of(reference.to(device)), n
        else:
            now = [*model.parameters(), *model.buffers()]
            assert all(a is b and type(a) is type(b) for a, b in zip(before, now, strict=True)), n
            assert how == "meta" or values_of(model.cpu()) == values_of(make(5)), n
        del before
        model = nn.Module()
        gc.collect()
        assert not list(nvme_path.iterdir()), n
        if not was_cut_off:
            break


# --- Parameters that change -------------------------------------------------------------------------------------------


def test_a_parameter_that_is_changed_is_named(nvme_path: Path, tmp_path: Path, device: torch.device) -> None:
    case = CASES["mlp"]
    reference = another(case)
    path = write_weights(tmp_path / "weights.safetensors", reference.state_dict())
    reference.to(device)
    changed = r"values of blocks\.2\.0\.weight were changed.*copy_on_write"
    model = offloaded(nvme_path, path, case, device, "meta", pool_bytes="64KiB")
    assert run(model, case, device) == run(reference, case, device)
    with torch.no_grad(), pytest.raises(swapper.SwapError, match=changed):
        model.get_parameter("blocks.2.0.weight").mul_(2)  # At once.
    with torch.no_grad(), swapper.gathered(model.get_parameter("blocks.2.0.weight")):
        model.get_parameter("blocks.2.0.weight").mul_(0.5).mul_(4).mul_(0.25)  # Undone.
    assert run(model, case, device) == run(reference, case, device)
    weight = model.get_parameter("blocks.2.0.weight")
    with swapper.gathered(weight):
        weight.data[3, 1].neg_()  # Behind autograd's back.
    for _ in range(2):
        with pytest.raises(swapper.SwapError, match=changed):
            swapper_of(model).flush()
    with pytest.raises(swapper.SwapError, match=changed):
        for _ in range(3):  # Before it leaves the device.
            run(model, case, device)
    with swapper.gathered(weight):
        weight.data[3, 1].neg_()
    swapper_of(model).flush()
    assert run(model, case, device) == run(reference, case, device)
    with swapper.gathered(weight):
        swapper_of(model).flush()  # It is in use, and what is changed after this is seen, too.
        weight.data[0, 0].neg_()
    with pytest.raises(swapper.SwapError, match=changed):
        swapper_of(model).flush()
    swapper_of(model).close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["mlp", "gpt2 tied", "resnet channels_last"])
def test_what_changes_is_written_to_the_run_directory_if_that_is_wanted(
    name: str, nvme_path: Path, tmp_path: Path, device: torch.device
) -> None:
    case = CASES[name]
    reference = another(case)
    path = write_weights(tmp_path / "weights.safetensors", reference.state_dict(), 40)
    before = path.read_bytes()
    param = {"device": "nvme", "copy_on_write": True}
    model = offloaded(nvme_path, path, case, device, "meta", pool_bytes="256KiB", offload_param=param)
    fill_buffers(model, reference)
    reference.to(device)
    assert run(model, case, device) == run(reference, case, device)
    assert swapper_of(model).stats().bytes_written == 0
    for factor in (1.25, 2):
        for each in (model, reference):
            with torch.no_grad():
                next(p for p in each.parameters() if p.ndim > 1).mul_(factor)
        assert run(model, case, device) == run(reference, case, device)
    swapper_of(model).flush()
    assert swapper_of(model).stats().bytes_written > 0 and path.read_bytes() == before
    assert values_of(model) == values_of(reference)
    swapper_of(model).close()
