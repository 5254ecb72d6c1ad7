"""What users do with a model after `fully_shard` whose shards are on the drive, beside what a plain one does."""

from __future__ import annotations

import gc
import itertools
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sharded_nets import Case, Net, config_of, forget_iteration, local, loss_of, same, sharded
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import swapper
from swapper.config import OffloadConfig
from swapper.tensors.evicted import is_evicted


def config_on(device: str, directory: str) -> OffloadConfig:
    return config_of(directory, "560KiB" if device == "cpu" else "780KiB")  # There a step has two records more.


def pair(directory: str, device: str, config: OffloadConfig | None = None) -> tuple[Net, Net]:
    """A plain model and one whose shards are on disk."""
    plain, net = (sharded(Case(device=device)) for _ in range(2))
    swapper.offload(net, config=config or config_on(device, directory))
    return plain, net


def all_same(plain: dict[str, Any], mine: dict[str, Any]) -> bool:
    return list(plain) == list(mine) and all(
        same(value, mine[name]) if isinstance(value, torch.Tensor) else value == mine[name]
        for name, value in plain.items()
    )


def use_state_dicts(rank: int, directory: str, device: str = "cpu") -> None:
    plain, net = pair(directory, device)
    expected, found = plain.state_dict(), net.state_dict()
    assert all_same(expected, found)
    for name, value in found.items():
        assert isinstance(value, DTensor), name
        assert torch.equal(value.full_tensor(), expected[name].full_tensor()), name
        assert torch.equal(value.to_local(), expected[name].to_local()), name
    for options in (StateDictOptions(), StateDictOptions(full_state_dict=True, cpu_offload=True)):
        assert all_same(get_model_state_dict(plain, options=options), get_model_state_dict(net, options=options))
    # Others' values, of shards and of whole tensors.
    other = sharded(Case(device=device), seed=1)
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


def use_distributed_checkpoints(rank: int, directory: str, device: str = "cpu") -> None:
    (plain, net), (_, fresh) = pair(directory, device, config := config_on(device, directory)), pair(directory, device)
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


def use_parameters(rank: int, directory: str, device: str = "cpu") -> None:
    """What user code does to shards at any time: it has their values, and changes are kept."""
    plain, net = pair(directory, device)
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
    if torch.torch_version.TorchVersion(torch.__version__) >= "2.9":  # In 2.8 those of DTensors are taken one by one.
        with pytest.raises(swapper.SwapError, match="records of parameters at once"):
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
        forget_iteration(model)
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
    state: Any = net._get_fsdp_state()  # type: ignore[operator]
    group = state._fsdp_param_groups[0] if hasattr(state, "_fsdp_param_groups") else state._fsdp_param_group
    assert type(group).__module__.startswith("torch.")
    for _ in range(2):
        for model, optimizer in zip((plain, net), optimizers, strict=True):
            loss_of(model).backward()
            optimizer.step()
            model.zero_grad()
    assert all_same(plain.state_dict(), net.state_dict())
    # And it can be offloaded again, with another model's values, which is closed without them.
    swapper.offload(net, config=config_on(device, directory))
    other = sharded(Case(device=device), seed=3)
    net.load_state_dict(other.state_dict(), assign=True)  # In memory from now on, as of any model.
    assert same(loss_of(net), loss_of(other))
    net.swapper.close()  # type: ignore[operator, union-attr]
    _, net = pair(directory, device)
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


