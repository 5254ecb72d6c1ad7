"""`wrap_optimizer` after `fully_shard`: processes whose optimizer state is on disk, to the bit as plain FSDP2."""

from __future__ import annotations

import copy
import itertools
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling import ALL, EVERY, SEED
from sharded_nets import in_processes
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import swapper
from swapper.config import OffloadConfig
from swapper.dcp import SwapStorageReader, SwapStorageWriter

STEPS = 10


class Across(torch.optim.Optimizer):
    """Divides by the norm of the gradient. Its state is sharded as the parameter, whole, and no tensor."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(count=0, mean=torch.zeros_like(p), rows=p.new_zeros(p.shape[0]))
                state["count"] += 1
                state["mean"].lerp_(p.grad, 0.1)
                rows = p.grad.abs().reshape(p.shape[0], -1).sum(1)
                if isinstance(rows, DTensor):
                    rows = rows.redistribute(placements=state["rows"].placements)
                state["rows"].add_(rows)
                p.sub_(state["mean"] * (group["lr"] / (1 + p.grad.square().sum())))


OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"fused": True, "weight_decay": 0.1}),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.5}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.Rprop, {}),
    (Across, {}),
]

NATIVE = {
    getattr(torch.optim, name)
    for name in ("AdamW", "Adam", "Adadelta", "Adamax", "SGD", "Adagrad", "ASGD", "NAdam", "RAdam", "RMSprop")
}


class Net(nn.Module):
    """301 rows are uneven on two ranks and on three; of one row the second rank has none."""

    def __init__(self, hidden: int = 301) -> None:
        super().__init__()
        self.first = nn.Linear(33, hidden)
        self.second = nn.Linear(hidden, 12, bias=False)
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.never = nn.Linear(12, 5)
        self.norm = nn.LayerNorm(12)
        self.last = nn.Linear(12, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        out: torch.Tensor = self.last(self.norm(self.frozen(x))).square().sum()
        return out


@dataclass
class Case:
    cls: type[torch.optim.Optimizer]
    options: dict[str, Any]
    dtype: torch.dtype = torch.float32
    masters: bool = False
    reshard: bool = True
    mixed: bool = False
    clips: bool = False
    micro_batches: int = 1
    syncs_all: bool = False  # each micro batch; else the last
    mesh: str = "shard"  # or "hybrid", "columns", "tensor": two dimensions, Shard(1), tensor parallelism and FSDP2
    bucket_bytes: str = "48KiB"
    in_backward: bool = False
    gradients: bool = False  # on the drive, too
    native: str = "on"
    packed: bool = False
    steps: int = field(default=STEPS)

    @property
    def by_hand(self) -> bool:
        """Plain FSDP2 cannot do it: these steps fail on DTensors, and there are no masters."""
        fused_sgd = self.cls is torch.optim.SGD and "fused" in self.options
        return self.masters or fused_sgd or self.cls is torch.optim.Rprop

    @property
    def steps_natively(self) -> bool:
        is_float = self.dtype is torch.float32 or self.masters
        return self.native == "on" and is_float and self.cls in NATIVE


def cases(rank_count: int) -> Iterator[Case]:
    """Each class, with settings by chance; with SWAPPER_TESTS=all on two ranks twice."""
    chance = random.Random(f"{SEED} {rank_count}")
    times = (2 if rank_count == 2 else 1) * (1 + EVERY) if ALL else 1
    for _, (cls, options) in itertools.product(range(times), OPTIMIZERS):
        if not ALL and rank_count != 2 and chance.random() < 0.5:
            continue
        broken = cls is torch.optim.SGD and options.get("fused")  # With bf16, in torch 2.13.
        dtype = torch.float32 if broken else chance.choice([torch.float32, torch.bfloat16])
        mesh = chance.choice(["shard", "hybrid", "columns", "tensor"] if cls is not Across else ["shard", "hybrid"])
        together = options.keys() & {"foreach", "fused"}  # Which torch cannot do with DTensors of two meshes.
        in_backward = cls is not Across and chance.random() < 0.4
        yield Case(
            cls,
            options,
            dtype,
            in_backward=in_backward,
            masters=dtype is torch.bfloat16 and cls is not Across and chance.random() < 0.5,
            reshard=chance.random() < 0.5,
            mixed=dtype is torch.float32 and chance.random() < 0.4,
            clips=not in_backward and mesh != "tensor" and chance.random() < 0.5,  # As above.
            micro_batches=chance.choice([1, 1, 2]),
            syncs_all=chance.random() < 0.5,
            mesh="shard" if together and mesh == "tensor" else mesh,
            bucket_bytes=chance.choice(["16KiB", "48KiB"]),
            gradients=chance.random() < 0.4,
            native=chance.choice(["on", "on", "off"]),
            packed=chance.random() < 0.5,
        )


def config_of(
    directory: str,
    *,
    masters: bool = False,
    in_backward: bool = False,
    bucket_bytes: str = "48KiB",
    native: str = "on",
    packed: bool = False,
    **more: Any,
) -> OffloadConfig:
    state = {"device": "nvme", "master_weights": masters, "step_in_backward": in_backward, "native_step": native}
    state["encoding"] = "packed" if packed else "unpacked"
    return OffloadConfig(
        nvme_path=directory, pool_bytes="2MiB", bucket_bytes=bucket_bytes, offload_optimizer=state, **more
    )


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def same(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return type(a) is type(b) and bool(a == b)
    if isinstance(a, DTensor) or isinstance(b, DTensor):
        if not isinstance(a, DTensor) or not isinstance(b, DTensor):
            return False
        if (a.device_mesh, a.placements, a.shape, a.stride()) != (b.device_mesh, b.placements, b.shape, b.stride()):
            return False
        assert a.dtype == b.dtype == local(a).dtype == local(b).dtype
    a, b = (local(each).detach().contiguous().reshape(-1) for each in (a, b))
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def mesh_of(case: Case) -> DeviceMesh:
    count = torch.distributed.get_world_size()
    if case.mesh == "hybrid":
        return init_device_mesh("cpu", (count, 1), mesh_dim_names=("replicate", "shard"))
    if case.mesh == "tensor":
        return init_device_mesh("cpu", (1, count), mesh_dim_names=("data", "tensor"))
    return init_device_mesh("cpu", (count,))


def columns(parameter: nn.Parameter) -> Shard | None:
    """FSDP2 wants those shards even."""
    return Shard(1) if parameter.dim() == 2 and parameter.shape[1] % 12 == 0 else None


def sharded(case: Case) -> Net:
    torch.manual_seed(0)
    net, mesh = Net(300 if case.mesh == "tensor" else 301).to(case.dtype), mesh_of(case)
    if case.mesh == "tensor":
        parallelize_module(net, mesh["tensor"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
        mesh = mesh["data"]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if case.mixed else None
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": case.reshard}
    options |= {"mp_policy": policy} if policy else {}
    options |= {"shard_placement_fn": columns} if case.mesh == "columns" else {}
    for module in (net.first, net):
        fully_shard(module, **options)
    return net


class Twins:
    """A plain and a swapped model, each sharded."""

    def __init__(self, directory: str, case: Case) -> None:
        self.case, self.count = case, 0
        self.models = [sharded(case) for _ in range(2)]
        for model in self.models if case.in_backward else ():
            model.never.requires_grad_(False)  # Else a bucket would wait for it.
        self.parameters = [[p for p in model.parameters() if p.requires_grad] for model in self.models]
        self.masters: list[torch.Tensor] = []
        plain: list[torch.Tensor] = list(self.parameters[0])
        if case.by_hand:
            dtype = torch.float32 if case.masters else case.dtype
            self.masters = plain = [local(p).detach().to(dtype, copy=True).requires_grad_() for p in plain]
        self.optimizers = [case.cls(each, lr=1e-2, **case.options) for each in (plain, self.parameters[1])]
        settings = {"masters": case.masters, "bucket_bytes": case.bucket_bytes, "in_backward": case.in_backward}
        settings |= {"native": case.native, "packed": case.packed}
        count = case.micro_batches if case.syncs_all else 1  # Else FSDP2 adds them up before they arrive.
        gradients = {"offload_gradient": {"device": "nvme"}} if case.gradients else {}
        config = config_of(directory, gradient_accumulation_steps=count, **settings, **gradients)
        assert swapper.wrap_optimizer(self.optimizers[1], config) is self.optimizers[1]

    def backward(self) -> None:
        for i in range(self.case.micro_batches):
            self.count += 1
            generator = torch.Generator().manual_seed(100 * self.count + self.data_rank())
            x = torch.randn(4, 33, generator=generator).to(self.case.dtype)
            for model in self.models:
                syncs = self.case.syncs_all or i + 1 == self.case.micro_batches
                model.set_requires_gradient_sync(syncs)  # type: ignore[operator]
                model(x).backward()

    def data_rank(self) -> int:
        return 0 if self.case.mesh == "tensor" else torch.distributed.get_rank()

    def step(self) -> None:
        if self.case.clips:
            norms = [torch.nn.utils.clip_grad_norm_(self.parameters[0], 0.3)]
            norms.append(swapper.of(self.optimizers[1]).clip_grad_norm_(0.3))
            assert same(*norms)
        for p, master in zip(self.parameters[0], self.masters, strict=False):
            master.grad = None if p.grad is None else local(p.grad).to(master.dtype)
        if self.case.in_backward:
            gone = self.models[1].first.weight.grad
            with pytest.raises(swapper.SwapError, match="the gradient of this parameter is gone"):
                torch.nn.utils.clip_grad_norm_(self.models[1].parameters(), 1.0)
            assert gone is not None and gone.shape == self.models[1].first.weight.shape
        for optimizer in self.optimizers:
            optimizer.step()
        for p, master in zip(self.parameters[0], self.masters, strict=False):
            local(p).detach().copy_(master.detach())
        for model in self.models:
            model.zero_grad()
        for (name, p), q in zip(self.models[0].named_parameters(), self.models[1].parameters(), strict=True):
            assert same(p, q), name

    def compare_state(self) -> None:
        plain, swapped = (optimizer.state_dict() for optimizer in self.optimizers)
        assert plain["state"].keys() == swapped["state"].keys()
        for number, entries in plain["state"].items():
            found = dict(swapped["state"][number])
            if self.case.masters:
                master = found.pop("master_param", None)  # Adagrad has state before there is one.
                assert master is None or same(local(master), self.masters[number])
            assert list(entries) == list(found)
            for key, value in entries.items():
                mine = found[key]
                like = self.parameters[1][number]
                if isinstance(value, torch.Tensor) and value.shape == local(like).shape:
                    assert isinstance(mine, DTensor), key
                    assert (mine.shape, mine.placements) == (like.shape, like.placements)
                assert same(value, local(mine) if self.masters and isinstance(mine, DTensor) else mine), (number, key)


def train(directory: str, case: Case) -> None:
    twins = Twins(directory, case)
    try:
        for step in range(case.steps):
            twins.backward()
            twins.step()
            if step == case.steps // 2:
                twins.compare_state()
                mine = twins.optimizers[1]
                mine.load_state_dict(mine.state_dict())
                if not case.by_hand:
                    mine.load_state_dict(twins.optimizers[0].state_dict())
                    twins.optimizers[0].load_state_dict(mine.state_dict())
        twins.compare_state()
        assert (swapper.of(twins.optimizers[1]).stats().segments_native > 0) == case.steps_natively
        if not case.masters:
            swapper.unwrap_optimizer(twins.optimizers[1])
            twins.compare_state()
            twins.backward()
            if not case.by_hand:
                twins.optimizers[1].step()
    finally:
        if "swapper" in vars(twins.optimizers[1]):
            swapper.of(twins.optimizers[1]).close()


def train_all(rank: int, directory: str) -> None:
    for case in cases(torch.distributed.get_world_size()):
        try:
            train(directory, case)
        except Exception as error:
            error.add_note(f"in rank {rank}: {case}")
            raise


@pytest.mark.long
def test_same_bits_as_plain_fsdp(nvme_path: Path, leaves_nothing: None) -> None:
    in_processes(train_all, str(nvme_path))


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("count", [1, 3])
def test_same_bits_on_other_numbers_of_ranks(nvme_path: Path, count: int, leaves_nothing: None) -> None:
    in_processes(train_all, str(nvme_path), count=count)


# --- What users call -------------------------------------------------------------------------------------------------


def small(case: Case | None = None) -> tuple[Net, torch.optim.AdamW]:
    net = sharded(case or Case(torch.optim.AdamW, {}))
    net.never.requires_grad_(False)  # torch loads no state dict without state of a parameter.
    return net, torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)


def step(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    net(torch.randn(4, 33, generator=torch.Generator().manual_seed(seed))).backward()
    optimizer.step()
    optimizer.zero_grad()


def use_state(rank: int, directory: str) -> None:
    """`optimizer.state`, `swapper.state`, a group that comes later, and state that was there before."""
    (plain, reference), (net, optimizer) = small(), small()
    late = [nn.Linear(12, 7, bias=False) for _ in range(2)]
    late[1].load_state_dict(late[0].state_dict())
    for model in late:
        fully_shard(model)
    for _ in range(2):
        step(plain, reference)
        step(net, optimizer)
    swapper.wrap_optimizer(optimizer, config_of(directory))
    for module, each in zip(late, (reference, optimizer), strict=True):
        each.add_param_group({"params": module.parameters(), "lr": 0.5})
        for p in module.parameters():
            p.grad = distribute_tensor(torch.ones(7, 12), p.device_mesh, p.placements)  # type: ignore[attr-defined]
    for _ in range(2):
        step(plain, reference)
        step(net, optimizer)
    weights = [plain.first.weight, net.first.weight]
    assert weights[1] in optimizer.state
    found, expected = swapper.of(optimizer).state(weights[1]), reference.state[weights[0]]
    assert found.keys() == expected.keys()
    assert all(same(found[key], expected[key]) for key in found)
    optimizer.state[weights[1]] = {key: value * 2 for key, value in found.items()}
    reference.state[weights[0]] = {key: value * 2 for key, value in expected.items()}
    popped = [each.state.pop(model.norm.weight) for each, model in ((reference, plain), (optimizer, net))]
    assert all(same(popped[1][key], value) for key, value in popped[0].items())
    step(plain, reference)
    step(net, optimizer)
    for p, q in zip(
        [*plain.parameters(), *late[0].parameters()], [*net.parameters(), *late[1].parameters()], strict=True
    ):
        assert same(p, q)
    with pytest.raises(ValueError, match="placements"):
        optimizer.state[weights[1]] = {"exp_avg": found["exp_avg"].redistribute(placements=[Shard(1)])}
    with pytest.raises(ValueError, match="placements"):
        optimizer.state[weights[1]] = {"exp_avg": swapper.of(optimizer).state(net.second.weight)["exp_avg"]}
    swapper.of(optimizer).close()


def across_elements(rank: int, directory: str) -> None:
    """Muon, a parameter so large that it is tried in small, and state that is no DTensor of the parameter's shape."""
    for kind, shapes in ((torch.optim.Muon, [(301, 33), (33, 301)]), (Across, [(6, 5), (1, 7), (70001, 4)])):
        optimizers = []
        for _ in range(2):
            torch.manual_seed(0)
            module = nn.Module()
            for i, shape in enumerate(shapes):
                module.register_parameter(str(i), nn.Parameter(torch.randn(shape)))
            fully_shard(module)
            optimizers.append(kind(module.parameters(), lr=1e-2))
        swapper.wrap_optimizer(
            optimizers[1],
            config_of(directory)
            if kind is not Across
            else {"nvme_path": directory, "pool_bytes": "8MiB", "offload_optimizer": {"device": "nvme"}},
        )
        for step_count in range(3):
            for optimizer in optimizers:
                for p in optimizer.param_groups[0]["params"]:
                    generator = torch.Generator().manual_seed(step_count)
                    p.grad = distribute_tensor(torch.randn(p.shape, generator=generator), p.device_mesh, p.placements)
                optimizer.step()
        for p, q in zip(*(each.param_groups[0]["params"] for each in optimizers), strict=True):
            assert same(p, q)
        states = [each.state_dict()["state"] for each in optimizers]
        assert all(same(value, states[1][i][key]) for i in states[0] for key, value in states[0][i].items())
        swapper.of(optimizers[1]).close()


