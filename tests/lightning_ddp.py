"""One rank of a training with two processes: run by tests/test_lightning_ddp.py, plain and swapped."""

from __future__ import annotations

import gc
import json
import os
import pickle
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_runs import Net, facts, loader, trainer_of

import swapper.lightning


class Watched(Net):
    """Notes which directories there are while it trains."""

    def on_train_start(self) -> None:
        path = os.environ["DRIVE"]
        self.trainer.strategy.barrier()
        self.directories = sorted(os.listdir(path))
        self.trainer.strategy.barrier()


def main(program: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["LOCAL_RANK"])
    directory = Path(program["directory"])

    def run(max_epochs: int, ckpt_path: Path | None) -> L.Trainer:
        if program["config"] is None:
            strategy = L.pytorch.strategies.DDPStrategy(timeout=timedelta(seconds=60), **program["ddp"])
        else:
            strategy = swapper.lightning.SwapDDPStrategy(
                program["config"], timeout=timedelta(seconds=60), **program["ddp"]
            )
        keep = ModelCheckpoint(directory, save_last=True, filename="{epoch}")
        torch.manual_seed(5)
        trainer = trainer_of(
            strategy,
            devices=2,
            max_epochs=max_epochs,
            callbacks=[keep],
            enable_checkpointing=True,
            use_distributed_sampler=True,
            **program["options"],
        )
        trainer.fit(Watched(), loader(12), loader(8), ckpt_path=ckpt_path)
        return trainer

    run(1, None)
    while gc.collect():
        pass
    trainer = run(3, directory / "last.ckpt")
    found = {"facts": facts(trainer), "directories": trainer.lightning_module.directories}
    (directory / f"rank-{rank}.pickle").write_bytes(pickle.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
