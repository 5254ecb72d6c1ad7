"""`swapper checkpoint`: what is in checkpoints, and ordinary files made of them and into them, to the bit."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Odd, Training, Words, make_model, options_of
from command import as_json
from command import swapper as command
from launcher import run_program
from repository import BENCHMARKS
from safetensors.torch import load_file, load_model
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from training import MORE, OPTIMIZERS
from twins import bits

import swapper
from swapper.checkpoint import export, state_reader, streams
from swapper.checkpoint.export import export_checkpoint
from swapper.checkpoint.plain_import import import_checkpoint
from swapper.checkpoint.reader import Checkpoint
from swapper.checkpoint.streams import TensorStream
from swapper.errors import ConfigError, SwapError
from swapper.files.tensor_files import read_header

ALL_OPTIMIZERS = {**OPTIMIZERS, **MORE}


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that the tensors of a test have many."""
    monkeypatch.setattr(streams, "PIECE_BYTES", 4096)
    monkeypatch.setattr(streams, "SLAB_BYTES", 10_000)
    monkeypatch.setattr(state_reader, "MASTERS_NUMEL", 1000)


def saved(path: Path, way: str = "nvme", optimizer: str = "AdamW", steps: int = 3, **how: Any) -> tuple[Training, Path]:
    training = Training(way, path, ALL_OPTIMIZERS[optimizer], **how).steps(steps)
    training.save(path / "saved").wait()
    return training, path / "saved"


def values(state: Any) -> dict[str, Any]:
    """All bits of a model's state dict, wherever its tensors lie in memory."""
    return {name: bits(torch.clone(value, memory_format=torch.contiguous_format)) for name, value in state.items()}


def resume(training: Training, turn: int, steps: int = 2) -> Training:
    """Go on where the learning rate's schedule was at `turn`."""
    training.turn = training.scheduler.last_epoch = turn
    return training.steps(steps)


def same_training(one: Training, other: Training) -> bool:
    return bits([dict(one.model.state_dict()), one.optimizer.state_dict()["state"]]) == bits(
        [dict(other.model.state_dict()), other.optimizer.state_dict()["state"]]
    )


# --- export to torch -------------------------------------------------------------------------------------------------


def check_torch_export(path: Path, way: str, optimizer: str, **how: Any) -> None:
    _, directory = saved(path, way, optimizer, **how)
    export_checkpoint(directory, "torch", path / "out.pt")
    found = torch.load(path / "out.pt", weights_only=True)
    assert zipfile.ZipFile(path / "out.pt").testzip() is None, "every checksum is right"
    assert found.keys() == {"model", "optimizer", "extra"}
    plain = Training("plain", path, ALL_OPTIMIZERS[optimizer], **how).steps(3)
    assert bits(found["optimizer"]) == bits(plain.optimizer.state_dict())
    assert values(found["model"]) == values(plain.model.state_dict())
    assert found["extra"]["turn"] == 3
    fresh = Training("plain", path, ALL_OPTIMIZERS[optimizer], **how)
    fresh.model.load_state_dict(found["model"])
    fresh.optimizer.load_state_dict(found["optimizer"])
    fresh.scheduler.load_state_dict(found["extra"]["scheduler"])
    assert same_training(resume(fresh, 3), plain.steps(2))
    assert options_of(fresh) == options_of(plain)


@pytest.mark.parametrize("way", ["nvme", "drives", "resident", "everything", "plain"])
def test_plain_pytorch_resumes_from_an_export(way: str, tmp_path: Path, small_pieces: None) -> None:
    check_torch_export(tmp_path, way, "AdamW")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("optimizer", ["SGD", "SGD-plain", "Adafactor", "Muon", "Adagrad-initial", "ASGD"])
def test_every_kind_of_state_is_exported(optimizer: str, tmp_path: Path, small_pieces: None) -> None:
    check_torch_export(tmp_path, "nvme", optimizer, kind=Words)


def test_bf16_is_exported(tmp_path: Path, small_pieces: None) -> None:
    check_torch_export(tmp_path, "nvme", "AdamW", dtype=torch.bfloat16)


def test_tied_tensors_share_memory_in_an_export(tmp_path: Path) -> None:
    _, directory = saved(tmp_path)
    export_checkpoint(directory, "torch", tmp_path / "out.pt", model_only=True)
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert found.keys() == {"model"}
    assert found["model"]["last.weight"].data_ptr() == found["model"]["embedding.weight"].data_ptr()


