"""Each model class that transformers has tests of, as tiny as there: has it the same bits with swapping?

Each is trained two steps with AdamW in fp32, with parameters, gradients and state on the drive; and in bf16, with its
parameters in the files that `save_pretrained` wrote, it computes, or generates: greedily, by chance, with beams and
without a cache. Outputs, losses and parameters are compared with those of the model in memory, and where one of these
uses fails there, its error. What plain cannot do here, or has other bits of in a second run, does not count. Ends with
an error if something differs, raises or hangs.

The tests are not in the package: they come from a checkout of transformers at the installed version. Where they need
what is not installed, their models are left out. There are about 400 files of them; each takes some seconds.

    python benchmarks/model_classes.py CHECKOUT --nvme-path DIR [--models llama bert ...] [--processes 2]
"""

from __future__ import annotations

import collections
import copy
import functools
import importlib
import logging
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import unittest
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from benchmark import make_parser
from tqdm import tqdm

import swapper
from swapper.parameter import from_files

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))

SECONDS_MAX = 900
"""Of one file of tests."""

EQUAL, NOT_PLAIN = "equal", "not plain"

STEPS = 2
EVERYTHING = {section: {"device": "nvme"} for section in ("offload_optimizer", "offload_gradient", "offload_param")}
WAYS: dict[str, dict[str, Any]] = {
    "greedily": {"do_sample": False},
    "by chance": {"do_sample": True, "top_k": 10},
    "with beams": {"do_sample": False, "num_beams": 2},
    "without a cache": {"do_sample": False, "use_cache": False},
}
"""Of generating."""

Found = list[tuple[str, Any]]
"""The names of what a run has computed, and its bits."""


def main() -> None:
    parser = make_parser(__doc__, results=False)
    parser.add_argument("checkout", type=Path, help="of transformers, at the version that is installed")
    parser.add_argument("--models", nargs="+", help="folders of its tests/models; all by default")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    modules = modules_of(arguments.checkout.resolve(), arguments.models)
    warnings.filterwarnings("ignore")
    logging.getLogger("swapper").setLevel(logging.CRITICAL)
    logs: Any = transformers.logging
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    torch.set_num_threads(1)
    importlib.import_module("tests.test_modeling_common")  # Once, before processes are made.
    outcomes: dict[str, str] = {}
    with ThreadPoolExecutor(arguments.processes) as pool:
        ended = pool.map(functools.partial(in_a_process, path=arguments.nvme_path), modules)
        for some in tqdm(ended, "models", len(modules), disable=not sys.stderr.isatty()):
            outcomes |= some
            for name, outcome in some.items():
                if not outcome.startswith((EQUAL, NOT_PLAIN)):
                    tqdm.write(f"{name}: {outcome}")
    counts = collections.Counter(outcome.partition(":")[0] for outcome in outcomes.values())
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    sys.exit(not counts[EQUAL] or bool(counts.keys() - {EQUAL, NOT_PLAIN}))


def modules_of(checkout: Path, models: list[str] | None) -> list[str]:
    """The modules of tests in `checkout`, which can be imported from here on."""
    sys.path[:0] = [str(checkout), str(checkout / "utils")]
    folder = checkout / "tests" / "models"
    found = sorted(folder.glob("*/test_modeling_*.py"))
    files = [each for each in found if not models or each.parent.name in models]
    if not files:
        sys.exit(f"{folder} has no */test_modeling_*.py{' of these models' if found else ''}")
    return [".".join(each.relative_to(checkout).with_suffix("").parts) for each in files]


def in_a_process(module: str, path: Path) -> dict[str, str]:
    """Return the outcomes of a module: a process of its own leaves nothing behind, and may crash."""
    context = multiprocessing.get_context("fork")  # It has all modules that are imported already.
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(dir=path) as directory:
        process = context.Process(target=send_outcomes, args=(sender, module, Path(directory)))
        process.start()
        sender.close()
        try:
            if receiver.poll(SECONDS_MAX):
                outcomes: dict[str, str] = receiver.recv()
                return outcomes
            return {module: f"hangs: it takes longer than {SECONDS_MAX} s"}
        except EOFError:
            process.join()
            return {module: f"crashes: {process.exitcode}"}
        finally:
            process.kill()
            process.join()


def send_outcomes(sender: Connection, module: str, directory: Path) -> None:
    from_files._SMALL_BYTES = 300  # Of models as tiny as these something shall move.
    random.seed(module)
    with importlib.import_module("twins").small_records():
        sender.send(dict(outcomes_of(module, directory)))


def outcomes_of(module: str, directory: Path) -> Iterator[tuple[str, str]]:
    """Each class in each way, and what came of it: equal, or why not."""
    try:
        cases = [each for each in vars(importlib.import_module(module)).values() if is_case(each)]
    except Exception as error:
        yield module, f"{NOT_PLAIN}: {error!r}"
        return
    for case_class in cases:
        try:
            case = case_class(next(name for name in dir(case_class) if name.startswith("test_")))
            case.setUp()
            classes = list(case.all_model_classes or ())
        except Exception as error:
            yield f"{module}.{case_class.__name__}", f"{NOT_PLAIN}: {error!r}"
            continue
        for model_class in classes:
            for run in (Trained, Computed):
                shutil.rmtree(directory, ignore_errors=True)
                directory.mkdir()
                name = f"{case_class.__name__}, {model_class.__name__} {run.__name__.lower()}"
                yield name, outcome(functools.partial(run, case, model_class, directory))


