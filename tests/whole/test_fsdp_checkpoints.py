"""`save_checkpoint` and `load_checkpoint` of DTensors: by any number of ranks, to the bit."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from sampling import ALL, EVERY, SEED
from sharded_nets import in_processes
from test_fsdp import OPTIMIZERS, Across, Case, config_of, same, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from twins import bits
from typer.testing import CliRunner

import swapper
from swapper.cli import app


def cases() -> Iterator[Case]:
    """Each class, with settings by chance, the same for all numbers of ranks."""
    chance = random.Random(f"{SEED} checkpoints")
    # Not: state of other shapes; what torch cannot step as DTensors.
    known = [each for each in OPTIMIZERS if each[0] not in (Across, torch.optim.Rprop)]
    for cls, options in known * (1 + EVERY) if ALL else chance.sample(known, 5):
        fused_sgd = cls is torch.optim.SGD and "fused" in options
        dtype = torch.float32 if fused_sgd else chance.choice([torch.float32, torch.bfloat16])
        mesh = chance.choice(["shard", "hybrid", "columns", "tensor"])
        yield Case(
            cls,
            options,
            dtype,
            masters=dtype is torch.bfloat16 and chance.random() < 0.6,
            mesh="shard" if options.keys() & {"foreach", "fused"} and mesh == "tensor" else mesh,
            bucket_bytes=chance.choice(["16KiB", "48KiB"]),
        )


def model_of(case: Case, whole: bool) -> nn.Module:
    if not whole:
        return sharded(case)
    from test_fsdp import Net

    return Net(300 if case.mesh == "tensor" else 301).to(case.dtype)


PLACES = ("state", "all", "parameters", "nothing")
"""What of a training is on the drive."""


def places_of(case: Case) -> list[str]:
    """The places for which training works: plain optimizers cannot step with some settings."""
    return [place for place in PLACES if place in ("state", "all") or not case.by_hand]


def made(case: Case, directory: str, on_drive: str, whole: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = model_of(case, whole)
    optimizer = case.cls([p for p in net.parameters() if p.requires_grad], lr=1e-2, **case.options)
    more = {"offload_param": {"device": "nvme"}} if on_drive in ("all", "parameters") else {}
    config = config_of(directory, masters=case.masters, bucket_bytes=case.bucket_bytes, **more)
    if on_drive == "state":
        swapper.wrap_optimizer(optimizer, config)
    elif on_drive == "all":
        swapper.offload(net, optimizer, config)
    elif on_drive == "parameters":
        swapper.offload(net, config=config)
    return net, optimizer


def step(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    dtype = next(net.parameters()).dtype
    net(torch.randn(4, 33, generator=torch.Generator().manual_seed(seed)).to(dtype)).backward()
    optimizer.step()
    optimizer.zero_grad()


def full(value: Any) -> Any:
    return value.full_tensor().detach() if isinstance(value, DTensor) else value


def everything(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = optimizer.state_dict()
    found = {f"model.{name}": full(value).clone() for name, value in net.state_dict().items()}
    for number, entries in state["state"].items():
        found |= {f"{number}.{key}": full(value) for key, value in entries.items()}
    return found | {f"group.{key}": value for key, value in state["param_groups"][0].items() if key != "params"}


def close(optimizer: torch.optim.Optimizer, net: nn.Module | None = None) -> None:
    for each in (optimizer, net):
        if each is not None and "swapper" in vars(each):
            vars(each)["swapper"].close()


def save_all(rank: int, directory: str, nvme: str, name: str, whole: bool = False) -> None:
    for number, case in enumerate(cases()):
        places = places_of(case)
        place = places[number % len(places)]
        net, optimizer = made(case, nvme, place, whole)
        for seed in range(2):
            step(net, optimizer, seed)
        path = f"{directory}/{name}-{number}"
        extra = {"rank": rank, "case": number, "noise": torch.arange(3)}
        swapper.save_checkpoint(path, net, optimizer, extra).wait()
        # The state is kept: what is not sharded is not collective.
        found = everything(net, optimizer)
        if rank == 0:
            torch.save(found, f"{path}.pt")
            check_written_once(path, found)
        if not whole:
            check_linked(path, net)
            resume(case, path, nvme, number, (net, optimizer), place)
        close(optimizer, net)


def check_written_once(path: str, found: dict[str, Any]) -> None:
    """Whatever several ranks have alike is in one file."""
    length_bytes = sum(each.stat().st_size for each in Path(path).glob("*.safetensors"))
    expected = sum(value.nbytes for value in found.values() if isinstance(value, torch.Tensor))
    slack = 10_000 * torch.distributed.get_world_size()  # Records are small here, and have headers.
    assert length_bytes < 1.5 * expected + slack, (length_bytes, expected)
    assert "version" in json.dumps(json.loads(Path(path, "index.json").read_text())["model"]["metadata"])


def check_linked(path: str, net: nn.Module) -> None:
    """No shard that is on the drive is written a second time. Of replicas only one rank has links."""
    rank = torch.distributed.get_rank()
    records = list(Path(path).glob("model-r*-0*.safetensors"))
    swapped = isinstance(vars(net).get("swapper"), swapper.ParameterSwapper)
    assert bool(records) == swapped, records
    # Other ranks may train already, in files of their own.
    assert all(each.stat().st_nlink == 2 for each in records if each.name.startswith(f"model-r{rank}-"))
    memory = Path(path) / f"model-r{rank}-memory.safetensors"
    if swapped and memory.exists():  # What is in no record, as the buffers of a rank.
        assert not [name for name in safetensors.torch.load_file(memory) if "@" in name]


def resume(case: Case, path: str, nvme: str, number: int, there: Any, place: str) -> None:
    """On as many ranks training goes on as if it had not ended."""
    net, optimizer = there
    other, fresh = made(replace(case, bucket_bytes="48KiB"), nvme, place)
    step(other, fresh, 9)
    extra = swapper.load_checkpoint(path, other, fresh)
    rank = torch.distributed.get_rank()
    assert extra["rank"] == rank and extra["case"] == number and torch.equal(extra["noise"], torch.arange(3))
    for seed in range(2, 4):
        step(net, optimizer, seed)
        step(other, fresh, seed)
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert same(p, q)
    mine, others = (each.state_dict()["state"] for each in (optimizer, fresh))
    assert mine.keys() == others.keys()
    for n, entries in mine.items():
        assert list(entries) == list(others[n])
        assert all(same(value, others[n][key]) for key, value in entries.items())
    close(fresh, other)


def load_all(rank: int, directory: str, nvme: str, name: str, whole: bool = False) -> None:
    for number, case in enumerate(cases()):
        path = f"{directory}/{name}-{number}"
        reference = torch.load(f"{path}.pt")
        for place in (PLACES[number % 4], PLACES[(number + 1) % 4]):
            swaps = place in ("state", "all")
            if case.masters and not swaps:
                continue
            net, optimizer = made(case, nvme, place, whole)
            extra = swapper.load_checkpoint(path, net, optimizer)
            assert extra["case"] == number
            found = everything(net, optimizer)
            assert found.keys() == reference.keys()
            wrong = [key for key, value in reference.items() if not same(value, found[key])]
            assert not wrong, (case, place, wrong)
            if not whole:
                for p in optimizer.param_groups[0]["params"]:
                    state = swapper.of(optimizer).state(p) if swaps else optimizer.state[p]
                    assert all(
                        isinstance(value, DTensor) and value.placements == p.placements
                        for value in state.values()
                        if isinstance(value, torch.Tensor) and value.dim()
                    )
            if whole or place in places_of(case):
                step(net, optimizer, 2)
            close(optimizer, net)


def use_muon(rank: int, directory: str, nvme: str) -> None:
    """A class that computes across elements, and one whose state is sharded otherwise than the parameter."""
    module, whole = nn.Module(), nn.Module()
    for i, shape in enumerate([(301, 33), (33, 301)]):
        for each in (module, whole):
            each.register_parameter(str(i), nn.Parameter(torch.randn(shape)))
    fully_shard(module)
    optimizer = torch.optim.Muon(module.parameters(), lr=1e-2)
    across = Across([p for p in module.parameters() if p.shape[0] == 301])
    for each in (optimizer, across):
        swapper.wrap_optimizer(each, config_of(nvme))

    def steps(seeds: range, *those: torch.optim.Optimizer) -> None:
        for seed in seeds:
            for p in module.parameters():
                gradient = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
                p.grad = distribute_tensor(gradient, p.device_mesh, p.placements)  # type: ignore[attr-defined]
            for each in those:
                each.step()

    path = f"{directory}/muon"
    steps(range(2), optimizer)
    saved = everything(module, optimizer)
    swapper.save_checkpoint(path, module, optimizer)
    steps(range(2, 4), optimizer)
    ended = everything(module, optimizer)
    steps(range(1), across)
    with pytest.raises(swapper.SwapError, match=r"state 'rows'.*torch.distributed.checkpoint"):
        swapper.save_checkpoint(path, module, across)
    swapper.load_checkpoint(path, module, optimizer)
    found = everything(module, optimizer)
    assert all(same(value, found[key]) for key, value in saved.items())
    (value,) = swapper.of(optimizer).state(module.get_parameter("0")).values()
    assert isinstance(value, DTensor)
    steps(range(2, 4), optimizer)
    found = everything(module, optimizer)
    assert all(same(value, found[key]) for key, value in ended.items())
    alone = torch.optim.Muon(whole.parameters(), lr=1.0)
    swapper.load_checkpoint(path, whole, alone)
    found = everything(whole, alone)
    assert all(same(value, found[key]) for key, value in saved.items())
    close(optimizer)
    close(across)


def use_files(rank: int, directory: str, nvme: str) -> None:
    """Several optimizers and groups, tied and frozen parameters, keep_last, the command line and exports."""
    torch.manual_seed(0)
    a, b, c, d = (nn.Linear(40, 40, bias=i != 2) for i in range(4))
    norm = nn.BatchNorm1d(40)
    d.weight = a.weight
    b.requires_grad_(False)
    net = nn.Sequential(a, b, c, d, norm)
    for module in (b, c, net):
        fully_shard(module)
    mean = norm.running_mean
    assert mean is not None
    mean.fill_(rank)
    ps = [a.weight, a.bias, c.weight, norm.weight]
    optimizers = [
        torch.optim.AdamW([{"params": ps[:1]}, {"params": ps[1:2], "lr": 0.5}]),
        torch.optim.SGD(ps[2:], lr=0.1, momentum=0.9),
    ]
    for each in optimizers:
        swapper.wrap_optimizer(each, config_of(nvme, checkpoint={"keep_last": 2}))
    for number in range(4):
        for p in ps:
            p.grad = p.detach() * 2  # type: ignore[assignment]
        for each in optimizers:
            each.step()
        swapper.save_checkpoint(
            f"{directory}/step-{number}", net, optimizers, {"rank": rank, "noise": torch.ones(5000)}
        )
    assert sorted(os.listdir(directory)) == ["step-2", "step-3"]
    expected = {name: full(value).clone() for name, value in net.state_dict().items()}
    states = [
        {n: {key: full(value) for key, value in entries.items()} for n, entries in each.state_dict()["state"].items()}
        for each in optimizers
    ]
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
        mean.zero_()
    extra = swapper.load_checkpoint(f"{directory}/step-3", net, optimizers)
    assert extra["rank"] == rank and torch.equal(extra["noise"], torch.ones(5000))
    assert torch.equal(mean, torch.full((40,), float(rank)))
    torch.distributed.barrier()
    if rank == 0:
        use_command_line(f"{directory}/step-3", expected, states)
    torch.distributed.barrier()
    for each in optimizers:
        close(each)


def use_command_line(path: str, expected: dict[str, torch.Tensor], states: list[dict[int, dict[str, Any]]]) -> None:
    runner = CliRunner()
    result = runner.invoke(app, ["checkpoint", "verify", path])
    assert result.exit_code == 0, result.output
    result = runner.invoke(app, ["checkpoint", "show", path, "--json"])
    shown = json.loads(result.output)
    assert shown["model"]["tensors"] == len(expected) - 1  # One is tied.
    assert [each["parameters"] for each in shown["optimizers"]] == [2, 2]
    assert {kind["kind"] for kind in shown["files"]} <= {
        "parameters and buffers in memory",
        "small tensors",
        "records of optimizer 0",
        "records of optimizer 1",
    }
    for to, name in (("torch", "a.pt"), ("safetensors", "tensors"), ("dcp", "dcp")):
        result = runner.invoke(app, ["checkpoint", "export", path, f"{path}-{name}", "--to", to])
        assert result.exit_code == 0, result.output
        # Its buffer is another on each rank, and so is extra.
        assert "what rank 0 had: 4.running_mean, extra" in " ".join(result.output.split())
    whole = torch.load(f"{path}-a.pt", weights_only=False)
    assert whole["model"].keys() == expected.keys()
    assert all(same(whole["model"][name], value) for name, value in expected.items())
    for state, found in zip(states, whole["optimizer"], strict=True):
        for number, entries in state.items():
            assert all(same(found["state"][number][key], value) for key, value in entries.items())
    tensors = safetensors.torch.load_file(f"{path}-tensors/model.safetensors")
    assert all(same(value, expected[name]) for name, value in tensors.items()) and len(tensors) == len(expected) - 1
    with Path(path, "model-r1-memory.safetensors").open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"\x55")
    result = runner.invoke(app, ["checkpoint", "verify", path])
    assert result.exit_code == 1 and "model-r1-memory.safetensors is damaged" in result.output


def shards(value: float, *shape: int) -> nn.Parameter:
    mesh = init_device_mesh("cpu", (2,))
    return nn.Parameter(distribute_tensor(torch.full(shape or (8, 4), value), mesh, [Shard(0)]))


class Remembering(nn.ParameterDict):
    """Has extra state."""

    state: Any = None

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def use_odd_models(rank: int, directory: str, nvme: str) -> None:
    """Tied only when it was saved; what differs from rank to rank; names that parts would have."""
    tied, net = Remembering({"a": shards(1.0)}), Remembering({"a": shards(0.0), "b": shards(0.0)})
    tied["b"] = tied["a"]
    for each in (tied, net):
        each.register_buffer("own", torch.full((3 + rank,), float(rank)))
        each.register_buffer("empty", torch.empty(0, 3 + rank))
    swapper.save_checkpoint(f"{directory}/tied", tied)
    net.own.zero_()
    one = torch.ones(2 + rank)
    for state in (rank, {"rank": rank, "noise": torch.full((5,), rank)}, (one, 3)[rank], (3, one)[rank], one, "same"):
        tied.state, net.state = state, None
        swapper.save_checkpoint(f"{directory}/tied", tied)
        swapper.load_checkpoint(f"{directory}/tied", net)
        assert bits(net.state) == bits(state), (net.state, state)
    assert all(same(full(net[name]), torch.ones(8, 4)) for name in "ab")
    assert same(net.own, tied.own)
    for name, value in (("a@0,0", torch.ones(5)), ("own@r1", torch.ones(5))):
        net.register_parameter(name, nn.Parameter(value))
        with pytest.raises(swapper.SwapError, match=f"{name} is the name of a tensor of the model"):
            swapper.save_checkpoint(f"{directory}/names", net)
        del net._parameters[name]
    assert not os.path.exists(f"{directory}/names")


def mixed(seed: int = 0) -> nn.Sequential:
    """Shards of two dtypes, uneven and empty ones, tied and frozen ones, and a buffer that is on the drive as well."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(40, 301), nn.Linear(301, 40, bias=False).bfloat16(), nn.Linear(40, 1))
    net.append(nn.Linear(40, 301, bias=False).requires_grad_(False))
    net.register_module("tied", nn.Linear(40, 1))
    net.tied.weight = net[2].weight  # type: ignore[union-attr]
    net.register_buffer("table", torch.randn(20_000))
    for module in (net[0], net[1], net):
        fully_shard(module)
    return net