def use_dcp(rank: int, directory: str) -> None:
    """torch's own state dicts for distributed checkpoints, in both directions, of shards and of whole tensors."""
    (plain, reference), (net, optimizer) = small(), small()
    swapper.wrap_optimizer(optimizer, config_of(directory))
    for _ in range(2):
        step(plain, reference)
        step(net, optimizer)
    for options in (
        StateDictOptions(),
        StateDictOptions(full_state_dict=True),
        StateDictOptions(flatten_optimizer_state_dict=True),
    ):
        expected = get_optimizer_state_dict(plain, reference, options=options)
        found = get_optimizer_state_dict(net, optimizer, options=options)
        flat = [
            torch.utils._pytree.tree_leaves(each, is_leaf=lambda x: isinstance(x, torch.Tensor))
            for each in (expected, found)
        ]
        assert all(same(a, b) for a, b in zip(*flat, strict=True))
        other, fresh = small()
        swapper.wrap_optimizer(fresh, config_of(directory))
        set_optimizer_state_dict(other, fresh, expected, options=options)
        state = fresh.state_dict()["state"]
        for number, entries in reference.state_dict()["state"].items():
            assert all(same(state[number][key], value) for key, value in entries.items())
        swapper.of(fresh).close()
    path = f"{directory}/dcp"
    torch.distributed.checkpoint.save({"optimizer": get_optimizer_state_dict(net, optimizer)}, checkpoint_id=path)
    other, fresh = small()
    swapper.wrap_optimizer(fresh, config_of(directory))
    target = {"optimizer": get_optimizer_state_dict(other, fresh)}
    torch.distributed.checkpoint.load(target, checkpoint_id=path)
    set_optimizer_state_dict(other, fresh, target["optimizer"])
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        local(q).detach().copy_(local(p).detach())
    step(net, optimizer)
    step(other, fresh)
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert same(p, q)
    for each in (optimizer, fresh):
        swapper.of(each).close()
    torch.distributed.barrier()
    if rank == 0:
        shutil.rmtree(path)