def is_case(thing: object) -> bool:
    return isinstance(thing, type) and issubclass(thing, unittest.TestCase) and hasattr(thing, "all_model_classes")


def outcome(make: Callable[[], Trained | Computed]) -> str:
    """What the comparison of a run with swapping, and two without, says."""
    try:
        run = make()  # Its inputs are other ones each time.
        plain = run(False)
        if run(False) != plain:
            return f"{NOT_PLAIN}: two runs have other bits"
    except Exception as error:
        return f"{NOT_PLAIN}: {error!r}"
    try:
        found = run(True)
    except Exception as error:
        return f"raises: {type(error).__name__}: {error}"
    other = [name for (name, bits), (_, mine) in zip(plain, found, strict=True) if bits != mine]
    return f"differs: {', '.join(other[:5])}" if other else EQUAL


class Trained:
    """Some steps of a model in fp32."""

    def __init__(self, case: Any, model_class: Any, directory: Path) -> None:
        self.model_class, self.directory = model_class, directory
        self.config, inputs = case.model_tester.prepare_config_and_inputs_for_common()[:2]
        self.inputs = case._prepare_for_class(inputs, model_class, return_labels=True)

    def __call__(self, swapped: bool) -> Found:
        seed(0)
        model = self.model_class(copy.deepcopy(self.config)).float().train()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if swapped:
            more = {"nvme_path": str(self.directory), **EVERYTHING}
            with_least_pool(lambda config: swapper.offload(model, optimizer, config | more))
        found: Found = []
        for step in range(STEPS):
            seed(step)
            output = model(**copy.deepcopy(self.inputs))
            loss = loss_of(output)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            found += [(f"output of step {step}", bits(each)) for each in tensors_in(output)]
            found.append((f"loss of step {step}", bits(loss)))
        found += [(name, bits(each)) for name, each in model.state_dict().items()]
        if swapped:
            optimizer.swapper.close()
            model.swapper.close()
        return found


def with_least_pool(call: Callable[[dict[str, Any]], Any]) -> Any:
    """Call with a config that has about as small a pool as there can be."""
    pool_bytes = 2 << 20
    while True:
        try:
            return call({"pool_bytes": pool_bytes, "bucket_bytes": "64KiB"})
        except swapper.ConfigError:
            if pool_bytes >= 1 << 30:
                raise
            pool_bytes *= 2


class Computed:
    """Uses of a model in bf16, of files."""

    def __init__(self, case: Any, model_class: Any, directory: Path) -> None:
        self.path, self.model_class = directory / "model", model_class
        self.generates = model_class in (getattr(case, "all_generative_model_classes", None) or ())
        if self.generates:
            config, inputs = case.prepare_config_and_inputs_for_generate()
        else:
            config, inputs = case.model_tester.prepare_config_and_inputs_for_common()[:2]
            inputs = case._prepare_for_class(inputs, model_class)
        self.inputs = {name: as_bf16(value) for name, value in inputs.items()}
        seed(0)
        model_class(config).to(torch.bfloat16).save_pretrained(self.path, max_shard_size="60KB")

    def __call__(self, swapped: bool) -> Found:
        if swapped:
            make = functools.partial(swapper.from_pretrained, self.path, model_class=self.model_class)
            model: Any = with_least_pool(lambda config: make(config=config))
        else:
            model = importlib.import_module("pretrained").aligned(self.model_class.from_pretrained(self.path))
        model.eval()
        found: Found = []
        with torch.no_grad():
            for name, options in WAYS.items() if self.generates else [("output", {})]:
                seed(5)
                try:
                    output = self.use(model, options)
                except swapper.SwapError:
                    raise
                except Exception as error:  # A class may have no cache, or no beams.
                    found.append((name, str(error)))
                    continue
                found += [(name, bits(each)) for each in tensors_in(output)]
        if swapped:
            model.swapper.close()
        return found

    def use(self, model: Any, options: dict[str, Any]) -> Any:
        inputs = copy.deepcopy(self.inputs)
        if not self.generates:
            return model(**inputs)
        more = {"output_logits": True, "return_dict_in_generate": True, "min_new_tokens": 4, "max_new_tokens": 4}
        output = model.generate(**inputs, **more, **options)
        return output.sequences, output.logits


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)


def loss_of(output: Any) -> torch.Tensor:
    """The loss that the model computes; else one of all that has a gradient."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.dim() == 0 and loss.requires_grad:
        return loss
    parts = [each.float().square().mean() for each in tensors_in(output) if each.requires_grad and each.numel()]
    return torch.stack(parts).sum()


def tensors_in(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    inside = output.values() if isinstance(output, dict) else output if isinstance(output, (list, tuple)) else ()
    return [tensor for each in inside for tensor in tensors_in(each)]


def as_bf16(value: Any) -> Any:
    return value.to(torch.bfloat16) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def bits(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, bytes]:
    values = tensor.detach().contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0)
    return tensor.shape, tensor.dtype, bytes(values.tolist())


if __name__ == "__main__":
    main()