def use_records(rank: int, directory: str, nvme: str) -> None:
    """What is on the drive when it is saved: changed by user code, stepped just now, with gradients that wait."""
    config = config_of(nvme, offload_param={"device": "nvme"})

    def trained() -> tuple[nn.Sequential, torch.optim.Optimizer]:
        net = mixed()
        optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
        swapper.offload(net, optimizer, config)
        return net, optimizer

    def give_gradients(net: nn.Module, seed: int) -> None:
        for p in net.parameters():
            if p.requires_grad:
                gradient = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)).to(p.dtype)
                p.grad = distribute_tensor(gradient, p.device_mesh, p.placements)  # type: ignore[attr-defined]

    def change(net: nn.Sequential) -> None:
        with torch.no_grad():
            net[0].weight.to_local().mul_(1.5)  # type: ignore[operator, union-attr]
            net[1].weight.add_(1)  # type: ignore[operator]
            net[2].weight.data.sub_(0.25)  # type: ignore[union-attr]
            net.table.mul_(2)  # type: ignore[operator, union-attr]

    path = f"{directory}/saved"
    net, optimizer = trained()
    twin, reference = trained()
    for number in range(3):
        for model, each in ((net, optimizer), (twin, reference)):
            give_gradients(model, number)
            each.step()
            change(model)
            give_gradients(model, number + 10)
        swapper.save_checkpoint(path, net, optimizer)  # Over the one before, in whose files training goes on.
        assert [name for name in os.listdir(path) if name.startswith(f"model-r{rank}-0")]
        torch.distributed.barrier()
        fresh, other = trained()
        swapper.load_checkpoint(path, fresh, other)
        expected, found = everything(net, optimizer), everything(fresh, other)
        assert expected.keys() == found.keys()
        assert not [name for name, value in expected.items() if not same(value, found[name])]
        whole = mixed(seed=1)
        swapper.load_checkpoint(path, whole)
        assert all(same(p, q) for p, q in zip(whole.parameters(), net.parameters(), strict=True))
        assert same(whole.table, net.table)
        close(other, fresh)
        optimizer.step()
        reference.step()
        expected, found = everything(twin, reference), everything(net, optimizer)
        assert not [name for name, value in expected.items() if not same(value, found[name])]
    # What is in memory by now is written; what a record has besides it too.
    net[0].weight = nn.Parameter(net[0].weight.detach().clone() * 2, requires_grad=False)
    swapper.save_checkpoint(path, net)
    torch.distributed.barrier()
    whole = mixed(seed=1)
    whole[0].weight.requires_grad_(False)
    swapper.load_checkpoint(path, whole)
    assert same(whole[0].weight, net[0].weight) and same(whole[0].bias, net[0].bias)
    for each, model in ((optimizer, net), (reference, twin)):
        close(each, model)