def _all(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model, state = get_state_dict(net, optimizer)
    return {"model": model, "optimizer": state}


def save_distributed(rank: int, directory: str, nvme: str) -> None:
    for name in ("plain", "swapped"):
        net, optimizer = small()
        if name == "swapped":
            swapper.wrap_optimizer(optimizer, config_of(nvme))
        for _ in range(2):
            step(net, optimizer)
        writer = (
            FileSystemWriter(f"{directory}/plain") if name == "plain" else SwapStorageWriter(f"{directory}/swapped")
        )
        torch.distributed.checkpoint.save(_all(net, optimizer), storage_writer=writer)
        if name == "swapped":
            swapper.of(optimizer).close()


def load_distributed(rank: int, directory: str, nvme: str, shards: bool) -> None:
    results = []
    for source, swaps in itertools.product(("plain", "swapped"), (False, True)):
        torch.manual_seed(1)
        net = Net()
        net.never.requires_grad_(False)
        if shards:
            fully_shard(net)
        optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.5)
        if swaps:
            swapper.wrap_optimizer(optimizer, config_of(nvme))
        target = _all(net, optimizer)
        reader = FileSystemReader(f"{directory}/{source}") if swaps else SwapStorageReader(f"{directory}/{source}")
        torch.distributed.checkpoint.load(target, storage_reader=reader)
        set_state_dict(net, optimizer, model_state_dict=target["model"], optim_state_dict=target["optimizer"])
        step(net, optimizer)
        state = optimizer.state_dict()["state"]
        assert optimizer.param_groups[0]["lr"] == 1e-2
        assert all(entries["step"] == 3 and local(entries["exp_avg"]).isfinite().all() for entries in state.values())
        results.append([*net.parameters(), *(value for entries in state.values() for value in entries.values())])
        if swaps:
            swapper.of(optimizer).close()
    assert len(results[0]) > 20
    for others in results[1:]:
        assert all(same(a, b) for a, b in zip(results[0], others, strict=True))


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (3, 2), (2, 0)])
def test_a_distributed_checkpoint_is_resharded(
    before: int, after: int, nvme_path: Path, tmp_path: Path, leaves_nothing: None
) -> None:
    """Written by plain and by swapped training, it is loaded by both, to the bit. 0: by a model that is not sharded."""
    in_processes(save_distributed, str(tmp_path), str(nvme_path), count=before)
    in_processes(load_distributed, str(tmp_path), str(nvme_path), after > 0, count=max(after, 1))


