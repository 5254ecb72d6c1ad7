"""Ranks that train one model and store or round it otherwise than each other are refused, on all of them."""

from __future__ import annotations

import datetime
import gc
import itertools
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from accelerate import Accelerator
from lightning.fabric import Fabric
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import swapper
import swapper.hf
from swapper.config import OffloadConfig
from swapper.fabric import SwapDDPStrategy
from swapper.optimizer import alike

SIZES = {"pool_bytes": "4MiB", "bucket_bytes": "64KiB"}


@contextmanager
def group() -> Iterator[None]:
    """The process group of all ranks. One that waits for a rank that has raised fails, and not only at the end."""
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    try:
        yield
    finally:
        gc.collect()
        torch.distributed.destroy_process_group()


def net_of(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)).to(dtype)


def state_of(encoding: Any = "exact", device: str = "nvme", **more: Any) -> dict[str, Any]:
    return {"offload_optimizer": {"device": device, "encoding": encoding, **more}}


def gradient_of(encoding: str) -> dict[str, Any]:
    return {**state_of(), "offload_gradient": {"device": "nvme", "encoding": encoding}}


def backward(model: nn.Module, turn: int, rank: int = 0) -> None:
    generator = torch.Generator().manual_seed(100 * turn + rank)
    model(torch.randn(4, 64, generator=generator).to(next(model.parameters()).dtype)).square().mean().backward()


