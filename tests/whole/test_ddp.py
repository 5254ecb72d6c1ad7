"""DistributedDataParallel with everything on disk: two processes, to the bit as plain DDP."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from twins import small_records

import swapper
from swapper.config import OffloadConfig
from swapper.tensors.evicted_gradients import raw_gradient

RANKS = 2
WHAT = ["state", "gradients", "parameters", "state-gradients", "state-gradients-parameters"]


class Net(nn.Module):
    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(48, 300)
        self.norm = nn.BatchNorm1d(300)
        self.second = nn.Linear(300, 96)
        self.conv = nn.Conv2d(6, 120, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.sometimes = nn.Linear(96, 96)
        self.never = nn.Linear(96, 96)
        self.last = nn.Linear(96, 5)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        def run(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = checkpoint(layer, x, use_reentrant=True) if self.checkpointed else layer(x)
            return out

        # The gradients of the first layer come last, within a backward of their own if it is checkpointed.
        x = run(self.second, torch.tanh(self.norm(run(self.first, x))))
        if use:
            x = torch.tanh(self.sometimes(x))
        image = x.reshape(-1, 6, 4, 4).contiguous(memory_format=torch.channels_last)
        out: torch.Tensor = self.last(torch.tanh(x)).square().sum() + self.conv(image).square().mean()
        return out


def config_of(directory: str, what: str, micro_batches: int, pool_bytes: str = "2MiB") -> OffloadConfig:
    def device(name: str) -> dict[str, str]:
        return {"device": "nvme" if name in what else "none"}

    return OffloadConfig(
        nvme_path=directory,
        pool_bytes=pool_bytes,
        bucket_bytes="96KiB",
        gradient_accumulation_steps=micro_batches,
        offload_optimizer=device("state"),
        offload_gradient=device("gradients"),
        offload_param=device("parameters"),
    )


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.detach().contiguous().reshape(-1), b.detach().contiguous().reshape(-1)
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


class Pair:
    """A plain and a swapped model, each in DDP."""

    def __init__(self, rank: int, directory: str, what: str, micro_batches: int, options: dict[str, Any]) -> None:
        self.rank, self.micro_batches = rank, micro_batches
        self.static = options.get("static_graph", False)
        uses_all = not options.get("find_unused_parameters") and not options.get("static_graph")
        checkpointed = options.pop("checkpointed", False)
        self.models, self.optimizers = [], []
        for _ in range(2):
            torch.manual_seed(0)
            net = Net(checkpointed=checkpointed)
            if uses_all:
                net.never.requires_grad_(False)
            model = DistributedDataParallel(net, bucket_cap_mb=0.1, **options)
            self.models.append(model)
            parameters = [p for p in model.parameters() if p.requires_grad]
            self.optimizers.append(torch.optim.AdamW(parameters, lr=1e-2))
        with small_records():
            swapper.offload(self.models[1], self.optimizers[1], config_of(directory, what, micro_batches))
        self.use = (lambda i: True) if uses_all or options.get("static_graph") else (lambda i: (i + rank) % 3 == 0)
        self.count = 0

    def backward(self, *, sync: bool) -> None:
        generator = torch.Generator().manual_seed(100 * self.count + self.rank)
        x = torch.randn(4, 48, generator=generator)
        use = self.use(self.count)
        self.count += 1
        losses = []
        for model in self.models:
            with contextlib.nullcontext() if sync else model.no_sync():
                x.requires_grad_(model.module.checkpointed)
                loss = model(x, use)
                loss.backward()
                losses.append(loss)
        assert same(*losses)

    def window(self) -> None:
        for i in range(self.micro_batches):
            # DDP itself wants the first backward of a static graph to be synchronized.
            self.backward(sync=i + 1 == self.micro_batches or (self.static and self.count == 0))

    def compare_gradients(self) -> None:
        for (name, p), q in zip(self.models[0].named_parameters(), self.models[1].parameters(), strict=True):
            theirs, mine = p.grad, q.grad
            assert (theirs is None) == (mine is None), name
            if theirs is not None and mine is not None:
                assert mine.stride() == theirs.stride(), name
                assert same(mine, theirs), name

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for (name, p), q in zip(self.models[0].named_parameters(), self.models[1].parameters(), strict=True):
            assert same(p, q), name
        for (name, p), q in zip(self.models[0].named_buffers(), self.models[1].buffers(), strict=True):
            assert same(p, q), name

    def close(self) -> None:
        swapper.of(self.optimizers[1]).close()
        module = self.models[1]
        if isinstance(vars(module).get("swapper"), swapper.ParameterSwapper):
            module.swapper.close(keep_values=True)  # type: ignore[operator, union-attr]


def train(rank: int, directory: str, what: str, micro_batches: int, options: dict[str, Any]) -> None:
    pair = Pair(rank, directory, what, micro_batches, dict(options))
    try:
        for step in range(5):
            pair.window()
            if "gradients" in what:
                swapped = pair.models[1].module
                assert raw_gradient(swapped.first.weight) is None
                assert swapper.of(pair.optimizers[1]).gradients.is_evicted(swapped.conv.weight)  # type: ignore[union-attr]
            if step in (1, 2):
                parameters = [p for p in pair.models[0].parameters() if p.requires_grad]
                total = torch.nn.utils.clip_grad_norm_(parameters, 0.1)
                if step == 1:
                    assert same(total, swapper.of(pair.optimizers[1]).clip_grad_norm_(0.1))
                else:
                    parameters = [p for p in pair.models[1].parameters() if p.requires_grad]
                    assert same(total, torch.nn.utils.clip_grad_norm_(parameters, 0.1))
            if step == 3:
                pair.compare_gradients()
            pair.step()
    finally:
        pair.close()


def _worker(rank: int, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.distributed.init_process_group("gloo")
    try:
        work(rank, *args)
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()


def in_processes(work: Callable[..., None], *args: object) -> None:
    """Run `work(rank, *args)` in two processes that know each other."""
    ranks.in_processes(_worker, work, args, ranks=RANKS)


def train_all(rank: int, directory: str, micro_batches: int, options: dict[str, Any]) -> None:
    for what in WHAT:
        try:
            train(rank, directory, what, micro_batches, options)
        except Exception as error:
            error.add_note(f"with {what} on disk, in rank {rank}")
            raise


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("as_view", [False, True], ids=["copied", "bucket-views"])
@pytest.mark.parametrize("option", ["", "find_unused_parameters", "static_graph"])
def test_same_bits_as_plain_ddp(nvme_path: Path, option: str, as_view: bool, leaves_nothing: None) -> None:
    options = {"gradient_as_bucket_view": as_view, **({option: True} if option else {})}
    in_processes(train_all, str(nvme_path), 1, options)


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("as_view", [False, True], ids=["copied", "bucket-views"])
@pytest.mark.parametrize("option", ["", "find_unused_parameters", "static_graph"])
def test_accumulation_without_sync(nvme_path: Path, option: str, as_view: bool, leaves_nothing: None) -> None:
    options = {"gradient_as_bucket_view": as_view, **({option: True} if option else {})}
    in_processes(train_all, str(nvme_path), 3, options)


@pytest.mark.long
def test_reentrant_checkpointing(nvme_path: Path, leaves_nothing: None) -> None:
    in_processes(train_all, str(nvme_path), 1, {"static_graph": True, "checkpointed": True})


def _halve(bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean in another order than DDP's, which halves before it sums."""
    done = torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future()
    return done.then(lambda future: future.value()[0] / RANKS)  # type: ignore[no-any-return]


