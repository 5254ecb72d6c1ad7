"""`SwapDDPStrategy` with two processes, to the bit as stock DDP, resumed from a checkpoint in the middle."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning_runs import config_of

from swapper.checkpoint import is_checkpoint

SCRIPT = Path(__file__).with_name("lightning_ddp.py")
TIMEOUT_S = 300


def run(directory: Path, nvme_path: Path, config: Any, ddp: dict[str, Any], options: dict[str, Any]) -> list[Any]:
    """What each rank has found, in a training that was interrupted and resumed."""
    directory.mkdir()
    program = {"directory": str(directory), "config": config, "ddp": ddp, "options": options}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(2):
        # As a launcher of processes sets it: Lightning then starts none.
        environment = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": "2",
            "NODE_RANK": "0",
            "LOCAL_RANK": str(rank),
            "DRIVE": str(nvme_path),
            "PYTHONWARNINGS": "ignore",
        }
        command = [sys.executable, str(SCRIPT), json.dumps(program)]
        ranks.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, errors
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [pickle.loads((directory / f"rank-{rank}.pickle").read_bytes()) for rank in range(2)]


@pytest.mark.parametrize(
    ("what", "ddp", "options"),
    [
        ("state", {"gradient_as_bucket_view": True}, {"accumulate_grad_batches": 2}),
        ("state-gradients-parameters", {}, {"gradient_clip_val": 0.05}),
    ],
    ids=["state", "everything"],
)
def test_two_processes_end_in_the_bits_of_stock_ddp(
    what: str, ddp: dict[str, Any], options: dict[str, Any], nvme_path: Path, tmp_path: Path
) -> None:
    stock = run(tmp_path / "stock", nvme_path, None, ddp, options)
    ours = run(tmp_path / "ours", nvme_path, config_of(nvme_path, what), ddp, options)
    assert [rank["facts"] for rank in ours] == [rank["facts"] for rank in stock]
    assert ours[0]["facts"]["parameters"] == ours[1]["facts"]["parameters"]
    assert ours[0]["directories"] == ours[1]["directories"]
    assert [name.rpartition("-")[2] for name in ours[0]["directories"]] == ["0", "1"]
    assert len({name.rpartition("-")[0] for name in ours[0]["directories"]}) == 1
    assert is_checkpoint(tmp_path / "ours" / "last.ckpt")
    assert not list(nvme_path.iterdir())
