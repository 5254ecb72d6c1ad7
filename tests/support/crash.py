"""A training that is killed again and again: `crash.py NVME_PATH KILLS MODE ENCODING`. See test_checkpoint_crash.py.

Torch is imported once; each life of the training is a fork of this process, which itself never computes anything. It
begins with what it finds on disk, checks that against the run without interruption, and goes on until it is killed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo  # Which the first optimizer imports, and which takes longer than all the rest of a life.
from torch import nn

import swapper
from swapper.checkpoint.reader import Checkpoint

STEPS = 150
"""Of the run without interruption; a training that gets there begins anew."""


LOSSY = ("bf16", "int8")
"""Encodings whose run without interruption is one with its state on the drive, too."""


def make(path: Path | None, encoding: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 130), nn.Tanh(), nn.Linear(130, 65), nn.BatchNorm1d(65), nn.Linear(65, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if path is not None:
        config = swapper.OffloadConfig(
            nvme_path=path,
            pool_bytes="2MiB",
            bucket_bytes="64KiB",
            offload_optimizer={"device": "nvme", "encoding": encoding},
            # Gradients are rounded beside one of the lossy ones, too.
            offload_gradient={"device": "nvme", "encoding": "bf16"} if encoding == "bf16" else None,
            offload_param={"device": "nvme"},
            checkpoint={"keep_last": 2},
        )
        swapper.offload(model, optimizer, config)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, turn: int) -> None:
    generator = torch.Generator().manual_seed(turn)
    model(torch.randn(4, 64, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    tensors = [*model.state_dict().values()]
    for state in optimizer.state_dict()["state"].values():
        tensors += state.values()
    for tensor in tensors:
        found.update(tensor.detach().clone().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def uninterrupted(path: Path, encoding: str) -> list[str]:
    model, optimizer = make(path if encoding in LOSSY else None, encoding)
    digests = []
    for turn in range(STEPS):
        step(model, optimizer, turn)
        digests.append(digest(model, optimizer))
    return digests


def tell_uninterrupted(path: Path, encoding: str, writing: int) -> None:
    os.write(writing, json.dumps(uninterrupted(path, encoding)).encode())


def in_child(work: Callable[[int], None]) -> tuple[int, int]:
    """Fork; `work` is given the end of a pipe to write to. Returns the process and the other end."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            work(writing)
            os._exit(0)
        except BaseException:
            os.write(writing, b"failed\n" + traceback.format_exc().encode())
            os._exit(1)
    os.close(writing)
    return pid, reading


def read_all(descriptor: int) -> bytes:
    data = b""
    while piece := os.read(descriptor, 1 << 16):
        data += piece
    os.close(descriptor)
    return data


def read_lines(descriptor: int, count: int) -> str:
    """What a child says until it has said `count` lines, or has ended."""
    said = b""
    while said.count(b"\n") < count and (piece := os.read(descriptor, 1 << 16)):
        said += piece
    return said.decode()


def live(path: Path, mode: str, encoding: str, expected: list[str], writing: int) -> None:
    """One life: what is on disk is whole, and is gone on with."""
    saved, ended = path / "checkpoints", path / "ended"
    shutil.rmtree(ended, ignore_errors=True)
    saved.mkdir(exist_ok=True)
    found = sorted(saved.glob("step-*") if mode == "names" else saved.glob("last"), key=lambda p: int(p.name[5:] or 0))
    for each in found:
        with Checkpoint(each) as checkpoint:
            for name in checkpoint.index.files:
                checkpoint.verify(name)
    for new in path.glob(".swapper-new-*"):  # Killed before it was locked: it might be another run just starting.
        os.utime(new, (0, 0))
    model, optimizer = make(path, encoding)
    turn = 0
    if found:
        turn = swapper.load_checkpoint(found[-1], model, optimizer)["turn"]
        assert digest(model, optimizer) == expected[turn - 1], f"{found[-1]} is not what it was"
        left = [p.name for p in saved.iterdir() if p.name.startswith(".")]
        assert not left, f"left over in {saved}: {left}"
    runs = [p.name for p in path.iterdir() if p.name.startswith(("swapper-", ".swapper-"))]
    assert len(runs) == 1, f"left over in {path}: {runs}"
    os.write(writing, b"checked %d\n" % turn)
    for done in range(turn, STEPS):
        step(model, optimizer, done)
        name = f"step-{done + 1}" if mode == "names" else "last"
        swapper.save_checkpoint(saved / name, model, optimizer, {"turn": done + 1})
        os.write(writing, b"saved\n")
    assert digest(model, optimizer) == expected[-1], "the end is not that of the run without interruption"
    saved.rename(ended)  # At once: a training killed in the middle of removing would leave parts of checkpoints.
    shutil.rmtree(ended)
    os.write(writing, b"ended\n")


def main() -> None:
    path, kills, mode, encoding = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    pid, reading = in_child(functools.partial(tell_uninterrupted, path, encoding))
    expected = json.loads(read_all(reading))
    os.waitpid(pid, 0)
    chance = random.Random(int(os.environ.get("SWAPPER_FUZZ_SEED") or time.time_ns()))
    killed = checked = turns = ends = 0
    start_s = save_s = 1.0
    while killed < kills:
        pid, reading = in_child(functools.partial(live, path, mode, encoding, expected))
        said = ""
        if chance.random() < 0.25:  # Maybe before it is under way.
            time.sleep(chance.uniform(0, start_s))
        else:
            born = time.monotonic()
            said = read_lines(reading, 1)
            start_s = time.monotonic() - born
            # In saves, not in seconds: on a slow drive too, lives get somewhere.
            saves = chance.randrange(5)
            said += read_lines(reading, saves)
            if saves:
                save_s = (time.monotonic() - born - start_s) / saves
            time.sleep(chance.uniform(0, save_s))
        os.kill(pid, signal.SIGKILL)
        said += read_all(reading).decode()
        _, status = os.waitpid(pid, 0)
        if "failed" in said:
            raise SystemExit(f"after {killed} kills: {said}")
        killed += os.WIFSIGNALED(status)
        for line in said.splitlines():
            checked += line.startswith("checked")
            turns = max(turns, int(line.split()[1]) if line.startswith("checked") else 0)
            ends += line == "ended"
    print(json.dumps({"killed": killed, "checked": checked, "turns": turns, "ends": ends}))


if __name__ == "__main__":
    main()
