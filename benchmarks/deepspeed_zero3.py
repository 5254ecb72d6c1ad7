"""DeepSpeed ZeRO-3 with parameters and optimizer on NVMe, on the model of `everything_nvme.py`: its peer.

    python benchmarks/deepspeed_zero3.py --nvme-path DIR

Run by `--deepspeed` of `everything_nvme.py`, `optimizer_step.py` and `sharded.py`, by the interpreter that has
DeepSpeed, which need not have swapper. Prints the times of the steps and the peak memory as JSON, in the last line:
with `--ranks` a list of those of each rank.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from benchmark import make_parser, random_batch
from gpt import GPT, SIZES
from peak import Peak
from rank_processes import run_ranks


def main() -> None:
    parser = make_parser(__doc__, results=False)
    parser.add_argument("--size", choices=sorted(SIZES), default="small")
    parser.add_argument("--vocab-size", type=int, default=50257)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--port", type=int, default=29511, help="free on this machine")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--ranks", type=int, help="processes of gloo on this host (one, without it)")
    parser.add_argument("--parameters-in-memory", action="store_true", help="only the optimizer is on NVMe")
    arguments = parser.parse_args()
    print(json.dumps(run_ranks(train, arguments.ranks, arguments) if arguments.ranks else train(0, arguments)))


def train(rank: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Steps of one rank."""
    torch.set_num_threads(arguments.threads)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(arguments.ranks or 1)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(arguments.port), "DS_ACCELERATOR": "cpu"}
    deepspeed: Any = importlib.import_module("deepspeed")  # After its environment is set.

    def settings(path: Path) -> dict[str, Any]:
        return make_settings(path, parameters_in_memory=arguments.parameters_in_memory)

    torch.manual_seed(0)
    with Peak() as peak:
        deepspeed.init_distributed(dist_backend="gloo")
        with deepspeed.zero.Init(config_dict_or_path=settings(arguments.nvme_path)):
            model = GPT(SIZES[arguments.size], arguments.vocab_size, recompute=arguments.recompute)
        numel = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
        optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), lr=1e-4, adamw_mode=True)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings(arguments.nvme_path))
        count = arguments.ranks or 1
        rows = [
            train_one(engine, arguments.vocab_size, arguments.context, i * count + rank) for i in range(arguments.steps)
        ]
    print()
    return {"numel": numel, "peak_bytes": peak.bytes, "settings": settings(Path("...")), "rows": rows}


def train_one(engine: Any, vocab_size: int, context: int, number: int) -> dict[str, float]:
    """One step; seconds of its parts, and the loss."""
    tokens, following = random_batch(vocab_size, context, number)
    start_s = time.perf_counter()
    logits = engine(tokens)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), following.flatten())
    forward_s = time.perf_counter()
    engine.backward(loss)
    backward_s = time.perf_counter()
    engine.step()
    end_s = time.perf_counter()
    return {
        "step_s": end_s - start_s,
        "forward_s": forward_s - start_s,
        "backward_s": backward_s - forward_s,
        "optimizer_s": end_s - backward_s,
        "loss": loss.item(),
    }


def make_settings(nvme_path: Path, *, parameters_in_memory: bool = False) -> dict[str, Any]:
    """As its documentation has them for NVMe; its buffers such that it runs, with pipelining, in what it needs."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 20_000_000,
            "overlap_comm": True,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 10_000_000,
            "stage3_param_persistence_threshold": 10_000,
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": str(nvme_path),
                "buffer_count": 12,
                "pin_memory": False,
                "pipeline_read": True,
                "pipeline_write": True,
            },
            "offload_param": {
                "device": "nvme",
                "nvme_path": str(nvme_path),
                "buffer_count": 5,
                "buffer_size": 45_000_000,
                "max_in_cpu": 0,
                "pin_memory": False,
            },
        },
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 32,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        },
        "gradient_clipping": 0.0,
        "steps_per_print": 1_000_000,
    }
    if parameters_in_memory:
        del settings["zero_optimization"]["offload_param"]
    return settings


if __name__ == "__main__":
    main()
