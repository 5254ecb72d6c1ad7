"""Ranks that are not at the same call."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import ranks
import torch
import torch.distributed.checkpoint as dcp
from accelerators import simulate
from sharded_nets import in_processes
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

import swapper
from swapper.errors import ConfigError, SwapError, SwapIOError
from swapper.storage import agreement
from swapper.storage.agreement import _gloos, agreed, exchanged, leave_note, notes_of
from swapper.storage.buffers import PoolExhausted
from swapper.storage.mounts import NvmePathError


def be_apart(rank: int) -> None:
    def fail() -> None:
        with agreed():
            raise ValueError("of this rank")

    def succeed() -> None:
        with agreed():
            pass

    for first in (fail, succeed):
        for at_verdict in range(2):
            with pytest.raises(SwapError, match=rf"ranks \[{at_verdict}\] are within another call") as caught:
                first() if rank == at_verdict else exchanged(None)
            assert isinstance(caught.value.__cause__, ValueError) == (first is fail and rank == at_verdict)
    succeed()
    assert exchanged(rank) == [0, 1]


def test_ranks_that_make_different_calls_are_told() -> None:
    in_processes(be_apart)


def raise_each(rank: int) -> None:
    errors: list[SwapError] = [
        SwapError("why"),
        ConfigError("why"),
        PoolExhausted("why"),
        SwapIOError(errno.EIO, "read", "/a/file", 512, 1024, "why"),
        SwapIOError(errno.EIO, "read"),
        NvmePathError(errno.ENOENT, "open", "/a/directory", "why"),
    ]
    for error in errors:
        with pytest.raises(type(error)) as caught, agreed():
            if rank == 1:
                raise error
        assert type(caught.value) is type(error)
        if rank == 0:
            assert "on rank 1" in str(caught.value) and ("why" in str(caught.value)) == ("why" in str(error))
            of_drive = ("errno", "filename", "operation", "path", "offset_bytes", "length_bytes")
            assert all(getattr(caught.value, name, None) == getattr(error, name, None) for name in of_drive)


def test_an_error_of_one_rank_has_its_class_on_all() -> None:
    """Who catches `ConfigError` on all ranks catches it on all."""
    in_processes(raise_each)


def save_beside_steps(rank: int, directory: str) -> None:
    nets, optimizers = [], []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(nn.Sequential(*(nn.Linear(90, 90) for _ in range(4))))
        fully_shard(nets[-1])
        optimizers.append(torch.optim.AdamW(nets[-1].parameters()))
    nvme = {"device": "nvme"}
    config = {"nvme_path": directory, "pool_bytes": "8MiB", "offload_optimizer": nvme, "offload_param": nvme}
    swapper.offload(nets[1], optimizers[1], config)
    for turn in range(3):
        for net, optimizer in zip(nets, optimizers, strict=True):
            net(torch.full((2, 90), float(rank))).square().sum().backward()
            model, state = get_state_dict(net, optimizer)
            saving = dcp.async_save({"model": model, "state": state}, checkpoint_id=f"{directory}/saved-{turn}")
            for _ in range(3):  # Each has collectives, and so has the thread that saves.
                optimizer.step()
            saving.result()  # type: ignore[union-attr]
            optimizer.zero_grad()
    for plain, swapped in zip(*(net.parameters() for net in nets), strict=True):
        assert torch.equal(plain.to_local(), swapped.to_local())  # type: ignore[operator]
    swapper.of(optimizers[1]).close()
    nets[1].swapper.close()  # type: ignore[operator, union-attr]


def test_ranks_agree_while_dcp_saves_in_the_default_group(tmp_path: Path) -> None:
    in_processes(save_beside_steps, str(tmp_path))


def begin_again(rank: int) -> None:
    store = torch.distributed.distributed_c10d._get_default_store()
    for turn in range(3):
        assert exchanged(rank) == [0, 1]
        gc.collect()
        assert len(_gloos) == 1
        torch.distributed.destroy_process_group()
        torch.distributed.init_process_group(
            "gloo", rank=rank, world_size=2, store=torch.distributed.PrefixStore(f"again-{turn}", store)
        )


def test_another_default_group_has_another_of_all() -> None:
    in_processes(begin_again)


def begin_again_in_one_store(rank: int, port: int) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", port, 2, rank == 0)
    for turn in range(3):
        ours = torch.distributed.PrefixStore("all", store)
        torch.distributed.init_process_group("gloo", rank=rank, world_size=2, store=ours, timeout=timedelta(seconds=20))
        for late in range(2):
            time.sleep(0.3 * (rank == late))
            assert exchanged(10 * turn + rank) == [10 * turn, 10 * turn + 1]
        torch.distributed.destroy_process_group()
        gc.collect()
        store.set(f"over/{turn}/{rank}", "")
        store.wait([f"over/{turn}/{each}" for each in range(2)])
        # torch leaves addresses of its own, and may find them in the next turn.
        ours.delete_key(f"0//cpu//0/{rank}")
        store.set(f"tidy/{turn}/{rank}", "")
        store.wait([f"tidy/{turn}/{each}" for each in range(2)])
    # The store is rank 0's, and ends with it.
    if rank == 0:
        store.wait(["last"])
    else:
        store.set("last", "")


def test_a_default_group_in_the_store_of_an_earlier_one() -> None:
    """As after `destroy_process_group` under `torchrun`, whose store goes on."""
    with ranks.free_port() as port:
        ranks.in_processes(begin_again_in_one_store, port)


def test_a_store_that_does_not_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As that of rank 0 while its process is stopped."""
    answers, store = threading.Event(), torch.distributed.HashStore()

    class Stopped:
        def check(self, keys: list[str]) -> bool:
            assert answers.wait(60)
            return bool(store.check(keys))

        def get(self, key: str) -> bytes:
            return store.get(key)

        def set(self, key: str, value: str) -> None:
            store.set(key, value)

    monkeypatch.setattr(agreement, "_store", Stopped)
    monkeypatch.setattr(agreement, "ANSWER_S", 0.2)
    assert leave_note("one", "1")
    begin = time.monotonic()
    for _ in range(2):  # The second is not asked.
        assert notes_of(["one", "other"]) == [None, None]
    assert not leave_note("other", "2")
    assert time.monotonic() - begin < 10
    assert "does not answer: it was asked, and has said nothing" in caplog.text
    answers.set()
    assert agreement._asking is not None
    agreement._asking.join()
    assert leave_note("other", "2")
    assert notes_of(["one", "other", "third"]) == ["1", "2", None]