def train_with_a_hook(rank: int, directory: str) -> None:
    pair = Pair(rank, directory, "state-gradients-parameters", 2, {})
    for model in pair.models:
        model.register_comm_hook(None, lambda state, bucket: _halve(bucket))
    for _ in range(3):
        pair.window()
        pair.compare_gradients()
        pair.step()
    pair.close()


def test_a_communication_hook_of_the_user(nvme_path: Path, leaves_nothing: None) -> None:
    in_processes(train_with_a_hook, str(nvme_path))


def offload_first(rank: int, directory: str) -> None:
    def make(seed: int) -> tuple[Net, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        net = Net()
        net.never.requires_grad_(False)
        return net, torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)

    def offloaded(seed: int, pool_bytes: int) -> tuple[Net, torch.optim.Optimizer]:
        """With that pool, or the smallest that is accepted."""
        while True:
            net, optimizer = make(seed)
            config = config_of(directory, "state-gradients-parameters", 1, str(pool_bytes))
            try:
                with small_records():
                    return swapper.offload(net, optimizer, config)
            except swapper.ConfigError as error:
                found = re.search(r"pool_bytes to at least '?(\d+)", str(error))
                assert found is not None and int(found[1]) > pool_bytes, error
                pool_bytes = int(found[1])

    for pool_bytes, init_sync in ((8 << 20, True), (300 << 10, False), (300 << 10, True)):
        # Where DDP synchronizes, the ranks need not start alike.
        seed = rank if init_sync else 0
        swapped, optimizer = offloaded(seed, pool_bytes)
        if init_sync and pool_bytes < 1 << 20:
            with pytest.raises(swapper.SwapError, match="DistributedDataParallel"):
                DistributedDataParallel(swapped)
        else:
            plain, reference = make(seed)
            models = [DistributedDataParallel(net, init_sync=init_sync) for net in (plain, swapped)]
            for step in range(3):
                x = torch.randn(4, 48, generator=torch.Generator().manual_seed(10 * step + rank))
                losses = [model(x, True) for model in models]
                assert same(*losses)
                for loss, each in zip(losses, (reference, optimizer), strict=True):
                    loss.backward()
                    each.step()
                    each.zero_grad()
            for p, q in zip(plain.parameters(), swapped.parameters(), strict=True):
                assert same(p, q)
        swapped.swapper.close(keep_values=True)  # type: ignore[operator, union-attr]
        swapper.of(optimizer).close()
        torch.distributed.barrier()