def step_replicated_gradients(rank: int, directory: str) -> None:
    """Gradients of which each rank has all, as tensor parallelism makes some, and so the state that SGD makes of them.

    Plain PyTorch keeps that whole on each rank; here it is sharded as its parameter.
    """
    classes: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
        (torch.optim.AdamW, {}),
        (torch.optim.Adam, {"foreach": False, "weight_decay": 0.1, "amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.5, "maximize": True}),
        (torch.optim.Adagrad, {}),
    ]
    replicate = torch.distributed.tensor.Replicate()
    line, square = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1))
    kinds = [(line, [Shard(0)]), (line, [Shard(1)]), (square, [Shard(0), replicate]), (square, [replicate, Shard(1)])]

    def full(value: Any) -> Any:
        return value.full_tensor() if isinstance(value, DTensor) else value

    for number, (cls, options) in enumerate(classes):
        dtype = [torch.float32, torch.bfloat16][number % 2]
        made = []
        for _ in range(2):
            generator = torch.Generator().manual_seed(0)
            shapes = [(301, 70), (70, 301), (3, 5), (33, 7)]
            values = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
            parameters = [nn.Parameter(distribute_tensor(v, *kind)) for v, kind in zip(values, kinds, strict=True)]
            made.append((parameters, cls(parameters, lr=1e-2, **options)))
        (plain, reference), (mine, optimizer) = made
        in_backward = number % 2 == 0  # Then they arrive by no backward, and `step()` sees to them.
        swapper.wrap_optimizer(optimizer, config_of(directory, in_backward=in_backward))
        for seed in range(4):
            for p, q in zip(plain, mine, strict=True):
                generator = torch.Generator().manual_seed(seed)
                gradient = torch.randn(p.shape, generator=generator).to(dtype)
                assert isinstance(p, DTensor)
                replicated = distribute_tensor(gradient, p.device_mesh, [replicate] * p.device_mesh.ndim)
                p.grad, q.grad = replicated, replicated.clone()
            for each in (reference, optimizer):
                each.step()
            for p, q in zip(plain, mine, strict=True):  # Also as to their norms: those of parts have other last bits.
                assert isinstance(p.grad, DTensor) and isinstance(q.grad, DTensor)
                assert q.grad.placements == p.grad.placements and same(q.grad, p.grad)
            for each in (reference, optimizer):
                each.zero_grad()
            if seed == 1:  # What is replicated in it is loaded too.
                optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
        for p, q in zip(plain, mine, strict=True):
            assert same(p, q), (cls, p.shape)
            found, expected = swapper.of(optimizer).state(q), reference.state[p]
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                assert same(full(found[key]), full(value)), (cls, key)
        swapper.of(optimizer).close()


