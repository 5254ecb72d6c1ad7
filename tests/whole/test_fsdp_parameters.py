"""`swapper.offload` after `fully_shard`: shards on disk, with memory that is poisoned when it is given back."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from interrupts import interrupted_at, places_of
from sampling import ALL, SEED
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import swapper
from swapper.config import OffloadConfig
from swapper.parameter import fsdp
from swapper.storage.buffers import Lease
from swapper.tensors.evicted import is_evicted

WIDTH, HIDDEN, BLOCKS = 90, 301, 4


class Block(nn.Module):
    """301 rows are uneven on two ranks and on three; of one row the second rank has none."""

    def __init__(self, checkpoints: bool = False, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, 1)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(x)
        return x + self.down(torch.tanh(self.up(y))) * torch.sigmoid(self.gate(y))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.body, x, use_reentrant=False) if self.checkpoints else self.body(x)
        return out


class Net(nn.Module):
    """The head is tied to the embedding, and one layer is frozen, and one is not used."""

    def __init__(
        self, checkpoints: bool = False, hidden: int = HIDDEN, tied: bool = True, blocks: int = BLOCKS
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block(checkpoints, hidden) for _ in range(blocks))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.never = nn.Linear(WIDTH, 5)
        self.head = nn.Linear(WIDTH, 50, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(self.frozen(x)).float().logsumexp(-1).sum()
        return out


@dataclass
class Case:
    dtype: torch.dtype = torch.float32
    cls: type[torch.optim.Optimizer] = torch.optim.AdamW
    masters: bool = False
    reshard: bool | int = True
    mixed: bool = False
    clips: bool = False
    micro_batches: int = 1
    syncs_all: bool = False  # each micro batch; else the last
    mesh: str = "shard"  # or "hybrid", "columns", "tensor": two dimensions, Shard(1), tensor parallelism and FSDP2
    checkpoints: bool = False
    prefetches: bool = False
    in_backward: bool = False
    evaluates: bool = False
    keeps_unsharded: bool = False  # set_reshard_after_backward(False) between micro batches
    grouped: bool = False  # two blocks in one call of fully_shard
    gradients: bool = False  # on the drive, too
    steps: int = field(default=10)


def cases(count: int, rank_count: int) -> Iterator[Case]:
    chance = random.Random(f"{SEED} {rank_count} parameters")
    yield Case()
    for _ in range(count - 1):
        dtype = chance.choice([torch.float32, torch.bfloat16])
        in_backward = chance.random() < 0.25
        mesh = chance.choice(["shard", "shard", "hybrid", "columns", "tensor"])
        micro_batches = chance.choice([1, 2])
        yield Case(
            dtype,
            chance.choice([torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop]),
            dtype is torch.bfloat16 and chance.random() < 0.5,
            reshard=chance.random() < 0.5,
            mixed=dtype is torch.float32 and chance.random() < 0.5,
            clips=not in_backward and mesh != "tensor" and chance.random() < 0.5,
            micro_batches=micro_batches,
            syncs_all=chance.random() < 0.5,
            mesh=mesh,
            checkpoints=chance.random() < 0.4,
            prefetches=chance.random() < 0.4,
            in_backward=in_backward,
            evaluates=chance.random() < 0.5,
            keeps_unsharded=micro_batches > 1 and chance.random() < 0.5,
            grouped=chance.random() < 0.3,
            gradients=chance.random() < 0.5,
            steps=10 if ALL else 4,
        )


def most_pairs(drawn: list[Case], count: int) -> Iterator[Case]:
    """So many of those drawn: each time the first of those with the most pairs of settings that are not there yet."""
    left, seen = list(drawn), set[Any]()
    for _ in range(count):
        pairs = [set(itertools.combinations(vars(case).items(), 2)) - seen for case in left]
        best = max(range(len(left)), key=lambda i: len(pairs[i]))
        seen |= pairs[best]
        yield left.pop(best)


def config_of(
    directory: str, pool_bytes: int | str = "560KiB", state: dict[str, Any] | None = None, **more: Any
) -> OffloadConfig:
    given = {"offload_optimizer": {"device": "nvme", **(state or {})}, "offload_param": {"device": "nvme"}, **more}
    return OffloadConfig(nvme_path=directory, pool_bytes=pool_bytes, bucket_bytes="16KiB", **given)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def same(a: Any, b: Any) -> bool:
    if isinstance(a, DTensor) != isinstance(b, DTensor):
        return False
    if isinstance(a, DTensor) and (a.placements, a.shape, a.stride()) != (b.placements, b.shape, b.stride()):
        return False
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
    return Shard(1) if parameter.dim() == 2 and parameter.shape[1] % 6 == 0 else None


def sharded(case: Case, seed: int = 0, count: int = BLOCKS) -> Net:
    torch.manual_seed(seed)
    net = Net(case.checkpoints, 300 if case.mesh == "tensor" else HIDDEN, blocks=count).to(case.dtype)
    mesh = mesh_of(case)
    if case.mesh == "tensor":
        for block in net.blocks:
            parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = mesh["data"]
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": case.reshard}
    if case.mixed:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if case.mesh == "columns":
        options["shard_placement_fn"] = columns
    blocks = list(net.blocks)
    if case.grouped:
        fully_shard(blocks[:2], **options)
        blocks = blocks[2:]
    for module in (*blocks, net):
        fully_shard(module, **options)
    if case.prefetches:
        for first, second in itertools.pairwise(blocks):
            assert isinstance(first, FSDPModule) and isinstance(second, FSDPModule)
            first.set_modules_to_forward_prefetch([second])
            second.set_modules_to_backward_prefetch([first])
    return net


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """What is given back to the pool is overwritten: a float is NaN then."""
    release = Lease.release

    def poison(lease: Lease) -> None:
        if not lease.released and (lease.transfer is None or lease.transfer.done()):
            lease.tensor.fill_(0xFF)
        release(lease)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lease, "release", poison)
        yield


class Twins:
    """A plain and a swapped model, each sharded."""

    def __init__(self, directory: str, case: Case, **more: Any) -> None:
        self.case, self.count = case, 0
        self.models = [sharded(case) for _ in range(2)]
        if case.in_backward:
            for model in self.models:  # Else a bucket would wait for it.
                model.never.requires_grad_(False)
        self.parameters = [[p for p in model.parameters() if p.requires_grad] for model in self.models]
        self.masters: list[torch.Tensor] = []
        plain: list[torch.Tensor] = list(self.parameters[0])
        if case.masters:
            self.masters = plain = [local(p).detach().to(torch.float32, copy=True).requires_grad_() for p in plain]
        self.optimizers = [case.cls(each, lr=1e-2) for each in (plain, self.parameters[1])]
        state = {"master_weights": case.masters, "step_in_backward": case.in_backward}
        count = case.micro_batches if case.syncs_all else 1
        more |= {"gradient_accumulation_steps": count, "state": state}
        if case.gradients:
            more["offload_gradient"] = {"device": "nvme"}
        given = config_of(directory, "64MiB", **more)
        with contextlib.redirect_stdout(None):
            needed_bytes = swapper.check(self.models[1], self.optimizers[1], given).pool_needed_bytes
        swapper.offload(self.models[1], self.optimizers[1], config_of(directory, needed_bytes, **more))
        self.swapper = self.models[1].swapper
        assert isinstance(self.swapper, swapper.ParameterSwapper)
        assert set(self.swapper.stays.values()) <= {"it is empty"}

    def train(self) -> None:
        for i in range(self.case.micro_batches):
            self.count += 1
            last = i + 1 == self.case.micro_batches
            rank = 0 if self.case.mesh == "tensor" else torch.distributed.get_rank()
            tokens = torch.randint(50, (2, 5), generator=torch.Generator().manual_seed(100 * self.count + rank))
            losses = []
            for model in self.models:
                assert isinstance(model, FSDPModule)
                if self.case.evaluates:
                    with torch.no_grad():
                        losses.append(model(tokens))
                model.set_requires_gradient_sync(self.case.syncs_all or last)
                model.set_reshard_after_backward(last or not self.case.keeps_unsharded)
                losses.append(model(tokens))
                losses[-1].backward()
            half = len(losses) // 2
            assert all(map(same, losses[:half], losses[half:]))
        if self.case.clips:
            norms = [torch.nn.utils.clip_grad_norm_(self.parameters[0], 0.3)]
            norms.append(swapper.of(self.optimizers[1]).clip_grad_norm_(0.3))
            assert same(*norms)
        for p, master in zip(self.parameters[0], self.masters, strict=False):
            master.grad = None if p.grad is None else local(p.grad).to(master.dtype)
        for optimizer in self.optimizers:
            optimizer.step()
        for p, master in zip(self.parameters[0], self.masters, strict=False):
            local(p).detach().copy_(master.detach())
        for model in self.models:
            model.zero_grad()

    def compare(self) -> None:
        for (name, p), q in zip(self.models[0].named_parameters(), self.models[1].parameters(), strict=True):
            assert is_evicted(local(q)) or not local(q).numel(), name
            assert same(p, q), name

    def close(self) -> None:
        self.swapper.close()
        swapper.of(self.optimizers[1]).close()


def train_cases(rank: int, directory: str, count: int) -> None:
    for case in most_pairs(list(cases(max(count, 30 if ALL else 0), torch.distributed.get_world_size())), count):
        try:
            with poisoned():
                twins = Twins(directory, case)
                for step in range(case.steps):
                    twins.train()
                    if step in (0, case.steps - 1):
                        twins.compare()
                plan = twins.swapper.plan
                assert twins.swapper.stats().bytes_read or plan.kept_bytes < plan.needs.least_bytes + (64 << 10)
                twins.close()
        except Exception as error:
            error.add_note(f"in rank {rank}: {case}")
            raise


def _worker(rank: int, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.distributed.init_process_group("gloo")
    try:
        work(rank, *args)
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()


def in_processes(work: Callable[..., None], *args: object, count: int = 2) -> None:
    ranks.in_processes(_worker, work, args, ranks=count)


def test_same_bits_as_plain_fsdp(nvme_path: Path, leaves_nothing: None) -> None:
    in_processes(train_cases, str(nvme_path), 30 if ALL else 2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("count", [1, 3])
def test_same_bits_on_other_numbers_of_ranks(nvme_path: Path, count: int, leaves_nothing: None) -> None:
    in_processes(train_cases, str(nvme_path), 12 if ALL else 4, count=count)


# --- What users call -------------------------------------------------------------------------------------------------


def pair(directory: str, config: OffloadConfig | None = None) -> tuple[Net, Net]:
    """A plain model and one whose shards are on disk."""
    plain, net = (sharded(Case()) for _ in range(2))
    swapper.offload(net, config=config or config_of(directory))
    return plain, net


def loss_of(net: nn.Module, seed: int = 0) -> torch.Tensor:
    out: torch.Tensor = net(torch.randint(50, (2, 5), generator=torch.Generator().manual_seed(seed)))
    return out


def all_same(plain: dict[str, Any], mine: dict[str, Any]) -> bool:
    return list(plain) == list(mine) and all(
        same(value, mine[name]) if isinstance(value, torch.Tensor) else value == mine[name]
        for name, value in plain.items()
    )


def use_state_dicts(rank: int, directory: str) -> None:
    plain, net = pair(directory)
    expected, found = plain.state_dict(), net.state_dict()
    assert all_same(expected, found)
    for name, value in found.items():
        assert isinstance(value, DTensor), name
        assert torch.equal(value.full_tensor(), expected[name].full_tensor()), name
        assert torch.equal(value.to_local(), expected[name].to_local()), name
    for options in (StateDictOptions(), StateDictOptions(full_state_dict=True, cpu_offload=True)):
        assert all_same(get_model_state_dict(plain, options=options), get_model_state_dict(net, options=options))
    # Others' values, of shards and of whole tensors.
    other = sharded(Case(), seed=1)
    net.load_state_dict(other.state_dict())
    assert same(loss_of(net), loss_of(other))
    assert all_same(other.state_dict(), net.state_dict())
    whole = StateDictOptions(full_state_dict=True)
    set_model_state_dict(net, get_model_state_dict(plain, options=whole), options=whole)
    assert same(loss_of(net), loss_of(plain))
    set_model_state_dict(net, get_model_state_dict(other))
    assert same(loss_of(net), loss_of(other))
    assert all(is_evicted(local(p)) or not local(p).numel() for p in net.parameters())
    # A state dict follows the parameters, as any does.
    with torch.no_grad():
        net.blocks[0].up.weight.mul_(2)
        other.blocks[0].up.weight.mul_(2)
    assert all_same(other.state_dict(), found | {})
    net.swapper.close()  # type: ignore[operator, union-attr]


def use_distributed_checkpoints(rank: int, directory: str) -> None:
    (plain, net), (_, fresh) = pair(directory, config=(config := config_of(directory))), pair(directory)
    path = f"{directory}/dcp"
    torch.distributed.checkpoint.save({"model": get_model_state_dict(net)}, checkpoint_id=path)
    with torch.no_grad():
        for p in fresh.parameters():
            p.zero_()
    target = {"model": get_model_state_dict(fresh)}
    torch.distributed.checkpoint.load(target, checkpoint_id=path)
    set_model_state_dict(fresh, target["model"])
    assert all_same(plain.state_dict(), fresh.state_dict())
    for model in (plain, net):  # torch loads no state dict without state of a parameter.
        model.never.requires_grad_(False)
    optimizers = [torch.optim.AdamW(p for p in each.parameters() if p.requires_grad) for each in (plain, net)]
    swapper.offload(net, optimizers[1], config)
    for model, optimizer in zip((plain, net), optimizers, strict=True):
        loss_of(model).backward()
        optimizer.step()
    states = [get_state_dict(*each) for each in zip((plain, net), optimizers, strict=True)]
    assert all_same(states[0][0], states[1][0])
    set_state_dict(net, optimizers[1], model_state_dict=states[0][0], optim_state_dict=states[0][1])
    assert all_same(plain.state_dict(), net.state_dict())
    for each in (net.swapper, fresh.swapper, swapper.of(optimizers[1])):
        each.close()  # type: ignore[operator, union-attr]
    torch.distributed.barrier()
    if rank == 0:
        shutil.rmtree(path)


def use_parameters(rank: int, directory: str) -> None:
    """What user code does to shards at any time: it has their values, and changes are kept."""
    plain, net = pair(directory)
    for _ in range(2):
        for model in (plain, net):
            with torch.no_grad():
                weight = model.blocks[1].up.weight
                weight.add_(1)
                weight.to_local().mul_(1.5)
                model.blocks[2].norm.weight.copy_(model.blocks[1].norm.weight * 3)
                model.embed.weight.data.sub_(0.25)
        assert same(loss_of(plain), loss_of(net))
    parameters = [[p for p in model.parameters() if p.requires_grad] for model in (plain, net)]
    norms = [torch.nn.utils.get_total_norm(each, foreach=False) for each in parameters]
    assert torch.equal(*(norm.full_tensor() for norm in norms))  # type: ignore[attr-defined]
    with pytest.raises(swapper.SwapError, match="in use at once"):
        torch.nn.utils.get_total_norm(parameters[1])
    for p, q in zip(plain.parameters(), net.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q.full_tensor())  # type: ignore[attr-defined]
        assert (p + 1).sum().full_tensor() == (q + 1).sum().full_tensor()  # type: ignore[attr-defined]
    with swapper.gathered(net.blocks[0]):
        assert not any(is_evicted(local(p)) for p in net.blocks[0].parameters())
        local(net.blocks[0].up.bias).fill_(2)
    local(plain.blocks[0].up.bias).fill_(2)
    assert same(loss_of(plain), loss_of(net))
    # Plain optimizers, and one that is wrapped later.
    optimizers = [torch.optim.AdamW(each, lr=1e-2, foreach=False) for each in parameters]
    for _ in range(2):
        for model, optimizer in zip((plain, net), optimizers, strict=True):
            loss_of(model).backward()
            optimizer.step()
            model.zero_grad()
    assert all_same(plain.state_dict(), net.state_dict())
    # A forward that fails, between what unshards and what reshards.
    for model in (plain, net):
        forward = model.blocks[2].forward
        model.blocks[2].forward = None  # type: ignore[assignment]
        with pytest.raises(TypeError):
            loss_of(model)
        model.blocks[2].forward = forward  # type: ignore[method-assign]
        model.reset_iter_state()  # type: ignore[operator]
    assert same(loss_of(plain), loss_of(net))
    # By hand.
    for model in (plain, net):
        for block in model.blocks:
            block.unshard()  # type: ignore[operator]
        model.unshard(async_op=True)  # type: ignore[operator]
    assert same(loss_of(plain), loss_of(net))
    for model in (plain, net):
        for each in (*model.blocks, model):
            each.reshard()  # type: ignore[operator]
    # Closed, it is a plain one.
    net.swapper.close(keep_values=True)  # type: ignore[operator, union-attr]
    assert not any(is_evicted(local(p)) for p in net.parameters())
    assert type(net._get_fsdp_state()._fsdp_param_groups[0]).__module__.startswith("torch.")  # type: ignore[operator]
    for _ in range(2):
        for model, optimizer in zip((plain, net), optimizers, strict=True):
            loss_of(model).backward()
            optimizer.step()
            model.zero_grad()
    assert all_same(plain.state_dict(), net.state_dict())
    # And it can be offloaded again, with another model's values, which is closed without them.
    swapper.offload(net, config=config_of(directory))
    net.load_state_dict(sharded(Case(), seed=3).state_dict(), assign=True)  # In memory from now on, as of any model.
    assert same(loss_of(net), loss_of(sharded(Case(), seed=3)))
    net.swapper.close()  # type: ignore[operator, union-attr]
    _, net = pair(directory)
    net.swapper.close()  # type: ignore[operator, union-attr]
    for use in (lambda: loss_of(net), lambda: net.blocks[0].up.weight + 1, lambda: net.state_dict()["head.weight"] + 1):
        with pytest.raises(swapper.SwapError, match="closed"):
            use()


def train_alike(plain: nn.Module, net: nn.Module) -> None:
    for model in (plain, net):
        model.zero_grad()
        loss_of(model).backward()
        for each in model.modules():
            if isinstance(each, FSDPModule):
                each.reshard()
    for (name, p), q in zip(plain.named_parameters(), net.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or same(p.grad, q.grad), name


def change_before_the_first_forward(rank: int, directory: str) -> None:
    """FSDP2 finds dtypes, and what is trained, in the first forward."""
    plain, net = pair(directory)
    for model in (plain, net):
        model.bfloat16()
    train_alike(plain, net)
    net.swapper.close()  # type: ignore[operator, union-attr]
    plain, net = (Net() for _ in range(2))
    net.load_state_dict(plain.state_dict())
    for model in (plain, net):
        fully_shard(model.blocks[0].requires_grad_(False), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
        fully_shard(model)
    swapper.offload(net, config=config_of(directory, "2MiB"))
    for model in (plain, net):
        model.blocks[0].requires_grad_(True)
    train_alike(plain, net)
    net.swapper.close()  # type: ignore[operator, union-attr]


def keep_shards_on_the_drive(rank: int, directory: str) -> None:
    """What gives parameters tensors that `detach` made of the shards moves none of them."""
    plain, net = pair(directory)
    uses: list[Callable[[Any], object]] = [
        lambda model: model.to("cpu"),
        lambda model: model.blocks[1].up.float(),
        lambda model: model.load_state_dict(model.state_dict(), assign=True),
    ]
    for use in uses:
        for model in (plain, net):
            use(model)
        train_alike(plain, net)
        assert all(is_evicted(local(p)) or not local(p).numel() for p in net.parameters())
    net.blocks[1].up.float()
    state = net.state_dict()
    net.swapper.close(keep_values=True)  # type: ignore[operator, union-attr]
    assert all(type(local(p)) is torch.Tensor for p in net.parameters())
    for model in (plain, net):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(2)
    assert all_same(plain.state_dict(), net.state_dict())
    assert all_same(plain.state_dict(), state)
    swapper.offload(net, config=config_of(directory))
    train_alike(plain, net)
    # What is saved while training goes on is what was there.
    saved = {name: value.clone() for name, value in plain.state_dict().items()}
    path, group = f"{directory}/dcp", torch.distributed.new_group()
    saving = torch.distributed.checkpoint.async_save(net.state_dict(), checkpoint_id=path, process_group=group)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(1)
    saving.result()  # type: ignore[union-attr]
    found = sharded(Case(), seed=1).state_dict()
    torch.distributed.checkpoint.load(found, checkpoint_id=path)
    assert all_same(saved, found)
    net.swapper.close()  # type: ignore[operator, union-attr]
    torch.distributed.barrier()
    if rank == 0:
        shutil.rmtree(path)


def are_refused(rank: int, directory: str) -> None:
    def refuses(net: nn.Module, message: str, **more: Any) -> None:
        parameters = dict(net.named_parameters())
        with pytest.raises(swapper.ConfigError, match=message):
            swapper.offload(net, config=config_of(directory, **more))
        assert "swapper" not in vars(net)
        assert all(parameters[name] is p and not is_evicted(local(p)) for name, p in net.named_parameters())

    plain = sharded(Case())
    net = Net()
    fully_shard(net, offload_policy=CPUOffloadPolicy(pin_memory=False))
    refuses(net, "CPUOffloadPolicy")
    alone = nn.Linear(4, 4)
    alone.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)]))
    refuses(alone, "weight, a DTensor that FSDP2 does not have")
    net = sharded(Case())
    refuses(net, "pool_bytes", pool_bytes="64KiB")
    with pytest.raises(swapper.ConfigError, match="DTensor"):
        swapper.offload(net, config=config_of(directory), weights=directory)
    assert swapper.check(net, config=config_of(directory)).parameter_bytes
    # Another torch.
    internals = torch.distributed.fsdp._fully_shard
    version = f"torch {torch.__version__}".replace("+", r"\+")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(internals._fsdp_param.FSDPParam, "reset_sharded_param", lambda self, other: None)
        fsdp.check_names.cache_clear()
        refuses(net, version)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(internals._fsdp_param_group.FSDPParamGroup, "unshard")
        refuses(net, version)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fsdp._USERS, "_sharded_param_data", {"FSDPParam.all_gather_inputs"})
        refuses(net, "_sharded_param_data, used by FSDPParam")
    fsdp.check_names.cache_clear()
    # One rank alone.
    for failing in (0, 1):
        more = {"pool_bytes": "64KiB"} if rank == failing else {}
        refuses(net, "^pool_bytes" if rank == failing else f"on rank {failing}: pool_", **more)
        given: Any = "no.yaml" if rank == failing else config_of(directory)
        with pytest.raises(swapper.ConfigError, match=f"{'' if rank == failing else f'on rank {failing}: .*'}no.yaml"):
            swapper.offload(net, config=given)
    assert same(loss_of(net), loss_of(plain))
    swapper.offload(net, config=config_of(directory))
    net.swapper.close()  # type: ignore[operator, union-attr]


def use_all(rank: int, directory: str) -> None:
    works = use_state_dicts, use_distributed_checkpoints, use_parameters, are_refused
    for work in (*works, change_before_the_first_forward, keep_shards_on_the_drive):
        try:
            with poisoned():
                work(rank, directory)
        except Exception as error:
            error.add_note(f"in rank {rank}: {work.__name__}")
            raise
        torch.distributed.barrier()


def test_state_dicts_uses_and_refusals(nvme_path: Path, leaves_nothing: None) -> None:
    in_processes(use_all, str(nvme_path))


def reshard_to_fewer(rank: int, directory: str) -> None:
    plain, net = (sharded(Case(reshard=2)) for _ in range(2))
    with torch.no_grad():
        loss_of(net)  # Blocks have what two ranks have of them.
    swapper.offload(net, config=config_of(directory))
    train_alike(plain, net)
    net.swapper.close()  # type: ignore[operator, union-attr]


@pytest.mark.thorough("by default: two ranks")
def test_offload_of_what_was_resharded_to_fewer_ranks(nvme_path: Path, leaves_nothing: None) -> None:
    in_processes(reshard_to_fewer, str(nvme_path), count=4)


def interrupt(rank: int, directory: str, test: str) -> None:
    os.environ["PYTEST_CURRENT_TEST"] = test
    plain, net = (sharded(Case()) for _ in range(2))
    swapper.offload(net, config=config_of(directory, "2MiB"))
    assert isinstance(net.swapper, swapper.ParameterSwapper)

    def use() -> None:
        with torch.no_grad():
            loss_of(net)
        for each in (*net.blocks, net):
            each.reshard()  # type: ignore[operator]

    use()
    for place in places_of(use, "parameter/fsdp.py", sample=None if ALL else 15):
        assert interrupted_at(place, use, "parameter/fsdp.py"), place
        net.reset_iter_state()  # type: ignore[operator]
        use()
        assert not any(held.holds or held.attached for held in net.swapper._all), place
    train_alike(plain, net)
    net.swapper.close()


def test_interrupts_leave_nothing_in_memory(nvme_path: Path, leaves_nothing: None) -> None:
    in_processes(interrupt, str(nvme_path), os.environ["PYTEST_CURRENT_TEST"], count=1)


# --- Memory ----------------------------------------------------------------------------------------------------------

SIDE = 512
LAYER_BYTES = 4 * SIDE * SIDE
POOL_BYTES = 3 << 20


class Layer(nn.Module):
    """Notes the most memory that this process has while one of them runs."""

    peak_bytes = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIDE, SIDE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Layer.peak_bytes = max(Layer.peak_bytes, memory_bytes())
        return x + torch.tanh(self.linear(x))


def memory_bytes() -> int:
    """Of this process, without files that it has mapped."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def count_memory(rank: int, directory: str) -> None:
    m_mmap_threshold = -3
    ctypes.CDLL(None).mallopt(m_mmap_threshold, 1 << 16)  # What is freed goes back at once.
    grown = []
    for count in (2, 4, 32):  # The first makes threads, and what torch makes once.
        before = memory_bytes()
        net = nn.Sequential(*(Layer() for _ in range(count)))
        for layer in net:
            fully_shard(layer)
        fully_shard(net)
        swapper.offload(net, config=config_of(directory, POOL_BYTES))
        Layer.peak_bytes = 0
        with torch.no_grad():
            for _ in range(2):
                net(torch.ones(2, SIDE))
        grown.append(Layer.peak_bytes - before)
        net.swapper.close()  # type: ignore[operator, union-attr]
        del net, layer
        gc.collect()
    # Two that FSDP2 gathers, and the buffer of a collective for each.
    assert max(grown[1:]) < POOL_BYTES + 4 * LAYER_BYTES + (2 << 20), grown
    # 28 layers more have 28 times that. Their modules and hooks take 0.8 MB, and threads may have one or two at once.
    assert grown[2] < grown[1] + 3 * LAYER_BYTES, grown


@pytest.mark.thorough("by default: the bits with the least pool")
def test_memory_does_not_grow_with_layers(nvme_path: Path, leaves_nothing: None) -> None:
    in_processes(count_memory, str(nvme_path))