def change_before_the_first_forward(rank: int, directory: str, device: str = "cpu") -> None:
    """FSDP2 finds dtypes, and what is trained, in the first forward."""
    plain, net = pair(directory, device)
    for model in (plain, net):
        model.bfloat16()
    train_alike(plain, net)
    net.swapper.close()  # type: ignore[operator, union-attr]
    plain, net = (Net().to(device) for _ in range(2))
    net.load_state_dict(plain.state_dict())
    for model in (plain, net):
        fully_shard(model.blocks[0].requires_grad_(False), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
        fully_shard(model)
    swapper.offload(net, config=config_of(directory, "4MiB"))
    for model in (plain, net):
        model.blocks[0].requires_grad_(True)
    train_alike(plain, net)
    net.swapper.close()  # type: ignore[operator, union-attr]


def keep_shards_on_the_drive(rank: int, directory: str, device: str = "cpu") -> None:
    """What gives parameters tensors that `detach` made of the shards moves none of them."""
    plain, net = pair(directory, device)
    uses: list[Callable[[Any], object]] = [
        lambda model: model.to(device),
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
    swapper.offload(net, config=config_on(device, directory))
    train_alike(plain, net)
    # What is saved while training goes on is what was there.
    saved = {name: value.clone() for name, value in plain.state_dict().items()}
    path, group = f"{directory}/dcp", torch.distributed.new_group()
    saving = torch.distributed.checkpoint.async_save(net.state_dict(), checkpoint_id=path, process_group=group)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(1)
    saving.result()  # type: ignore[union-attr]
    found = sharded(Case(device=device), seed=1).state_dict()
    torch.distributed.checkpoint.load(found, checkpoint_id=path)
    assert all_same(saved, found)
    net.swapper.close()  # type: ignore[operator, union-attr]
    torch.distributed.barrier()
    if rank == 0:
        shutil.rmtree(path)


def move_what_is_swapped(rank: int, directory: str, device: str = "cpu") -> None:
    """Of a model whose optimizer is swapped too, which has weak references to parameters. Nothing has changed then."""
    plain, net = (sharded(Case(device=device)) for _ in range(2))
    optimizers = [torch.optim.AdamW(model.parameters(), foreach=False) for model in (plain, net)]
    swapper.offload(net, optimizers[1], config_on(device, directory))
    for _ in range(2):
        for move in (lambda model: model.to("cpu"), lambda model: model.double()):
            with pytest.raises(swapper.SwapError, match=r"cannot be moved or converted .*unwrap_optimizer"):
                move(net)
        assert all(p.device.type == device and p.dtype is torch.float32 for p in net.parameters())
        for model, optimizer in zip((plain, net), optimizers, strict=True):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all_same(plain.state_dict(), net.state_dict())
    swapper.unwrap_optimizer(optimizers[1])
    net.swapper.close(keep_values=True)  # type: ignore[operator, union-attr]
    gc.collect()
    net.to("cpu")
    assert all(p.device.type == "cpu" for p in net.parameters())


def train_with_another_config(rank: int, directory: str, device: str = "cpu") -> None:
    """An optimizer that is wrapped by itself, before the model or after it, steps shards that it was not told of."""
    states: list[dict[str, Any]] = [{"native_step": "off"}, {"native_step": "on"}, {"step_in_backward": True}]
    for number, (dtype, state) in enumerate(itertools.product([torch.float32, torch.bfloat16], states)):
        nets = [sharded(Case(dtype, in_backward="step_in_backward" in state, device=device)) for _ in range(2)]
        optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in nets]
        alone = {"offload_param": {"device": "none"}, "state": {"master_weights": False, **state}}
        if number % 2:
            swapper.wrap_optimizer(optimizers[1], config_of(directory, "780KiB", **alone))
        swapper.offload(nets[1], config=config_on(device, directory))
        if not number % 2:
            swapper.wrap_optimizer(optimizers[1], config_of(directory, "780KiB", **alone))
        for step in range(4):
            for net, optimizer in zip(nets, optimizers, strict=True):
                loss_of(net, step).backward()
                optimizer.step()
                optimizer.zero_grad()
        for (name, p), q in zip(nets[0].named_parameters(), nets[1].parameters(), strict=True):
            with swapper.gathered(q):
                assert same(p, q), (dtype, state, name)
        swapper.of(optimizers[1]).close()
        nets[1].swapper.close()  # type: ignore[operator, union-attr]


def use_what_stays_gathered(rank: int, directory: str, device: str = "cpu") -> None:
    """No pass that gathers nothing waits for other ranks: one runs a model alone, or reduces gradients later."""
    nets = [sharded(Case(device=device, reshard=False)) for _ in range(2)]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False) for net in nets]
    swapper.offload(nets[1], optimizers[1], config_on(device, directory))
    for turn in range(3):
        for net, optimizer in zip(nets, optimizers, strict=True):
            assert isinstance(net, FSDPModule)
            for number in range(3):
                net.set_requires_gradient_sync(number == (0 if rank == 1 else 1 + turn % 2))
                net.set_reshard_after_backward(False)
                loss_of(net, 10 * turn + number).backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            with torch.no_grad():
                assert same(*(loss_of(net) for net in nets))
        torch.distributed.barrier()  # Which no forward or backward had to wait for.
        for net in nets:
            for module in net.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
    assert all_same(nets[0].state_dict(), nets[1].state_dict())
    swapper.of(optimizers[1]).close()
    nets[1].swapper.close()  # type: ignore[operator, union-attr]


USES = (
    use_state_dicts,
    use_distributed_checkpoints,
    use_parameters,
    change_before_the_first_forward,
    keep_shards_on_the_drive,
    move_what_is_swapped,
    train_with_another_config,
    use_what_stays_gathered,
)