def assert_replicas_alike(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        others = [torch.empty_like(p) for _ in range(2)]
        torch.distributed.all_gather(others, p.detach().clone())
        assert torch.equal(*(each.view(torch.uint8) for each in others)), name


@contextmanager
def refused(text: str) -> Iterator[None]:
    """Refused on this rank, and on the other, which is not left waiting."""
    with pytest.raises(swapper.ConfigError, match=text):
        yield
    torch.distributed.barrier()


ENCODING, MASTERS = r"offload_optimizer\.encoding: ", r"offload_optimizer\.master_weights: "
BF16 = torch.bfloat16
DIFFERENT: list[tuple[torch.dtype, dict[str, Any], dict[str, Any], str]] = [
    (torch.float32, state_of(), state_of("bf16"), ENCODING + "exact on rank 0, bf16 on rank 1"),
    (torch.float32, state_of("int8"), state_of("bf16"), ENCODING + "int8 on rank 0, bf16 on rank 1"),
    (torch.float32, state_of("packed"), state_of("int8"), ENCODING + "exact on rank 0, int8 on rank 1"),
    (
        torch.float32,
        state_of({"exp_avg": "bf16", "exp_avg_sq": "packed"}),
        state_of({"exp_avg": "bf16", "exp_avg_sq": "int8"}),
        ENCODING + r"\{exp_avg: bf16\} on rank 0, \{exp_avg: bf16, exp_avg_sq: int8\} on rank 1",
    ),
    (BF16, state_of(), state_of(master_weights=True), MASTERS + "false on rank 0, true on rank 1"),
    (torch.float32, gradient_of("bf16"), gradient_of("exact"), r"offload_gradient\.encoding: bf16 on rank 0, exact on"),
]
SAME: list[tuple[torch.dtype, dict[str, Any], dict[str, Any]]] = [
    (torch.float32, state_of(), state_of("packed")),
    (torch.float32, state_of("unpacked"), state_of({"exp_avg": "packed"})),
    (torch.float32, state_of(), state_of(master_weights=True)),  # Nothing has masters.
    (torch.float32, state_of("bf16", native_step="off"), state_of("bf16", native_step="on")),
    (torch.float32, state_of("int8"), {**state_of("int8"), "bucket_bytes": "128KiB", "pool_bytes": "8MiB"}),
    (BF16, state_of("bf16", master_weights=True), state_of("bf16", master_weights=True)),
    (torch.float32, gradient_of("bf16"), {**gradient_of("bf16"), "bucket_bytes": "128KiB", "pool_bytes": "8MiB"}),
]


def config_of(directory: str, given: dict[str, Any]) -> OffloadConfig:
    return OffloadConfig(nvme_path=directory, **{**SIZES, **given})


def refuse_when_wrapped(rank: int, directory: str) -> None:
    with group():
        for dtype, one, other, text in DIFFERENT:
            model = DistributedDataParallel(net_of(dtype))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            step = optimizer.step
            with refused(f"{text}.*; these ranks have replicas or shards of one model"):
                swapper.wrap_optimizer(optimizer, config_of(directory, other if rank else one))
            assert optimizer.step == step, "the optimizer is as it was"
            with refused(text):
                swapper.offload(model, optimizer, config_of(directory, other if rank else one))
            assert not hasattr(model, "swapper")
        like = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        for net, text in (
            (net_of(), "order of parameters in the optimizer"),
            (like, "places in the model of the para"),
        ):
            model = DistributedDataParallel(net)
            groups = [{"params": [*layer.parameters()]} for layer in net if isinstance(layer, nn.Linear)]
            optimizer = torch.optim.AdamW(groups[:: -1 if rank else 1], lr=1e-2)
            with refused(f"{text}.*make param_groups in the same order on all ranks"):
                swapper.wrap_optimizer(optimizer, config_of(directory, state_of("bf16")))
            # Nothing is rounded, so the order is of no account.
            swapper.wrap_optimizer(optimizer, config_of(directory, state_of()))
            backward(model, 0, rank)
            optimizer.step()
            assert_replicas_alike(model)
            swapper.of(optimizer).close()


@pytest.mark.long
def test_what_differs_is_refused_when_it_is_wrapped(nvme_path: Path, leaves_nothing: None) -> None:
    ranks.in_processes(refuse_when_wrapped, str(nvme_path))


def refuse_in_first_step(rank: int, directory: str) -> None:
    """Where nobody knew at construction that these are replicas, or the ranks did not make it together."""
    with group():
        for dtype, one, other, text in DIFFERENT:
            config = config_of(directory, other if rank else one)
            net = net_of(dtype)
            optimizer = swapper.wrap_optimizer(torch.optim.AdamW(net.parameters(), lr=1e-2), config)
            model = DistributedDataParallel(net)
            before = [p.detach().clone() for p in net.parameters()]
            for _ in range(2):
                backward(model, 0, rank)
                with refused(f"{text}.*; these ranks have replicas or shards of one model"):
                    optimizer.step()
            assert all(map(torch.equal, before, net.parameters())), "nothing was stepped"
            swapper.of(optimizer).close()
        for encoding in ("bf16", "int8"):
            model = DistributedDataParallel(net_of())
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            given = state_of(encoding, device="cpu") if rank else {}  # Rank 0 swaps nothing.
            swapper.wrap_optimizer(optimizer, config_of(directory, given))
            backward(model, 0, rank)
            with refused(f"{ENCODING}exact on rank 0, {encoding} on rank 1"):
                optimizer.step()
            swapper.of(optimizer).close()


@pytest.mark.long
def test_what_differs_is_refused_in_the_first_step(nvme_path: Path, leaves_nothing: None) -> None:
    ranks.in_processes(refuse_in_first_step, str(nvme_path))


def refuse_in_frameworks(rank: int, directory: str) -> None:
    for device in ("cpu", "nvme"):
        config = config_of(directory, state_of("bf16" if rank else "int8", device))
        fabric = Fabric(accelerator="cpu", devices=2, strategy=SwapDDPStrategy(config))
        fabric.launch()
        net = net_of()
        with refused(ENCODING + "int8 on rank 0, bf16 on rank 1"):
            model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
            fabric.backward(model(torch.ones(4, 64)).sum())
            optimizer.step()
        net = net_of()
        accelerator = Accelerator(cpu=True)
        with refused(ENCODING + "int8 on rank 0, bf16 on rank 1"):
            model, optimizer = swapper.hf.prepare(
                accelerator, net, torch.optim.AdamW(net.parameters(), lr=1e-2), config
            )
            accelerator.backward(model(torch.ones(4, 64)).sum())
            optimizer.step()
    torch.distributed.destroy_process_group()


@pytest.mark.long
def test_frameworks_refuse_what_differs(nvme_path: Path, leaves_nothing: None) -> None:
    ranks.in_processes(refuse_in_frameworks, str(nvme_path))


def refuse_other_steps(rank: int, directory: str) -> None:
    with group():
        for encoding in ("bf16", "int8"):
            model = DistributedDataParallel(net_of())
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            swapper.wrap_optimizer(optimizer, config_of(directory, state_of(encoding)))
            saved = []
            for turn in range(2):
                backward(model, turn, rank)
                optimizer.step()
                optimizer.zero_grad()
                saved.append(optimizer.state_dict())
            values = {key: value.clone() for key, value in model.state_dict().items()}
            optimizer.load_state_dict(saved[rank])
            backward(model, 2, rank)
            with refused("number of steps that state is rounded by: 1 on rank 0, 2 on rank 1; .*load the same"):
                optimizer.step()
            assert all(torch.equal(value, values[key]) for key, value in model.state_dict().items())
            # The same of all, with gradients and without. One rank has made a load more, and the other is late, so that
            # its note is still that of the load before when the first one steps.
            for number in (1, 0):
                if not number:
                    optimizer.zero_grad()
                if rank:
                    optimizer.load_state_dict(saved[1 - number])
                else:
                    time.sleep(0.5)
                optimizer.load_state_dict(saved[number])
                if not number:
                    backward(model, 3, rank)
                for turn in range(2):
                    optimizer.step()
                    optimizer.zero_grad()
                    assert_replicas_alike(model)
                    backward(model, turn, rank)
            swapper.of(optimizer).close()


@pytest.mark.long
def test_a_load_of_other_steps_is_refused(nvme_path: Path, leaves_nothing: None) -> None:
    ranks.in_processes(refuse_other_steps, str(nvme_path))


def train_replicas(net: nn.Module, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for turn in range(3):
        backward(model, turn, rank)
        optimizer.step()
        optimizer.zero_grad()
        assert_replicas_alike(net)


def train_alike(rank: int, directory: str) -> None:
    with group():
        for first, (dtype, one, other) in itertools.product((True, False), SAME):
            net = net_of(dtype)
            model: nn.Module = DistributedDataParallel(net) if first else net
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
            swapper.wrap_optimizer(optimizer, config_of(directory, other if rank else one))
            if not first:
                model = DistributedDataParallel(net)
            train_replicas(net, model, optimizer, rank)
            swapper.of(optimizer).close()


@pytest.mark.long
def test_what_has_the_same_bits_may_differ(nvme_path: Path, leaves_nothing: None) -> None:
    ranks.in_processes(train_alike, str(nvme_path))


def make_garbage(model: nn.Module) -> None:
    parallel = DistributedDataParallel(model)
    vars(parallel)["itself"] = [parallel]


def train_apart(rank: int, directory: str) -> None:
    with group():
        for dtype, one, other, _ in DIFFERENT:
            net = net_of(dtype)
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
            swapper.wrap_optimizer(optimizer, config_of(directory, other if rank else one))
            for turn in range(1 + rank):
                backward(net, turn, rank)
                optimizer.step()
                optimizer.zero_grad()
            swapper.of(optimizer).close()
        # Replicas once, of which only garbage is left.
        for device in ("nvme", "cpu"):
            model = net_of()
            gc.disable()
            make_garbage(model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            swapper.wrap_optimizer(optimizer, config_of(directory, state_of("bf16" if rank else "int8", device)))
            backward(model, 0, rank)
            make_garbage(model)
            optimizer.step()
            gc.enable()
            swapper.of(optimizer).close()
        # Replicas within one group, and one that trains by itself with what it likes.
        alone = torch.distributed.new_group([rank], use_local_synchronization=True)
        model = DistributedDataParallel(net_of(), process_group=alone)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        swapper.wrap_optimizer(optimizer, config_of(directory, state_of("bf16" if rank else "int8")))
        backward(model, 0, rank)
        optimizer.step()
        swapper.of(optimizer).close()


@pytest.mark.long
def test_ranks_with_models_of_their_own_may_differ(nvme_path: Path, leaves_nothing: None) -> None:
    ranks.in_processes(train_apart, str(nvme_path))


def try_alone(net: nn.Module, model: nn.Module, directory: str) -> None:
    """As a smoke test, or a dry run, that one rank makes before."""
    given = {"offload_optimizer": {"device": "cpu", "encoding": "bf16"}}
    tried = swapper.wrap_optimizer(torch.optim.AdamW(net.parameters(), lr=1e-2), config_of(directory, given))
    backward(net, 0)
    tried.step()
    swapper.of(tried).close()
    swapper.unwrap_optimizer(swapper.wrap_optimizer(torch.optim.AdamW(model.parameters()), config_of(directory, given)))


def train_after_trials(rank: int, directory: str) -> None:
    given = state_of("int8", "cpu")
    with group():
        for first in (True, False):
            net = net_of()
            model: nn.Module = DistributedDataParallel(net) if first else net
            if rank == 0:
                try_alone(net_of(), model, directory)
            optimizer = swapper.wrap_optimizer(torch.optim.AdamW(net.parameters()), config_of(directory, given))
            if not first:
                model = DistributedDataParallel(net)
            train_replicas(net, model, optimizer, rank)
            swapper.of(optimizer).close()


@pytest.mark.long
def test_what_one_rank_has_tried_before_is_not_compared(nvme_path: Path, leaves_nothing: None) -> None:
    ranks.in_processes(train_after_trials, str(nvme_path))


def refuse_unswapped(rank: int, directory: str) -> None:
    with group():
        net = net_of()
        gradient = {"device": "nvme", "encoding": "exact" if rank else "bf16"}
        config = config_of(directory, {"offload_optimizer": {"device": "none"}, "offload_gradient": gradient})
        optimizer = swapper.wrap_optimizer(torch.optim.AdamW(net.parameters(), lr=1e-2), config)
        model = DistributedDataParallel(net)
        gc.freeze()
        backward(model, 0, rank)
        optimizer.step()  # The frozen module is not found.
        assert gc.get_freeze_count() > 0, "what the user has frozen stays frozen"
        gc.unfreeze()
        optimizer.zero_grad()
        swapper.of(optimizer).close()
        net = net_of()
        optimizer = swapper.wrap_optimizer(torch.optim.AdamW(net.parameters(), lr=1e-2), config)
        model = DistributedDataParallel(net)
        before = [p.detach().clone() for p in net.parameters()]
        backward(model, 0, rank)
        for _ in range(2):
            with refused("offload_gradient.encoding: bf16 on rank 0, exact on rank 1"):
                optimizer.step()
        assert all(map(torch.equal, before, net.parameters())), "nothing was stepped"
        swapper.of(optimizer).close()


@pytest.mark.long
def test_optimizers_whose_state_is_not_swapped_are_refused_before_the_step(
    nvme_path: Path, leaves_nothing: None
) -> None:
    ranks.in_processes(refuse_unswapped, str(nvme_path))


def fail_on_one_rank(rank: int, directory: str) -> None:
    calls = []

    def bits(*_: object) -> None:
        calls.append(1)
        if rank == 0:
            raise swapper.ConfigError("no bits")

    alike._bits_of = bits  # type: ignore[assignment]
    with group():
        optimizer = torch.optim.AdamW(DistributedDataParallel(net_of()).parameters())
        with pytest.raises(swapper.ConfigError, match="no bits"):
            swapper.wrap_optimizer(optimizer, config_of(directory, state_of()))
        assert len(calls) == 1, "ranks go round again only by what all of them have found"


@pytest.mark.long
def test_what_fails_in_comparing_is_not_tried_again(nvme_path: Path, leaves_nothing: None) -> None:
    ranks.in_processes(fail_on_one_rank, str(nvme_path))


def refuse_shards(rank: int, directory: str) -> None:
    with group():
        for dtype, one, other, text in DIFFERENT:
            model = net_of(dtype)
            fully_shard(model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            with refused(text):
                swapper.wrap_optimizer(optimizer, config_of(directory, other if rank else one))
        given = state_of(step_in_backward=True)
        model = net_of()
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with refused("gradient_accumulation_steps: 1 on rank 0, 2 on rank 1"):
            swapper.wrap_optimizer(optimizer, config_of(directory, {**given, "gradient_accumulation_steps": 1 + rank}))
        for one, other in itertools.islice(((one, other) for dtype, one, other in SAME if dtype != BF16), 3):
            model = net_of()
            fully_shard(model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            swapper.wrap_optimizer(optimizer, config_of(directory, other if rank else one))
            backward(model, 0, rank)
            optimizer.step()
            swapper.of(optimizer).close()
        # Stages of a pipeline are on meshes of their own.
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stage", "shard"))["shard"]
        model = net_of()
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        swapper.wrap_optimizer(optimizer, config_of(directory, state_of("bf16" if rank else "int8")))
        swapper.of(optimizer).close()


@pytest.mark.long
def test_shards_are_refused_when_they_are_wrapped(nvme_path: Path, leaves_nothing: None) -> None:
    ranks.in_processes(refuse_shards, str(nvme_path))


def refuse_a_config_of_one_rank(rank: int, directory: str) -> None:
    """The other has one that is right, and would wait for this rank to use its own."""
    good: dict[str, Any] = {**SIZES, **state_of(), "nvme_path": directory}
    file = Path(directory).parent / f"{rank}.yaml"
    wrong: list[tuple[Any, str]] = [
        ({**good, "pool_bytes": "4 bananas"}, "pool_bytes"),
        ({**good, "nvme_path": None}, "nvme_path"),
        ({**good, **state_of("int9")}, r"offload_optimizer\.encoding"),
        ({"offload_param": {"device": "nvme"}, "bananas": 4}, "bananas"),
    ]
    weights = Path(directory).parent / "weights.safetensors"
    with group():
        if rank == 0:
            save_file(net_of().state_dict(), weights)
        torch.distributed.barrier()
        for bad, text in wrong:
            for as_file in (False, True):
                given: Any = bad if rank else good
                if as_file:
                    file.write_text(json.dumps(given))
                    given = file
                text_here = text if rank else f"^on rank 1: .*{text}"
                for shard in (False, True):
                    model: nn.Module = net_of()
                    model = fully_shard(model) if shard else DistributedDataParallel(model)
                    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
                    with refused(text_here):
                        swapper.wrap_optimizer(optimizer, given)
                    with refused(text_here):
                        swapper.offload(model, optimizer, given)
                    assert not hasattr(optimizer, "swapper")
                with refused(text_here), torch.device("meta"):
                    swapper.offload(net_of(), config=given, weights=weights)
                with refused(text_here):
                    net = net_of()
                    swapper.hf.prepare(Accelerator(cpu=True), net, torch.optim.AdamW(net.parameters()), given)
        # Without a drive each rank is by itself, also with weights that stay in files.
        if rank:
            with pytest.raises(swapper.ConfigError, match="pool_bytes"):
                given = {**SIZES, **state_of(device="cpu"), "pool_bytes": "4 bananas"}
                swapper.wrap_optimizer(torch.optim.AdamW(net_of().parameters()), given)


@pytest.mark.long
def test_a_config_that_one_rank_refuses_is_refused_on_all(nvme_path: Path, leaves_nothing: None) -> None:
    ranks.in_processes(refuse_a_config_of_one_rank, str(nvme_path))