def wait_in_vain(rank: int, has_met: bool) -> None:
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=3 + 20 * (rank == 1 or has_met)))
    if has_met:
        exchanged(None)
    if rank == 0:
        text = (
            r"rank 0 has waited \d+ s for the other ranks of \[0, 1\].*has ended, does not answer, or makes other calls"
        )
        with pytest.raises(SwapError, match=text):
            exchanged(None)
    elif has_met:
        os._exit(0)  # Without a word.
    else:
        time.sleep(6)


@pytest.mark.parametrize("has_met", [False, True], ids=["it-does-not-come", "it-ends"])
def test_who_waits_in_vain_says_for_whom(has_met: bool) -> None:
    ranks.in_processes(wait_in_vain, has_met)


def test_objects_go_by_way_of_the_device_that_the_group_is_bound_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has them go by the current one, which on each rank is the first where nobody has set it."""
    simulate("sim-eager", monkeypatch)
    current = torch.accelerator.current_device_index
    seen = []
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda *arguments: seen.append(current()))
    monkeypatch.setattr(torch.distributed, "gather_object", lambda *arguments: seen.append(current()))
    for device in (None, torch.device("sim", 1)):
        group = SimpleNamespace(bound_device_id=device)
        monkeypatch.setattr(agreement, "_members", lambda group=group: (group, [0, 1]))
        agreement._all_gathered(1, group, 2)
        agreement.gathered_by_first(1)
    assert seen == [0, 0, 1, 1] and current() == 0