def are_refused(rank: int, directory: str) -> None:
    """What does not work is refused on all ranks, by name, with the optimizer as it was."""

    def refuses(message: str, error: type[Exception] = swapper.ConfigError, **more: Any) -> None:
        net, optimizer = small()
        with pytest.raises(error, match=message):
            swapper.wrap_optimizer(optimizer, config_of(directory, **more))
        assert "swapper" not in vars(optimizer)
        step(net, optimizer)

    net, _ = small()
    for whole in (torch.optim.Adafactor([net.first.weight]), torch.optim.Muon([net.last.weight])):  # In torch 2.13.
        with pytest.raises(RuntimeError, match="placement"):
            net.first.weight.grad, net.last.weight.grad = net.first.weight * 2, net.last.weight * 2
            whole.step()
        with pytest.raises(swapper.ConfigError, match=f"{type(whole).__name__} failed in a trial step"):
            swapper.wrap_optimizer(type(whole)(whole.param_groups[0]["params"]), config_of(directory))
    net, optimizer = small()
    across = Across([net.first.weight])
    with pytest.raises(swapper.ConfigError, match="step_in_backward"):
        swapper.wrap_optimizer(across, config_of(directory, in_backward=True))
    alone = nn.Parameter(distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)]))
    not_of_fsdp = torch.optim.SGD([alone], lr=1.0)
    swapper.wrap_optimizer(not_of_fsdp, config_of(directory, in_backward=True))
    with pytest.raises(swapper.ConfigError, match="FSDP2 does not have"):
        alone.sum().backward()
    swapper.of(not_of_fsdp).close()
    swapper.wrap_optimizer(optimizer, config_of(directory))
    # A gradient that is not sharded as its parameter is, before anything is stepped.
    step(net, optimizer)
    before = local(net.second.weight).clone()
    net(torch.ones(1, 33)).backward()
    gradient = net.first.weight.grad
    assert isinstance(gradient, DTensor)
    net.first.weight.grad = gradient.redistribute(placements=[Shard(1)])
    with pytest.raises(swapper.SwapError, match="redistribute"):
        optimizer.step()
    assert same(local(net.second.weight), before)
    net.first.weight.grad = gradient
    optimizer.step()
    swapper.of(optimizer).close()
    partial = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (2,)), [torch.distributed.tensor.Partial()])
    with pytest.raises(swapper.ConfigError, match="Partial"):
        swapper.wrap_optimizer(torch.optim.SGD([nn.Parameter(partial)]), config_of(directory))