def save_in_backward(rank: int, directory: str, nvme: str) -> None:
    """Steps that backward makes are over when it is: before that all ranks refuse, and training goes on."""
    twins = []
    for _ in range(2):
        net = sharded(Case(torch.optim.AdamW, {}))
        net.never.requires_grad_(False)
        optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
        config = config_of(nvme, in_backward=True, offload_param={"device": "nvme"})
        swapper.offload(net, optimizer, config)
        twins.append((net, optimizer))
    (net, optimizer), (twin, reference) = twins
    for seed in range(2):
        step(net, optimizer, seed)
        step(twin, reference, seed)
    for each in (net, twin):
        each(torch.ones(4, 33)).backward()
    with pytest.raises(swapper.SwapError, match="step"):
        swapper.save_checkpoint(f"{directory}/saved", net, optimizer)
    for each in (optimizer, reference):
        each.step()
        each.zero_grad()
    swapper.save_checkpoint(f"{directory}/saved", net, optimizer)
    saved = everything(twin, reference)
    for seed in range(2):
        step(net, optimizer, seed)
    swapper.load_checkpoint(f"{directory}/saved", net, optimizer)
    found = everything(net, optimizer)
    assert not [name for name, value in saved.items() if not same(value, found[name])]
    for each, model in ((optimizer, net), (reference, twin)):
        close(each, model)


