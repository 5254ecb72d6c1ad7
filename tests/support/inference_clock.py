"""Tokens of a model on the simulated device whose weights stay in a file, by that device's clock; for `test_overlap`.

    python inference_clock.py DIR DRIVE_S COMPUTE_S UP_S RECORDS

All weights take so many seconds on the drive, in kernels and on their way up; the pool has room for so many of its 24
records. Prints the times of each token in its steady state, and the records read in it, as JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "support"), str(TESTS / "sim_device")]

import torch  # noqa: E402
from torch import nn  # noqa: E402
from weight_files import hollow, write_weights  # noqa: E402

import swapper  # noqa: E402
from swapper import session  # noqa: E402
from swapper.io.devices import DEVICES  # noqa: E402
from swapper.parameter import records  # noqa: E402

WIDTH, LAYERS, BATCH = 256, 24, 8
RECORD_BYTES = 4 * WIDTH * WIDTH + 2 * 4096


def make() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU()) for _ in range(LAYERS)))


def main(place: str, drive_s: float, compute_s: float, up_s: float, count: int) -> list[dict[str, float]]:
    sim_device = importlib.import_module("sim_device")
    drive: Any = importlib.import_module("sim_drive").SimulatedDrive
    DEVICES["sim"] = importlib.import_module("accelerators").SimCopies
    session.AsyncIOHandle = drive  # type: ignore[attr-defined]
    records.GROUP_BYTES = RECORD_BYTES  # A record for each layer.
    torch.set_num_threads(1)
    path = write_weights(Path(place) / "weights.safetensors", make().state_dict(), 24)
    config = swapper.OffloadConfig(pool_bytes=count * RECORD_BYTES, bucket_bytes=RECORD_BYTES // 4096 * 4096)
    model = swapper.offload(hollow(make()), config=config, weights=path, device="sim")[0]
    total_bytes = LAYERS * 4 * WIDTH * WIDTH
    drive.bps = total_bytes / drive_s
    operations = 2 * WIDTH * WIDTH * LAYERS * BATCH / compute_s
    rate = total_bytes / up_s
    sim_device.keep_time(sim_device.Speeds(operations_per_s=operations, memory_bps=3e12, up_bps=rate, down_bps=rate))
    x = torch.ones(BATCH, WIDTH).to("sim")
    found = []
    with torch.inference_mode():
        for _ in range(6):
            before, read = sim_device.times(), drive.read_bytes
            model(x)[:1].cpu()
            times = vars(sim_device.times().since(before))
            found.append({**times, "records": (drive.read_bytes - read) / RECORD_BYTES})
    return found[3:]


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], *map(float, sys.argv[2:5]), int(sys.argv[5]))))