class Twice(nn.Module):
    """One layer is used twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.again, self.once = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.again(self.once(torch.tanh(self.again(x)))).sum()
        return out


def twice(directory: str, passes: int = 1, ignored: bool = False) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net: Any = Twice()
    for each in (net.again, net.once):
        fully_shard(each)
    if ignored:
        net.register_parameter("free", nn.Parameter(torch.ones(64, 3)))
        fully_shard(net, ignored_params={net.free})
    else:
        fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    swapper.wrap_optimizer(optimizer, config_of(directory, in_backward=True, gradient_accumulation_steps=passes))
    return net, optimizer


def refuse_what_is_reduced_otherwise(rank: int, directory: str) -> None:
    """What FSDP2 reduces more than once in a backward, or not at all, is said, and what to do is true."""
    x = torch.ones(2, 64)
    net, optimizer = twice(directory)
    net.set_reduce_scatter_unused_params(True)
    with pytest.raises(swapper.SwapError, match=r"set_reduce_scatter_unused_params.*used several times"):
        net(x).backward()
    swapper.of(optimizer).close()
    net, optimizer = twice(directory, 2)
    net.set_reduce_scatter_unused_params(True)
    with pytest.raises(swapper.SwapError, match=r"set_reduce_scatter_unused_params.*used several times"):
        for _ in range(2):
            net(x).backward()
    swapper.of(optimizer).close()
    found = []
    for swapped in (False, True):  # What the error says.
        net, optimizer = twice(directory)
        optimizer = optimizer if swapped else swapper.unwrap_optimizer(optimizer)
        net.set_reduce_scatter_unused_params(True)
        net.again.set_reduce_scatter_unused_params(False, recurse=False)
        for _ in range(2):
            net(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([local(p).detach().clone() for p in net.parameters()])
    assert all(map(torch.equal, *found))
    swapper.of(optimizer).close()
    match = r"FSDP2 does not have beside others.*1 of 5.*\(64, 3\)"
    with pytest.raises(swapper.ConfigError, match=match) as raised:
        twice(directory, ignored=True)
    assert "DistributedDataParallel" not in str(raised.value)


@pytest.mark.long
def test_reductions_that_a_step_in_backward_cannot_go_with_are_named(nvme_path: Path, leaves_nothing: None) -> None:
    in_processes(refuse_what_is_reduced_otherwise, str(nvme_path))


def misuse_steps_in_backward(rank: int, directory: str) -> None:
    def backward(optimizer: torch.optim.Optimizer, net: nn.Module) -> None:
        net(torch.ones(2, 33)).backward()

    net, optimizer = small()
    swapper.wrap_optimizer(optimizer, config_of(directory, in_backward=True))
    backward(optimizer, net)
    p = net.first.weight
    assert isinstance(p, DTensor) and isinstance(p, nn.Parameter)
    twin = copy.deepcopy(p)
    assert type(twin) is DTensor and same(twin, p) and twin.grad is None
    assert same(net.state_dict()["first.weight"], p.detach())
    with pytest.raises(swapper.SwapError, match="gone"):
        p.grad.sum()  # type: ignore[union-attr]
    with pytest.raises(swapper.SwapError, match="a step cannot be skipped"):
        optimizer.zero_grad()
    optimizer.step()
    with pytest.raises(swapper.SwapError, match="the gradient of this parameter is gone"):
        backward(optimizer, net)
    swapper.of(optimizer).close()
    net, optimizer = small()
    swapper.wrap_optimizer(optimizer, config_of(directory, in_backward=True))
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(swapper.ConfigError, match="GradScaler"):
        scaler.scale(net(torch.ones(2, 33))).backward()
    swapper.of(optimizer).close()


def agree(rank: int, directory: str) -> None:
    """What fails on one rank fails on all."""
    for failing in (0, 1):
        net, optimizer = small()
        step(net, optimizer)
        pool = {"pool_bytes": "2MiB" if rank != failing else "4KiB"}
        given = {**pool, "nvme_path": directory, "offload_optimizer": {"device": "nvme"}}
        with pytest.raises(
            swapper.ConfigError, match="^pool_bytes" if rank == failing else f"on rank {failing}: pool_"
        ):
            swapper.wrap_optimizer(optimizer, given)
        optimizer.param_groups[0]["differentiable"] = rank == failing
        with pytest.raises(swapper.ConfigError, match="^AdamW" if rank == failing else f"on rank {failing}: AdamW"):
            swapper.offload(net, optimizer, config_of(directory))
        optimizer.param_groups[0]["differentiable"] = False
        # Later: when directories are made, and the state that is there is moved.
        config = config_of(directory)
        if rank == failing:
            config = config.model_copy(update={"nvme_path": Path(directory) / "gone"})
        with pytest.raises(swapper.SwapIOError, match="gone") as caught:
            swapper.wrap_optimizer(optimizer, config)
        assert ("on rank" in str(caught.value)) == (rank != failing)
        assert "swapper" not in vars(optimizer)
        assert optimizer.state[net.first.weight]["step"] == 1
        step(net, optimizer)
        swapper.wrap_optimizer(optimizer, config_of(directory))
        step(net, optimizer)
        swapper.of(optimizer).close()


def use_all(rank: int, directory: str) -> None:
    for work in (
        use_state,
        across_elements,
        use_dcp,
        step_replicated_gradients,
        are_refused,
        misuse_steps_in_backward,
        agree,
    ):
        try:
            work(rank, directory)
        except Exception as error:
            error.add_note(f"in rank {rank}: {work.__name__}")
            raise
        torch.distributed.barrier()


@pytest.mark.long
def test_state_refusals_and_agreement(nvme_path: Path, leaves_nothing: None) -> None:
    in_processes(use_all, str(nvme_path))
