"""A model after `fully_shard`, plain and swapped, and the settings with which both are trained alike."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import swapper
from swapper.config import OffloadConfig
from swapper.sizes import SMALL_BYTES
from swapper.storage.buffers import Lease
from swapper.storage.cache import RecordCache
from swapper.storage.store import RecordKey
from swapper.tensors.evicted import is_evicted
from swapper.tensors.evicted_gradients import raw_gradient

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
    """How a model is sharded, trained and swapped."""

    dtype: torch.dtype = torch.float32
    cls: type[torch.optim.Optimizer] = torch.optim.AdamW
    options: dict[str, Any] = field(default_factory=dict)
    masters: bool = False
    step_device: str = "auto"
    state: str = "nvme"
    packed: bool = False
    parameters: str = "nvme"
    gradients: str = "none"
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
    scarce: bool = True  # the least memory of pool and device that is taken
    resident_bytes: int = 0  # of parameters on the device
    direct: bool = False  # by cuFile
    steps: int = 10
    blocks: int = BLOCKS
    device: str = "cpu"


def most_pairs(drawn: list[Case], count: int) -> Iterator[Case]:
    """So many of those drawn: each time the first of those with the most pairs of settings that are not there yet."""
    left, seen = list(drawn), set[Any]()
    for _ in range(count):
        pairs = [
            set(itertools.combinations([(name, str(value)) for name, value in vars(case).items()], 2)) - seen
            for case in left
        ]
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
    a, b = (local(each).detach().cpu().contiguous().reshape(-1) for each in (a, b))
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def mesh_of(case: Case) -> DeviceMesh:
    count = torch.distributed.get_world_size()
    inner = 2 if count == 4 else 1  # Else one of two dimensions has no choice.
    if case.mesh == "hybrid":
        return init_device_mesh(case.device, (count // inner, inner), mesh_dim_names=("replicate", "shard"))
    if case.mesh == "tensor":
        return init_device_mesh(case.device, (inner, count // inner), mesh_dim_names=("data", "tensor"))
    return init_device_mesh(case.device, (count,))


def columns(parameter: nn.Parameter) -> Shard | None:
    """FSDP2 wants those shards even."""
    return Shard(1) if parameter.dim() == 2 and parameter.shape[1] % 6 == 0 else None


def whole(case: Case, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    net = Net(case.checkpoints, 300 if case.mesh == "tensor" else HIDDEN, blocks=case.blocks)
    if case.in_backward:  # Else a bucket would wait for it.
        net.never.requires_grad_(False)
    return net.to(case.dtype).to(case.device)


def sharded(case: Case, seed: int = 0) -> Net:
    net, mesh = whole(case, seed), mesh_of(case)
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


def tokens_of(seed: int, device: str = "cpu") -> torch.Tensor:
    return torch.randint(50, (2, 5), generator=torch.Generator().manual_seed(seed)).to(device)


def loss_of(net: nn.Module, seed: int = 0) -> torch.Tensor:
    out: torch.Tensor = net(tokens_of(seed, local(next(net.parameters())).device.type))
    return out


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


@contextlib.contextmanager
def unreadable(at: int, *, gradients: bool) -> Iterator[None]:
    """The record of a gradient, or of state, that is taken as the `at`-th cannot be read."""
    take, left = RecordCache.take, at

    def fails(cache: RecordCache, key: RecordKey, *args: Any, **options: Any) -> Any:
        nonlocal left
        left -= (key.kind == "grad") == gradients
        if left == 0:
            left = -1
            raise swapper.SwapError("cannot be read")
        return take(cache, key, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordCache, "take", fails)
        yield
    assert left < 0


def least_of(net: nn.Module, optimizer: torch.optim.Optimizer, directory: str, given: dict[str, Any]) -> dict[str, Any]:
    """The least memory that a config can have, of the pool and of the device."""

    def check(**more: Any) -> swapper.CheckReport:
        with contextlib.redirect_stdout(None):
            return swapper.check(net, optimizer, config_of(directory, "64MiB", **{**given, **more}))

    param = given.get("offload_param", {"device": "nvme"})
    if local(next(net.parameters())).device.type != "cpu" and param["device"] != "none":
        with pytest.raises(swapper.ConfigError, match="device_bytes") as caught:
            check(offload_param={**param, "device_bytes": param.get("device_resident_bytes", 1)})
        found = re.search(r"at least (\d+)", str(caught.value))
        assert found is not None
        param = {**param, "device_bytes": int(found[1])}
    return {"offload_param": param, "pool_bytes": check(offload_param=param).pool_needed_bytes}


class Twins:
    """A plain and a swapped model, each sharded."""

    def __init__(self, directory: str, case: Case, **more: Any) -> None:
        self.case, self.count = case, 0
        self.models = [sharded(case) for _ in range(2)]
        self.parameters = [[p for p in model.parameters() if p.requires_grad] for model in self.models]
        self.masters: list[torch.Tensor] = []
        plain: list[torch.Tensor] = list(self.parameters[0])
        if case.masters:
            self.masters = plain = [local(p).detach().to(torch.float32, copy=True).requires_grad_() for p in plain]
        self.optimizers = [case.cls(each, lr=1e-2, **case.options) for each in (plain, self.parameters[1])]
        more["state"] = {
            "device": case.state,
            "step_device": case.step_device,
            "master_weights": case.masters,
            "step_in_backward": case.in_backward,
            "encoding": "packed" if case.packed else "unpacked",
        }
        # Else FSDP2 adds them up before they arrive.
        more["gradient_accumulation_steps"] = case.micro_batches if case.syncs_all else 1
        more["offload_gradient"] = {"device": case.gradients}
        more["offload_param"] = {"device": case.parameters}
        if case.resident_bytes:
            more["offload_param"]["device_resident_bytes"] = case.resident_bytes
        more["aio"] = {"gds": "on" if case.direct else "off"}
        more |= least_of(self.models[1], self.optimizers[1], directory, more) if case.scarce else {"pool_bytes": "4MiB"}
        config = config_of(directory, **more)
        if case.parameters == "none":
            swapper.wrap_optimizer(self.optimizers[1], config)
            return
        swapper.offload(self.models[1], self.optimizers[1], config)
        assert set(self.swapper.stays.values()) <= {"it is empty"}
        assert bool(self.swapper.plan.device_resident) == bool(case.resident_bytes)
        assert (self.swapper._tier is not None and self.swapper._tier.direct is not None) == case.direct

    @property
    def swapper(self) -> swapper.ParameterSwapper:
        found = self.models[1].swapper
        assert isinstance(found, swapper.ParameterSwapper)
        return found

    def train(self) -> None:
        for i in range(self.case.micro_batches):
            self.count += 1
            last = i + 1 == self.case.micro_batches
            # The ranks of one place in "data" compute one batch together.
            rank = torch.distributed.get_rank()
            rank = rank // mesh_of(self.case)["tensor"].size() if self.case.mesh == "tensor" else rank
            tokens = tokens_of(100 * self.count + rank, self.case.device)
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
            assert self.runs_ahead or all(map(same, losses[:half], losses[half:]))
        if self.case.clips:
            norms = [torch.nn.utils.clip_grad_norm_(self.parameters[0], 0.3)]
            norms.append(swapper.of(self.optimizers[1]).clip_grad_norm_(0.3))
            assert self.runs_ahead or same(*norms)
        for p, master in zip(self.parameters[0], self.masters, strict=False):
            master.grad = None if p.grad is None else local(p.grad).to(master.dtype)
        taken = [p for p in self.parameters[1] if local(p).nbytes >= SMALL_BYTES]
        assert self.case.gradients == "none" or all(raw_gradient(p) is None for p in taken)
        for optimizer in self.optimizers:
            optimizer.step()
        for p, master in zip(self.parameters[0], self.masters, strict=False):
            local(p).detach().copy_(master.detach())
        for model in self.models:
            model.zero_grad()

    @property
    def runs_ahead(self) -> bool:
        """True while nothing is looked at, for which the host would wait for the device."""
        return self.case.device != "cpu" and self.count % 2 == 0

    def compare(self) -> None:
        for (name, p), q in zip(self.models[0].named_parameters(), self.models[1].parameters(), strict=True):
            assert self.case.parameters == "none" or is_evicted(local(q)) or not local(q).numel(), name
            assert same(p, q), name

    def compare_state(self) -> None:
        plain, swapped = (optimizer.state_dict()["state"] for optimizer in self.optimizers)
        assert plain.keys() == swapped.keys()
        for number, entries in plain.items():
            found = dict(swapped[number])
            if self.case.masters:
                assert same(local(found.pop("master_param")), self.masters[number])
            assert list(entries) == list(found)
            for key, value in entries.items():
                mine = found[key]
                assert same(value, local(mine) if self.masters and isinstance(mine, DTensor) else mine), (number, key)

    def close(self) -> None:
        if self.case.parameters != "none":
            self.swapper.close()
        swapper.of(self.optimizers[1]).close()


SIDE = 512
LAYER_BYTES = 4 * SIDE * SIDE


def backward(models: list[Net], seed: int = 0) -> None:
    seed += 1000 * torch.distributed.get_rank()
    for model in models:
        loss_of(model, seed).backward()


def large(net: nn.Module) -> list[str]:
    """The parameters whose gradients go."""
    taken = (n for n, p in net.named_parameters() if p.requires_grad and local(p).nbytes >= SMALL_BYTES)
    return [name for name in taken if not name.startswith("never")]


def compare(models: list[Net], what: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        mine, expected = what(q), what(p)
        assert (expected is None) == (mine is None), name
        assert mine is None or same(expected, mine), name


def forget_iteration(net: Any) -> None:
    """After a forward or a backward that failed. torch 2.13 has a method for it, 2.10 has none."""
    if hasattr(net, "reset_iter_state"):
        net.reset_iter_state()
        return
    root = net._get_fsdp_state()
    for state in root._state_ctx.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = TrainingState.IDLE
        if (group := state._fsdp_param_group) is not None:
            group._all_gather_result = group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    root._comm_ctx.all_gather_state = root._comm_ctx.reduce_scatter_state = None
    root._comm_ctx.post_forward_order.clear()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


def end_step(models: list[Net], optimizers: list[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    compare(models, lambda p: p)


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


def within_group(rank: int, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Call `work(rank, *args)` within a process group of gloo."""
    torch.distributed.init_process_group("gloo")
    try:
        work(rank, *args)
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()


def in_processes(work: Callable[..., None], *args: object, count: int = 2) -> None:
    """Run `work(rank, *args)` on so many ranks of gloo. Errors as `ranks.in_processes`."""
    ranks.in_processes(within_group, work, args, ranks=count)
