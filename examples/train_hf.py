"""Fine-tune a Llama with the Trainer of transformers, with its state, gradients and parameters on disk.

    mkdir -p .swapper && python examples/train_hf.py --nvme-path .swapper --compare

`make train-hf` runs this. The model is one that the example makes, 27 million parameters, first saved as a checkpoint
in Hugging Face's format as if it had been downloaded; the text is Python's own source files. Swapping is one argument
of the Trainer. `--compare` trains without it too, in a process of its own, and compares losses and parameters.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from text import load_text
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

import swapper
from swapper.hf import SwapCallback

_WHAT = {"loss": "last loss", "seconds": "seconds a step", "peak_bytes": "peak memory"}


class Windows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random windows of a text; window `number` is always the same."""

    def __init__(self, text: torch.Tensor, context: int, count: int) -> None:
        self._text, self._context, self._count = text, context, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        start = int(torch.randint(len(self._text) - self._context, (), generator=generator))
        window = self._text[start : start + self._context].long()
        return {"input_ids": window, "labels": window}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme-path", type=Path, default=Path(".swapper"), help="a directory on the drive")
    parser.add_argument("--model", type=Path, help="a checkpoint of a causal Llama, instead of the small one")
    parser.add_argument("--data", type=Path, help="a file to train on instead of Python's sources")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--pool", default="96MiB", help="pool_bytes: all memory that swapping takes")
    parser.add_argument("--compare", action="store_true", help="train without swapping too, and compare")
    parser.add_argument("--plain", action="store_true", help="train without swapping")
    return parser.parse_args()


def make_checkpoint(directory: Path) -> None:
    """Save a Llama of 27 million random parameters."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=512, **shape)).save_pretrained(directory)


def digest(model: torch.nn.Module) -> str:
    """SHA-256 of all parameters: the same for the same bits."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        with swapper.gathered(parameter):
            found.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def peak_bytes() -> int:
    """The most memory that this process has had resident so far."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def train(arguments: argparse.Namespace, checkpoint: Path) -> dict[str, Any]:
    """Train; everything that swapping needs is `config` and `callbacks`."""
    config = swapper.OffloadConfig(
        nvme_path=arguments.nvme_path,
        pool_bytes=arguments.pool,
        offload_optimizer={"device": "nvme"},
        offload_gradient={"device": "nvme"},
        offload_param={"device": "nvme"},
    )
    callbacks: list[TrainerCallback] = [] if arguments.plain else [SwapCallback(config)]
    model = LlamaForCausalLM.from_pretrained(checkpoint)
    windows = Windows(load_text(arguments.data), arguments.context, arguments.steps * arguments.batch_size)
    with tempfile.TemporaryDirectory() as output:
        settings = TrainingArguments(
            output_dir=output,
            max_steps=arguments.steps,
            per_device_train_batch_size=arguments.batch_size,
            learning_rate=1e-3,
            logging_steps=max(1, arguments.steps // 8),
            save_strategy="no",
            report_to=[],
            disable_tqdm=not sys.stderr.isatty(),
        )
        trainer = Trainer(model, settings, train_dataset=windows, callbacks=callbacks)
        done = trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "losses": losses,
        "loss": losses[-1],
        "seconds": done.metrics["train_runtime"] / arguments.steps,
        "peak_bytes": peak_bytes(),
        "parameters": digest(model),
    }


def in_another_process(plain: bool, checkpoint: Path) -> dict[str, Any]:
    """The result of the same command line, with or without swapping: each run has a peak of its own."""
    words = [word for word in sys.argv[1:] if word not in ("--compare", "--plain")]
    command = [sys.executable, __file__, *words, "--model", str(checkpoint), *(["--plain"] if plain else [])]
    result, end = os.pipe()
    environment = {**os.environ, "SWAPPER_EXAMPLE_RESULT": str(end)}
    with os.fdopen(result) as file, os.fdopen(end, "w"):
        subprocess.run(command, check=True, env=environment, pass_fds=[end])
        return dict(json.loads(file.readline()))


def main() -> None:
    arguments = parse()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory(dir=arguments.nvme_path) as directory:
        checkpoint = arguments.model or Path(directory)
        if arguments.model is None:
            make_checkpoint(checkpoint)
        if not arguments.compare:
            result = train(arguments, checkpoint)
            if (end := os.environ.get("SWAPPER_EXAMPLE_RESULT")) is not None:
                os.write(int(end), (json.dumps(result) + "\n").encode())
            else:
                Console().print(f"loss {result['loss']}, parameters {result['parameters']}")
            return
        results = {name: in_another_process(name == "plain", checkpoint) for name in ("plain", "swapper")}
    table = Table("", *results)
    for key, text in _WHAT.items():
        values = [result[key] for result in results.values()]
        table.add_row(text, *(f"{v / 1e9:.2f} GB" if key == "peak_bytes" else f"{v:.3g}" for v in map(float, values)))
    Console().print(table)
    same = all(results["plain"][key] == results["swapper"][key] for key in ("losses", "parameters"))
    Console().print(f"equal to the bit: {'yes' if same else 'NO'}")
    sys.exit(not same)


if __name__ == "__main__":
    main()