@pytest.mark.parametrize("way", ["nvme", "everything"])
@pytest.mark.parametrize(("optimizer", "dtype"), [("AdamW", torch.bfloat16), ("AdamW", torch.float16)])
def test_masters_are_exported_as_a_wrapped_optimizer_has_them(
    way: str, optimizer: str, dtype: torch.dtype, tmp_path: Path, small_pieces: None
) -> None:
    training, directory = saved(tmp_path, way, optimizer, dtype=dtype, masters=True)
    export_checkpoint(directory, "torch", tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    live = training.optimizer.state_dict()
    assert bits(found["optimizer"]) == bits(live)
    assert "master_param" in found["optimizer"]["state"][0]
    export_checkpoint(directory, "torch", tmp_path / "out.pt", drop_masters=True, force=True)
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    for state in live["state"].values():
        del state["master_param"]
    assert bits(found["optimizer"]) == bits(live)


def test_masters_that_are_ties_are_exported(tmp_path: Path, small_pieces: None) -> None:
    # Whole parameters, longer than what is decoded at once, in which every third master is a tie.
    weight = nn.Parameter(torch.empty(37, 211, dtype=torch.bfloat16).t())
    model = nn.ParameterDict({"weight": weight})
    optimizer = torch.optim.Adafactor([weight])
    state = {"device": "nvme", "master_weights": True}
    config = swapper.OffloadConfig(nvme_path=tmp_path, pool_bytes="24MiB", offload_optimizer=state)
    swapper.wrap_optimizer(optimizer, config)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    words = torch.randn(weight.numel()).view(torch.int32)
    words[::3] = words[::3] & ~0xFFFF | 0x8000
    whole = optimizer.state_dict()
    master = whole["state"][0]["master_param"] = words.view(torch.float32).as_strided(weight.shape, weight.stride())
    weight.data.copy_(master.bfloat16())
    optimizer.load_state_dict(whole)
    swapper.save_checkpoint(tmp_path / "saved", model, optimizer).wait()
    export_checkpoint(tmp_path / "saved", "torch", tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=True)["optimizer"]["state"][0]["master_param"]
    assert bits(found) == bits(master)
    with torch.no_grad():
        weight[5, 5] += 1  # Then the master is what the parameter is.
    swapper.save_checkpoint(tmp_path / "changed", model, optimizer).wait()
    export_checkpoint(tmp_path / "changed", "torch", tmp_path / "out.pt", force=True)
    found = torch.load(tmp_path / "out.pt", weights_only=True)["optimizer"]["state"][0]["master_param"]
    assert bits(found) == bits(weight.detach().float())


def test_several_optimizers_are_a_list(tmp_path: Path) -> None:
    def make() -> tuple[Any, list[torch.optim.Optimizer]]:
        model = make_model(Words)
        half = list(model.parameters())[::2], list(model.parameters())[1::2]
        return model, [torch.optim.AdamW(half[0], lr=1e-3), torch.optim.SGD(half[1], lr=1e-2, momentum=0.9)]

    def steps(model: Any, optimizers: list[torch.optim.Optimizer], turns: range) -> None:
        for turn in turns:
            model.loss(turn).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    model, optimizers = make()
    config = {"nvme_path": tmp_path, "pool_bytes": "24MiB", "offload_optimizer": {"device": "nvme"}}
    swapper.wrap_optimizer(optimizers[0], config)
    steps(model, optimizers, range(3))
    swapper.save_checkpoint(tmp_path / "saved", model, optimizers).wait()
    export_checkpoint(tmp_path / "saved", "torch", tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    again, theirs = make()
    again.load_state_dict(found["model"])
    for optimizer, state in zip(theirs, found["optimizer"], strict=True):
        optimizer.load_state_dict(state)
    imported = import_checkpoint(tmp_path / "out.pt", tmp_path / "again")
    assert imported.optimizers == ["torch.optim.adamw.AdamW", "torch.optim.sgd.SGD"]
    third, those = make()
    swapper.load_checkpoint(tmp_path / "again", third, those)
    for each in ((model, optimizers), (again, theirs), (third, those)):
        steps(*each, range(3, 5))
    assert bits(dict(model.state_dict())) == bits(dict(again.state_dict())) == bits(dict(third.state_dict()))
    names = [
        path.name for path in Path(export_checkpoint(tmp_path / "saved", "safetensors", tmp_path / "st").path).iterdir()
    ]
    assert {"optimizer-0.safetensors", "optimizer-0.json", "optimizer-1.safetensors"} <= set(names)


def test_what_weights_only_does_not_load_is_said(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    model = nn.Linear(2, 2)
    swapper.save_checkpoint(tmp_path / "saved", model, None, {"scores": numpy.ones(3)}).wait()
    output = command("checkpoint", "export", tmp_path / "saved", tmp_path / "out.pt", "--to", "torch").stdout
    assert "weights_only=False" in output
    assert (torch.load(tmp_path / "out.pt", weights_only=False)["extra"]["scores"] == 1).all()


# --- export to safetensors and dcp -----------------------------------------------------------------------------------


def test_safetensors_have_every_bit(tmp_path: Path, small_pieces: None) -> None:
    training, directory = saved(tmp_path, "everything", dtype=torch.bfloat16, masters=True)
    out = export_checkpoint(directory, "safetensors", tmp_path / "out").path
    model = make_model(Odd, torch.bfloat16)
    load_model(model, out / "model.safetensors")
    assert values(model.state_dict()) == values(training.model.state_dict())
    tensors = load_file(out / "optimizer.safetensors")
    described = json.loads((out / "optimizer.json").read_text())
    assert described["class"] == "torch.optim.adamw.AdamW"
    (group,) = described["param_groups"]
    live = training.optimizer.state_dict()
    expected = {
        f"{group['params'][place]}.{key}": value
        for place, state in live["state"].items()
        for key, value in state.items()
    }
    assert "conv.weight.master_param" in tensors
    assert values(tensors) == values(expected)
    assert json.loads((out / "extra.json").read_text())["extra"]["turn"] == 3


@pytest.mark.long
def test_a_long_model_is_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training, directory = saved(tmp_path, kind=Words)
    monkeypatch.setattr(export, "SHARD_BYTES", 100_000)
    out = export_checkpoint(directory, "safetensors", tmp_path / "out", model_only=True).path
    index = json.loads((out / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert {path.name for path in out.iterdir()} == {*shards, "model.safetensors.index.json"}
    found = {}
    for shard in shards:
        tensors = load_file(out / shard)
        assert all(index["weight_map"][name] == shard for name in tensors)
        found.update(tensors)
    state = training.model.state_dict()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    assert values(found) == values({name: state[name] for name in found})
    model = make_model(Words)
    swapper.load_safetensors(model, out)
    assert values(model.state_dict()) == values(state)


@pytest.mark.filterwarnings("ignore:.*torch.distributed is disabled, unavailable or uninitialized.*")
@pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated.*")
@pytest.mark.filterwarnings("ignore:.*:FutureWarning")
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_dcp_loads_into_what_get_state_dict_gives(optimizer: str, tmp_path: Path, small_pieces: None) -> None:
    _, directory = saved(tmp_path, "everything", optimizer)
    out = export_checkpoint(directory, "dcp", tmp_path / "out").path
    plain = Training("plain", tmp_path, OPTIMIZERS[optimizer]).steps(3)
    fresh = Training("plain", tmp_path, OPTIMIZERS[optimizer]).steps(1)
    model, state = get_state_dict(fresh.model, fresh.optimizer)
    whole = {"model": model, "optimizer": state, "extra": {"turn": 0}}
    dcp_load(whole, storage_reader=FileSystemReader(out), no_dist=True)
    set_state_dict(fresh.model, fresh.optimizer, model_state_dict=model, optim_state_dict=state)
    assert whole["extra"] == {"turn": 3}
    assert options_of(fresh) == options_of(plain)
    assert same_training(resume(fresh, 3), plain.steps(2))


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_elements_is_made_contiguous(seed: int, small_pieces: None) -> None:
    generator = torch.Generator().manual_seed(seed)

    def random(low: int, high: int, *size: int) -> list[int]:
        return torch.randint(low, high, size, generator=generator).tolist()

    sizes = [*random(1, 9, random(0, 3, 1)[0]), 13, *random(1, 40, 2)]
    base = torch.randn(sizes, generator=generator, dtype=torch.complex128 if seed == 7 else torch.float32)
    tensor = base.permute(*torch.randperm(base.dim(), generator=generator).tolist())
    flat = base.view(-1)
    stream = TensorStream(tensor.dtype, tuple(tensor.shape), tensor.stride(), lambda start, stop: flat[start:stop])
    found = torch.cat(list(stream.contiguous().pieces()))
    assert max(piece.numel() for piece in stream.contiguous().pieces()) <= 4096
    assert torch.equal(found, tensor.contiguous().view(-1).view(torch.uint8))


MEASURED = """
import sys, torch, swapper
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from peak import Peak
from swapper.checkpoint.export import export_checkpoint
from swapper.checkpoint.plain_import import import_checkpoint
path = Path(sys.argv[1])
def work(directory, out):
    export_checkpoint(directory, "torch", out / "out.pt")
    export_checkpoint(directory, "safetensors", out / "st")
    export_checkpoint(directory, "dcp", out / "dcp", model_only=True)
    import_checkpoint(out / "out.pt", out / "again")
(path / "first").mkdir()
small = torch.nn.Linear(300, 300)
swapper.save_checkpoint(path / "first" / "saved", small, torch.optim.SGD(small.named_parameters(), momentum=0.9)).wait()
export_checkpoint(path / "first" / "saved", "dcp", path / "first" / "dcp")
with Peak() as before:
    import time; time.sleep(0.05)
with Peak() as peak:
    work(path / "saved", path)
print(peak.bytes - before.bytes)
"""


@pytest.mark.long
@pytest.mark.unsanitized("its memory counts as the process's")
def test_memory_holds_pieces_and_no_tensor(tmp_path: Path) -> None:
    # One tensor of 112 MB, and as much state; the other way round in memory, so that both have to be turned.
    model = nn.ParameterDict({"weight": nn.Parameter(torch.randn(3500, 8000).t())})
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    model["weight"].grad = torch.ones_like(model["weight"])
    optimizer.step()
    swapper.save_checkpoint(tmp_path / "saved", model, optimizer).wait()
    arguments = [sys.executable, "-c", MEASURED, str(tmp_path), str(BENCHMARKS)]
    output = run_program(arguments, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert int(output) < (32 << 20) + 100e6, "with one tensor it would be 145 MB"
    weight, momentum = model["weight"].detach(), optimizer.state[model["weight"]]["momentum_buffer"]
    found = torch.load(tmp_path / "out.pt", weights_only=True, mmap=True)
    assert torch.equal(found["model"]["weight"], weight)
    assert torch.equal(found["optimizer"]["state"][0]["momentum_buffer"], momentum)
    assert torch.equal(load_file(tmp_path / "st" / "optimizer.safetensors")["weight.momentum_buffer"], momentum)
    with Checkpoint(tmp_path / "saved") as one, Checkpoint(tmp_path / "again") as other:
        assert one.index.model.tensors == other.index.model.tensors
        state = "optimizer-0-memory.safetensors"
        assert one.index.files[state] == other.index.files[state]


# --- import ----------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[Any, Any], Any]] = {
    "model, optimizer": lambda model, optimizer: {"model": model, "optimizer": optimizer, "epoch": 3},
    "model_state_dict": lambda model, optimizer: {
        "model_state_dict": model, "optimizer_state_dict": optimizer, "epoch": 3,
    },
    "Lightning": lambda model, optimizer: {
        "epoch": 3, "state_dict": model, "optimizer_states": [optimizer], "lr_schedulers": [{"last_epoch": 3}],
    },
}  # fmt: skip


@pytest.mark.parametrize("way", ["everything", "plain"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_goes_on_from_a_plain_file(layout: str, way: str, tmp_path: Path) -> None:
    plain = Training("plain", tmp_path, OPTIMIZERS["AdamW"]).steps(3)
    torch.save(LAYOUTS[layout](plain.model.state_dict(), plain.optimizer.state_dict()), tmp_path / "plain.pt")
    arguments = ["checkpoint", "import", tmp_path / "plain.pt", "--to", tmp_path / "saved"]
    assert as_json(*arguments)["optimizers"] == ["torch.optim.adamw.AdamW"]
    fresh = Training(way, tmp_path, OPTIMIZERS["AdamW"]).steps(1)
    extra = swapper.load_checkpoint(tmp_path / "saved", fresh.model, fresh.optimizer)
    assert extra["epoch"] == 3
    assert same_training(resume(fresh, 3), plain.steps(2))
    assert options_of(fresh) == options_of(plain)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["SGD", "SGD-plain", "Adafactor", "Muon", "RMSprop-centered", "NAdam"])
def test_the_class_is_found_by_its_options(optimizer: str, tmp_path: Path) -> None:
    plain = Training("plain", tmp_path, ALL_OPTIMIZERS[optimizer], kind=Words).steps(3)
    torch.save({"model": plain.model.state_dict(), "optimizer": plain.optimizer.state_dict()}, tmp_path / "plain.pt")
    kind = optimizer.partition("-")[0]
    output = command("checkpoint", "import", tmp_path / "plain.pt", "--to", tmp_path / "saved").stdout
    assert f"torch.optim.{kind}, the only class" in output
    fresh = Training("nvme", tmp_path, ALL_OPTIMIZERS[optimizer], kind=Words)
    assert swapper.load_checkpoint(tmp_path / "saved", fresh.model, fresh.optimizer) is None
    assert same_training(resume(fresh, 3), plain.steps(2))


def test_names_of_parameters_are_taken_from_the_file(tmp_path: Path) -> None:
    model = nn.Linear(100, 77)
    optimizer = torch.optim.Adam(model.named_parameters())
    model(torch.randn(3, 100)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "plain.pt")
    import_checkpoint(tmp_path / "plain.pt", tmp_path / "saved")
    other = nn.Linear(100, 77)
    wrong = torch.optim.Adam([other.bias, other.weight])
    with pytest.raises(ConfigError, match="parameter 0 of group 0 of the optimizer is bias"):
        swapper.load_checkpoint(tmp_path / "saved", other, wrong)
    right = torch.optim.Adam(other.parameters())
    swapper.load_checkpoint(tmp_path / "saved", other, right)
    assert bits(right.state_dict()["state"]) == bits(optimizer.state_dict()["state"])


def test_without_names_shapes_are_still_compared(tmp_path: Path) -> None:
    model = nn.Linear(100, 77)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(3, 100)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "plain.pt")
    import_checkpoint(tmp_path / "plain.pt", tmp_path / "saved")
    wrong = torch.optim.Adam([model.bias, model.weight])
    with pytest.raises(ConfigError, match=r"parameter 0 of group 0 .* is bias .* one without a name \(\[77, 100\]\)"):
        swapper.load_checkpoint(tmp_path / "saved", model, wrong)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_go_to_a_file_and_back(dtype: torch.dtype, tmp_path: Path, small_pieces: None) -> None:
    how: dict[str, Any] = {"dtype": dtype, "masters": True}
    training, directory = saved(tmp_path, "nvme", **how)
    export_checkpoint(directory, "torch", tmp_path / "out.pt")
    import_checkpoint(tmp_path / "out.pt", tmp_path / "again", optimizer="torch.optim.AdamW")
    fresh = Training("everything", tmp_path, OPTIMIZERS["AdamW"], **how)
    fresh.load(tmp_path / "again")
    assert same_training(fresh.steps(2), training.steps(2))


def test_a_bare_state_dict_is_a_model(tmp_path: Path) -> None:
    model = make_model()
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    output = command("checkpoint", "import", tmp_path / "plain.pt", "--to", tmp_path / "saved").stdout
    assert "the model, which is all of the file" in output
    fresh = make_model()
    with torch.no_grad():
        for p in fresh.parameters():
            p.zero_()
    assert swapper.load_checkpoint(tmp_path / "saved", fresh) is None
    assert bits(dict(fresh.state_dict())) == bits(dict(model.state_dict()))


# --- show, verify ----------------------------------------------------------------------------------------------------


def test_every_command_has_help_with_an_example_and_json() -> None:
    listed = command("checkpoint", "--help").stdout.partition("Commands:")[2]
    names = [line.split()[0] for line in listed.splitlines() if line.startswith("  ") and line[2] != " "]
    assert names == ["show", "verify", "export", "import"]
    assert "..." not in listed, "the first sentence of each is short enough to be shown whole"
    for name in names:
        text = command("checkpoint", name, "--help").stdout
        assert f"\n      swapper checkpoint {name}" in text, "in a line of its own"
        assert "--json" in text


def test_show_says_what_is_inside(tmp_path: Path) -> None:
    _, directory = saved(tmp_path, "everything", dtype=torch.bfloat16, masters=True)
    found = as_json("checkpoint", "show", directory)
    sizes = sum(path.stat().st_size for path in directory.iterdir())
    assert (found["step"], found["sequence"], found["length_bytes"]) == (3, 1, sizes)
    assert found["model"]["tied"] == {"last.weight": "embedding.weight"}
    assert found["model"]["numel"] == sum(value.numel() for value in make_model().state_dict().values()) - 401 * 96
    (optimizer,) = found["optimizers"]
    assert optimizer["class"] == "torch.optim.adamw.AdamW"
    assert optimizer["state"] == {"step": "small", "exp_avg": "float32", "exp_avg_sq": "float32"}
    trained = sum(p.numel() for p in make_model().parameters() if p.requires_grad)
    assert sum(optimizer["masters_numel"].values()) == trained
    assert optimizer["groups"][0]["options"]["betas"] == [0.9, 0.999]
    assert found["extra"]["turn"] == "3" and found["extra"]["scheduler"].startswith("dict of")
    assert sum(kind["files"] for kind in found["files"]) == len(list(directory.iterdir())) - 1
    text = command("checkpoint", "show", directory).stdout
    for words in ("step 3", "parameter records", "AdamW", "betas", "master weights", "last.weight is embedding.weight"):
        assert words in text


def test_show_lists_checkpoints_newest_last(tmp_path: Path) -> None:
    training = Training("nvme", tmp_path, OPTIMIZERS["AdamW"])
    for name in ("b", "a", "c"):
        training.steps(1).save(tmp_path / "all" / name).wait()
    (tmp_path / "all" / "other").mkdir()
    found = as_json("checkpoint", "show", tmp_path / "all")
    assert [Path(each["path"]).name for each in found["checkpoints"]] == ["b", "a", "c"]
    assert [each["step"] for each in found["checkpoints"]] == [1, 2, 3]
    lines = command("checkpoint", "show", tmp_path / "all").stdout.splitlines()
    assert len(lines) == 4 and lines[-1].endswith("/c")
    (tmp_path / "all" / "a" / "values.safetensors").unlink()
    result = command("checkpoint", "show", tmp_path / "all", code=1)
    assert "values.safetensors" in result.stderr and len(result.stdout.splitlines()) == 3


def test_show_of_a_directory_without_checkpoints_fails_in_json_too(tmp_path: Path) -> None:
    assert "is no checkpoint" in command("checkpoint", "show", tmp_path, code=1).stderr
    assert as_json("checkpoint", "show", tmp_path, code=1)["checkpoints"] == []


def test_verify_names_every_file_that_is_not_whole(tmp_path: Path) -> None:
    _, directory = saved(tmp_path, "everything")
    assert as_json("checkpoint", "verify", directory)["damaged"] == []
    assert "all as they were written" in command("checkpoint", "verify", directory).stdout
    names = sorted(path.name for path in directory.iterdir() if path.name.startswith("optimizer"))
    flipped, short, missing = names[:3]
    for name in (flipped, short):
        data = bytearray((directory / name).read_bytes())
        (directory / name).unlink()  # It is a second name of a record.
        data[-1] ^= 1
        (directory / name).write_bytes(data if name == flipped else data[:-7])
    (directory / missing).unlink()
    (directory / "notes.txt").write_text("mine")
    found = as_json("checkpoint", "verify", directory, code=1)
    assert {each["file"] for each in found["damaged"]} == {flipped, short, missing}
    assert found["unknown"] == ["notes.txt"]
    result = command("checkpoint", "verify", directory, code=1)
    assert all(name in result.stderr for name in (flipped, short, missing)) and "notes.txt" in result.stdout
    assert "3 damaged or missing" in result.stdout


# --- bad input -------------------------------------------------------------------------------------------------------


def test_what_is_made_has_a_name_if_none_is_given(tmp_path: Path) -> None:
    saved(tmp_path)
    for to, name in (("torch", "saved.pt"), ("safetensors", "saved-safetensors"), ("dcp", "saved-dcp")):
        assert name in command("checkpoint", "export", tmp_path / "saved", "--to", to).stdout
        assert (tmp_path / name).exists()
    assert "saved-checkpoint" in command("checkpoint", "import", tmp_path / "saved.pt").stdout
    with Checkpoint(tmp_path / "saved-checkpoint") as checkpoint:
        assert checkpoint.index.step == 3


@pytest.mark.parametrize("what", ["show", "verify", "export"])
@pytest.mark.parametrize("there", ["nothing", "a file", "no checkpoint", "a damaged index"])
def test_what_is_no_checkpoint_is_refused(what: str, there: str, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    if there == "a file":
        path.write_text("")
    elif there == "no checkpoint":
        path.mkdir()
    elif there == "a damaged index":
        swapper.save_checkpoint(path, nn.Linear(2, 2)).wait()
        text = (path / "index.json").read_text()
        (path / "index.json").write_text(text.replace('"sequence":1', '"sequence":2'))
    more = [tmp_path / "out.pt", "--to", "torch"] if what == "export" else []
    assert str(path) in command("checkpoint", what, path, *more, code=1).stderr
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize("to", ["torch", "safetensors", "dcp"])
def test_nothing_is_overwritten_unless_forced(to: str, tmp_path: Path) -> None:
    swapper.save_checkpoint(tmp_path / "saved", nn.Linear(2, 2)).wait()
    arguments = ["checkpoint", "export", tmp_path / "saved", tmp_path / "out", "--to", to]
    assert as_json(*arguments)["path"] == str(tmp_path / "out")
    before = (
        sorted((path.name, path.stat().st_ino) for path in tmp_path.glob("out*/*")) or (tmp_path / "out").stat().st_ino
    )
    assert "exists" in command(*arguments, code=1).stderr
    after = (
        sorted((path.name, path.stat().st_ino) for path in tmp_path.glob("out*/*")) or (tmp_path / "out").stat().st_ino
    )
    assert before == after
    command(*arguments, "--force")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "saved"]
    if to != "torch":
        (tmp_path / "out" / "thesis.tex").write_text("mine")
        assert "thesis.tex" in command(*arguments, "--force", code=1).stderr
    assert "in the checkpoint" in command(*arguments[:3], tmp_path / "saved" / "out", "--to", to, code=1).stderr
    assert "no directory" in command(*arguments[:3], tmp_path / "not" / "out", "--to", to, code=1).stderr


@pytest.mark.parametrize("to", ["torch", "safetensors", "dcp"])
@pytest.mark.parametrize("where", ["model", "optimizer"])
def test_damage_is_found_and_nothing_is_left(to: str, where: str, tmp_path: Path) -> None:
    _, directory = saved(tmp_path)
    damaged = next(path for path in sorted(directory.glob(f"{where}-*.safetensors")))
    data = bytearray(damaged.read_bytes())
    damaged.unlink()
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    before = sorted(tmp_path.iterdir())
    result = command("checkpoint", "export", directory, tmp_path / "out", "--to", to, code=1)
    assert damaged.name in result.stderr and "damaged" in result.stderr
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("dtype", ["complex64", "float8_e4m3fn", "float8_e5m2", "uint16", "bool", "float64", "int8"])
def test_every_dtype_is_exported(dtype: str, tmp_path: Path) -> None:
    model = nn.Module()
    data = torch.randint(0, 2 if dtype == "bool" else 256, (2, 40_000), dtype=torch.uint8)
    for name, rows in (("large", data), ("small", data[:, :16].contiguous())):
        model.register_buffer(name, rows.view(getattr(torch, dtype)))
    model.register_buffer("none", torch.empty(2, 0, dtype=getattr(torch, dtype)))
    swapper.save_checkpoint(tmp_path / "saved", model).wait()
    export_checkpoint(tmp_path / "saved", "torch", tmp_path / "out.pt")
    assert bits(torch.load(tmp_path / "out.pt", weights_only=True)["model"]) == bits(dict(model.state_dict()))
    export_checkpoint(tmp_path / "saved", "safetensors", tmp_path / "out")
    found = {tensor.name: tensor for tensor in read_header(tmp_path / "out" / "model.safetensors")}
    written = (tmp_path / "out" / "model.safetensors").read_bytes()
    for name, value in model.state_dict().items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        assert written[found[name].start_bytes : found[name].stop_bytes] == value.view(torch.uint8).numpy().tobytes()


def test_what_a_format_cannot_hold_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("spectrum", torch.zeros(3, dtype=torch.complex128))
    swapper.save_checkpoint(tmp_path / "saved", model).wait()
    with pytest.raises(SwapError, match=r"spectrum is torch\.complex128"):
        export_checkpoint(tmp_path / "saved", "safetensors", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    strange = nn.Linear(2, 2)
    foreign = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([*strange.parameters(), foreign], lr=0.1)
    swapper.save_checkpoint(tmp_path / "foreign", strange, optimizer).wait()
    with pytest.raises(SwapError, match="without a name of their own"):
        export_checkpoint(tmp_path / "foreign", "dcp", tmp_path / "out")
    with pytest.raises(SwapError, match="none of torch, safetensors, dcp"):
        export_checkpoint(tmp_path / "foreign", "zip", tmp_path / "out")  # type: ignore[arg-type]


class Private:
    """Not of what weights_only takes."""


def adamw_state() -> dict[str, Any]:
    return torch.optim.AdamW(nn.Linear(2, 2).parameters()).state_dict()


WEIGHTS = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}
BAD: dict[str, tuple[Any, list[str], str]] = {
    "no dictionary": ([1, 2], [], "no dictionary"),
    "no model": ({"epoch": 3}, [], "no state dict of a model"),
    "two models": ({"model": WEIGHTS, "state_dict": WEIGHTS}, [], "--model-key"),
    "no such key": ({"net": WEIGHTS}, ["--model-key", "nets"], "has no 'nets'"),
    "a key of something else": ({"net": 5}, ["--model-key", "net"], "no state dict of a model"),
    "no optimizer there": ({"model": WEIGHTS, "opt": 1}, ["--optimizer-key", "opt"], "no state dict of an optimizer"),
    "no such optimizer key": ({"model": WEIGHTS}, ["--optimizer-key", "opt"], "has no 'opt'"),
    "groups that are none": (
        {"model": WEIGHTS, "opt": {"state": {}, "param_groups": [5]}}, ["--optimizer-key", "opt"], "of an optimizer",
    ),
    "state that is none": (
        {"model": WEIGHTS, "opt": {"state": {0: 5}, "param_groups": [{"params": [0]}]}},
        ["--optimizer-key", "opt"], "of an optimizer",
    ),
    "an unknown class": ({"model": WEIGHTS, "optimizer": adamw_state()}, ["--optimizer", "Adamm"], "no class of torch"),
    "two classes for one": (
        {"model": WEIGHTS, "optimizer": adamw_state()}, ["--optimizer", "AdamW", "--optimizer", "SGD"], "2 classes",
    ),
    "options of no class": (
        {"model": WEIGHTS, "optimizer": {"state": {}, "param_groups": [{"params": [0], "mine": 2}]}}, [], "mine",
    ),
    "state of nobody": (
        {"model": WEIGHTS, "optimizer": {"state": {7: {}}, "param_groups": adamw_state()["param_groups"]}}, [], "fit",
    ),
    "an object": ({"model": WEIGHTS, "rest": Private()}, [], "Private"),
    "nothing to drop": ({"model": WEIGHTS}, ["--drop", "epoch"], "has no 'epoch'"),
    "what cannot be encoded": ({"model": WEIGHTS, "mask": torch.eye(3).to_sparse()}, [], "--drop"),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
def test_files_that_cannot_be_imported_are_refused(bad: str, tmp_path: Path) -> None:
    content, arguments, words = BAD[bad]
    torch.save(content, tmp_path / "plain.pt")
    result = command("checkpoint", "import", tmp_path / "plain.pt", "--to", tmp_path / "saved", *arguments, code=1)
    assert words in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["plain.pt"]


def test_what_is_dropped_is_not_there(tmp_path: Path) -> None:
    torch.save({"model": WEIGHTS, "mask": torch.eye(3).to_sparse(), "epoch": 3}, tmp_path / "plain.pt")
    arguments = ["checkpoint", "import", tmp_path / "plain.pt", "--to", tmp_path / "saved", "--drop", "mask"]
    command(*arguments)
    assert swapper.load_checkpoint(tmp_path / "saved", nn.Linear(2, 2)) == {"epoch": 3}
    assert "exists" in command(*arguments, code=1).stderr
    command(*arguments, "--force", "--drop", "epoch")
    assert swapper.load_checkpoint(tmp_path / "saved", nn.Linear(2, 2)) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain.pt", "saved"]


@pytest.mark.parametrize("how", ["missing", "empty", "text", "cut off", "old format"])
def test_what_is_no_file_of_torch_is_refused(how: str, tmp_path: Path) -> None:
    path = tmp_path / "plain.pt"
    torch.save({"model": WEIGHTS}, path, _use_new_zipfile_serialization=how != "old format")
    if how == "missing":
        path.unlink()
    elif how == "cut off":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif how != "old format":
        path.write_text("" if how == "empty" else "What is this?")
    result = command("checkpoint", "import", path, "--to", tmp_path / "saved", code=1)
    assert str(path) in result.stderr
    assert not (tmp_path / "saved").exists()


def test_a_flipped_bit_of_a_file_is_found(tmp_path: Path) -> None:
    path = tmp_path / "plain.pt"
    torch.save({"model": {"weight": torch.zeros(100_000)}}, path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert (
        "does not match its checksum"
        in command("checkpoint", "import", path, "--to", tmp_path / "saved", code=1).stderr
    )
    assert not (tmp_path / "saved").exists()


def test_a_file_whose_directory_is_damaged_is_not_left_to_torch(tmp_path: Path) -> None:
    """Of a record that a wrong bit makes a folder torch reads nothing, and takes what is in memory for it."""
    path = tmp_path / "plain.pt"
    torch.save({"model": WEIGHTS}, path)
    data = bytearray(path.read_bytes())
    data[data.rindex(b"plain/data.pkl") - 46 + 38] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(SwapError, match=r"plain\.pt cannot .*: its directory is damaged .*'plain/data\.pkl'"):
        import_checkpoint(path, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("said_to_be", ["cp437", "UTF-8"])
def test_a_file_of_another_packer_is_imported(said_to_be: str, tmp_path: Path) -> None:
    """Names in it may be in CP437, unless they are said not to be: then a wrong bit has made them that."""
    path = tmp_path / "plain.pt"
    torch.save({"model": WEIGHTS}, path)
    with zipfile.ZipFile(path) as saved:
        contents = {info.filename: saved.read(info) for info in saved.infolist()}
    with zipfile.ZipFile(path, "w") as packed:
        for name, content in contents.items():
            packed.writestr(name, content)
    data = path.read_bytes().replace(b"plain/", b"pl\x84in/")
    if said_to_be == "UTF-8":
        at = data.index(b"PK\1\2") + 9
        data = data[:at] + bytes([data[at] | 8]) + data[at + 1 :]
    path.write_bytes(data)
    if said_to_be == "UTF-8":
        with pytest.raises(SwapError, match="its directory is damaged: a name of its records is not UTF-8"):
            import_checkpoint(path, tmp_path / "saved")
        return
    import_checkpoint(path, tmp_path / "saved")
    model = nn.Linear(2, 2)
    swapper.load_checkpoint(tmp_path / "saved", model)
    assert torch.equal(model.weight, WEIGHTS["weight"])
    at = data.index(b"in/data/0") + len(b"in/data/0")  # What is behind the name in its local header.
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(SwapError, match=r"'pläin/data/0' does not match its checksum"):
        import_checkpoint(path, tmp_path / "other")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_file_with_two_records_of_one_name_is_refused(tmp_path: Path) -> None:
    """It may be whole, but torch would take either; and a wrong bit in a name makes the same."""
    path = tmp_path / "plain.pt"
    torch.save({"model": WEIGHTS}, path)
    with zipfile.ZipFile(path, "a") as packed:
        packed.writestr("plain/data/0", packed.read("plain/data/0"))
    words = r"plain\.pt cannot be imported: two of its records have one name, 'plain/data/0'"
    with pytest.raises(SwapError, match=words):
        import_checkpoint(path, tmp_path / "saved")


def test_state_whose_parameter_cannot_be_known_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 4)
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "plain.pt")
    with pytest.raises(SwapError, match="its shape cannot be told"):
        import_checkpoint(tmp_path / "plain.pt", tmp_path / "saved")
