"""What the loss of a training makes of encoded state: a small GPT, with the state exact and encoded, over some seeds.

Each row is an optimizer and an encoding; "exact" and "encoded" are the means over seeds of the loss on text that was
not trained on, "difference" is the mean of the differences, and "seeds" is how far apart exact runs of different seeds
are (standard deviation). With `--torchao` the row "torchao" is torchao's `AdamW8bit` in memory, beside AdamW: it is
compiled first, which takes a minute.

    python benchmarks/encoded_loss.py --nvme-path DIR [--steps 2000] [--seeds 3] [--classes AdamW NAdam RMSprop SGD]
        [--encodings bf16 int8] [--torchao]
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from benchmark import keep_result, settings_of, system
from gpt import GPT, Shape
from text import batches, load_text

import swapper

CLASSES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-3),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=3e-4),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}
ENCODINGS = ("bf16", "int8")
TORCHAO = "torchao"
COLORS = {"exact": "black", "bf16": "tab:red", "int8": "tab:blue", TORCHAO: "tab:green"}
EVALUATED = 20
"""Batches of the loss that is compared."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme-path", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--classes", nargs="+", choices=CLASSES, default=list(CLASSES))
    parser.add_argument("--encodings", nargs="+", choices=ENCODINGS, default=list(ENCODINGS))
    parser.add_argument("--torchao", action="store_true", help="compare its AdamW8bit, too")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--every", type=int, default=50, help="steps between points of the curves")
    parser.add_argument("--data", type=Path, help="file to train on instead of Python's own source files")
    parser.add_argument("--chart", type=Path, help="draw the curves there, as docs/encodings.png")
    parser.add_argument("--save", action="store_true", help="keep the result in results/")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    arguments = parser.parse_args()
    text = load_text(arguments.data)
    held_out = len(text) // 10
    print(f"{system()}; {arguments.steps} steps, {arguments.seeds} seeds", flush=True)
    print(f"{'optimizer':<10}{'encoding':<10}{'exact':>10}{'encoded':>10}{'difference':>12}{'of it':>9}{'seeds':>10}")
    rows: list[dict[str, Any]] = []
    curves: dict[str, dict[str, list[list[float]]]] = {}
    for name in arguments.classes:
        encodings = ["exact", *arguments.encodings, *[TORCHAO] * (arguments.torchao and name == "AdamW")]
        curves[name] = {encoding: [] for encoding in encodings}
        losses: dict[str, list[float]] = {encoding: [] for encoding in encodings}
        for seed, encoding in itertools.product(range(arguments.seeds), encodings):
            curve, loss = train(arguments, text[:-held_out], text[-held_out:], name, encoding, seed)
            curves[name][encoding].append(curve)
            losses[encoding].append(loss)
        spread = statistics.stdev(losses["exact"]) if arguments.seeds > 1 else float("nan")
        rows.append({"optimizer": name, "losses": losses, "spread": spread})
        exact = statistics.fmean(losses["exact"])
        for encoding in encodings[1:]:
            encoded = statistics.fmean(losses[encoding])
            print(
                f"{name:<10}{encoding:<10}{exact:>10.4f}{encoded:>10.4f}{encoded - exact:>+12.4f}"
                f"{(encoded - exact) / exact:>+9.2%}{spread:>10.4f}",
                flush=True,
            )
    keep_result(arguments, "encoded-loss", {"system": system(), "settings": settings_of(arguments), "rows": rows})
    if arguments.chart:
        draw(curves, arguments.every, arguments.chart)


def train(
    arguments: argparse.Namespace, text: torch.Tensor, held_out: torch.Tensor, name: str, encoding: str, seed: int
) -> tuple[list[float], float]:
    """The means of the training's losses, one for each `every` steps, and the loss on `held_out`."""
    torch.manual_seed(seed)
    shape = Shape(layers=arguments.layers, heads=4, width=arguments.width, context=arguments.context)
    model = GPT(shape)
    if encoding == TORCHAO:
        optimizer = torchao_adamw(model.parameters())
    else:
        optimizer = CLASSES[name](model.parameters())
        state = {"device": "nvme", "encoding": encoding, "native_step": "on"}
        config = swapper.OffloadConfig(nvme_path=arguments.nvme_path, pool_bytes="64MiB", offload_optimizer=state)
        swapper.wrap_optimizer(optimizer, config)
    losses = []
    try:
        for tokens, targets in itertools.islice(batches(text, 8, shape.context, seed), arguments.steps):
            loss = model.loss(tokens, targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    finally:
        if encoding != TORCHAO:
            swapper.of(optimizer).close()
    with torch.no_grad():
        few = itertools.islice(batches(held_out, 32, shape.context, 0), EVALUATED)
        result = statistics.fmean(model.loss(tokens, targets).item() for tokens, targets in few)
    every = arguments.every
    return [statistics.fmean(losses[at : at + every]) for at in range(0, len(losses), every)], result


def torchao_adamw(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Its AdamW with state in 8 bits, with the options of that in `CLASSES`."""
    made: torch.optim.Optimizer = importlib.import_module("torchao.optim").AdamW8bit(parameters, lr=1e-3)
    return made


def draw(curves: dict[str, dict[str, list[list[float]]]], every: int, path: Path) -> None:
    """A chart for each optimizer: every run, exact ones below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(curves), figsize=(4 * len(curves), 3.2), squeeze=False, layout="constrained")
    for axis, (name, by_encoding) in zip(axes[0], curves.items(), strict=True):
        for encoding, runs in by_encoding.items():
            for i, run in enumerate(runs):
                steps = [every * (at + 1) for at in range(len(run))]
                style = "-" if encoding == "exact" else "--"
                label = encoding if i == 0 else None
                axis.plot(steps, run, style, color=COLORS[encoding], linewidth=1, alpha=0.7, label=label)
        axis.set(title=name, xlabel="step", ylabel="training loss")
        axis.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