def save_after_evaluation(rank: int, directory: str, nvme: str) -> None:
    """The outermost module then has whole parameters, which are no DTensors."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(net)
    expected = {name: full(value).clone() for name, value in net.state_dict().items()}
    for loads in (False, True):
        with torch.no_grad():
            net(torch.ones(2, 4))
        assert not any(isinstance(p, DTensor) for p in net.parameters())
        if loads:
            swapper.load_checkpoint(f"{directory}/saved", net)
        else:
            swapper.save_checkpoint(f"{directory}/saved", net)
    assert all(same(full(value), expected[name]) for name, value in net.state_dict().items())


def refuse_what_differs(rank: int, directory: str, nvme: str) -> None:
    """What several ranks have, and a checkpoint has once, is the same on them, or is refused by name on all."""

    def refused(name: str, net: nn.Module, optimizer: Any = None) -> None:
        with pytest.raises(swapper.SwapError, match=name):
            swapper.save_checkpoint(f"{directory}/refused", net, optimizer)
        torch.distributed.barrier()
        assert os.listdir(directory) == []

    one_each = init_device_mesh("cpu", (2, 1), mesh_dim_names=("experts", "data"))["data"]
    expert = nn.Parameter(distribute_tensor(torch.full((4, 4), float(rank)), one_each, [Shard(0)]))
    refused("expert .*ranks 0 and 1", nn.ParameterDict({"expert": expert}))
    refused(
        "optimizer 0 of rank 1", net := nn.ParameterDict({"a": shards(1.0)}), torch.optim.SGD(net.values(), lr=rank + 1)
    )
    refused("optimizer 0 of rank 1", net, (torch.optim.SGD, torch.optim.Adagrad)[rank](net.values(), lr=1.0))
    for swaps in (False, True):
        net = nn.ParameterDict({"a": shards(1.0), "own": nn.Parameter(torch.full((5000,), float(rank)))})
        optimizer = torch.optim.SGD(net.values(), momentum=0.9)
        if swaps:
            swapper.wrap_optimizer(optimizer, config_of(nvme))
        swapper.save_checkpoint(f"{directory}/without_state", net, optimizer)
        torch.distributed.barrier()
        if rank == 0:
            shutil.rmtree(f"{directory}/without_state")
        torch.distributed.barrier()
        for p in net.values():
            p.grad = torch.ones_like(p)
        optimizer.step()
        refused("own", net, optimizer)
        close(optimizer)


def use_all(rank: int, directory: str, nvme: str) -> None:
    works = use_files, use_muon, use_records, save_in_backward, use_odd_models
    for work in (*works, save_after_evaluation, refuse_what_differs):
        path = f"{directory}/{work.__name__}"
        os.makedirs(path, exist_ok=True)
        work(rank, path, nvme)
        torch.distributed.barrier()


@pytest.mark.long
def test_what_users_do_with_them(nvme_path: Path, tmp_path: Path, leaves_nothing: None) -> None:
    in_processes(use_all, str(tmp_path), str(nvme_path))


def save_on(count: int, tmp_path: Path, nvme_path: Path) -> None:
    in_processes(save_all, str(tmp_path), str(nvme_path), f"by-{count}", count == 0, count=max(count, 1))


def load_on(before: int, after: int, tmp_path: Path, nvme_path: Path) -> None:
    in_processes(load_all, str(tmp_path), str(nvme_path), f"by-{before}", after == 0, count=max(after, 1))


def save_and_load_whole(rank: int, directory: str, nvme: str) -> None:
    save_all(rank, directory, nvme, "both")
    torch.distributed.barrier()
    # As a process of its own does it: nothing that it has is sharded.
    load_all(rank, directory, nvme, "both", whole=True)


@pytest.mark.long
def test_two_ranks_to_one_process(nvme_path: Path, tmp_path: Path, leaves_nothing: None) -> None:
    in_processes(save_and_load_whole, str(tmp_path), str(nvme_path))


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("before", "after"), [(2, 1), (1, 2), (3, 2), (0, 3), (3, 0), *([(2, 3), (0, 2), (4, 2)] if EVERY else [])]
)
def test_checkpoints_are_resharded(
    before: int, after: int, nvme_path: Path, tmp_path: Path, leaves_nothing: None
) -> None:
    """From any number of ranks to any. 0: a model that is not sharded."""
    save_on(before, tmp_path, nvme_path)
    load_on(before, after, tmp_path, nvme_path)