def test_ddp_around_a_model_that_is_offloaded_already(nvme_path: Path, leaves_nothing: None) -> None:
    in_processes(offload_first, str(nvme_path))


def look_at_directories(rank: int, directory: str) -> None:
    pair = Pair(rank, directory, "state-gradients", 1, {})
    torch.distributed.barrier()
    names = sorted(path.name for path in Path(directory).iterdir())
    assert len(names) == RANKS
    run = names[0].rsplit("-", 1)[0]
    assert names == [f"{run}-{i}" for i in range(RANKS)]
    torch.distributed.barrier()
    pair.close()


def read_log(rank: int, directory: str) -> None:
    """The first rank of a host says what its processes take together; a warning where that leaves too little."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = records.append  # type: ignore[method-assign]
    log = logging.getLogger("swapper.session")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    for much in (False, True):
        records.clear()
        with pytest.MonkeyPatch.context() as patch:
            if much:
                patch.setattr("swapper.session._MUCH_OF_MEMORY", 1e-6)
            Pair(rank, directory, "state-gradients", 1, {}).close()
        if rank:
            assert not records
            continue
        (record,) = records
        text = record.getMessage()
        assert text.startswith(f"{RANKS} processes on this host have pools of ")
        assert record.levelno == (logging.WARNING if much else logging.INFO)
        assert text.endswith("pool_bytes is of each process, lower it") == much


def test_processes_of_a_host_are_counted(nvme_path: Path, leaves_nothing: None) -> None:
    in_processes(read_log, str(nvme_path))


def test_each_rank_has_a_directory_of_its_own(nvme_path: Path, leaves_nothing: None) -> None:
    in_processes(look_at_directories, str(nvme_path))


def fail_in_backward(rank: int, directory: str) -> None:
    """All ranks fail, in all the same backward, and go on after it."""

    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("on purpose")

    pair = Pair(rank, directory, "state-gradients", 1, {})
    pair.window()
    pair.step()
    hooks = [model.module.first.bias.register_hook(fail) for model in pair.models]
    x = torch.randn(4, 48)
    for model in pair.models:
        with model.no_sync(), pytest.raises(RuntimeError, match="on purpose"):
            model(x, True).backward()
    pair.compare_gradients()
    for hook in hooks:
        hook.remove()
    pair.window()
    pair.compare_gradients()
    pair.step()
    pair.close()


def test_an_exception_in_a_backward(nvme_path: Path, leaves_nothing: None) -> None:
    in_processes(fail_in_backward, str(nvme_path))
