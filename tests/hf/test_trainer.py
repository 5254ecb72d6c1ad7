"""`SwapCallback`, `SwapTrainer` and `prepare`: losses, norms, parameters and state have the bits of the plain run."""

from __future__ import annotations

import gc
import itertools
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers
from accelerate import Accelerator
from launcher import run_program
from peft import LoraConfig, get_peft_model
from ranks import in_processes
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from twins import small_records

import swapper
from swapper.hf import SwapCallback, SwapTrainer, prepare
from swapper.optimizer.twin import equal

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing. is deprecated:FutureWarning")

OPTIMIZER = {"offload_optimizer": {"device": "nvme"}}
GRADIENTS = {**OPTIMIZER, "offload_gradient": {"device": "nvme"}}
EVERYTHING = {**GRADIENTS, "offload_param": {"device": "nvme"}}
SECTIONS = {"optimizer": OPTIMIZER, "gradients": GRADIENTS, "everything": EVERYTHING}

_tokens = torch.Generator().manual_seed(1)
DATA = [{"input_ids": (row := torch.randint(0, 256, (16,), generator=_tokens)), "labels": row} for _ in range(24)]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    transformers.utils.logging.enable_progress_bar()
    transformers.utils.logging.set_verbosity(verbosity)


def llama(lora: bool = False) -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=2, max_position_embeddings=64, **shape))
    if lora:
        return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    return model


def trainer(directory: Path, lora: bool = False, kind: type[Trainer] = Trainer, **options: Any) -> Trainer:
    """A Trainer of a small Llama over six steps; `options` are arguments of the Trainer or of TrainingArguments."""
    names = ("callbacks", "swap_config", "model_init", "model", "optimizers")
    own = {name: options.pop(name) for name in names if name in options}
    defaults = {"max_steps": 6, "per_device_train_batch_size": 2, "save_strategy": "no", "logging_steps": 1, "seed": 3}
    fixed = {"output_dir": str(directory), "report_to": [], "disable_tqdm": True, "use_cpu": True}
    if "model_init" not in own and "model" not in own:
        own["model"] = llama(lora)
    return kind(
        args=TrainingArguments(**fixed, **{**defaults, **options}), train_dataset=DATA, eval_dataset=DATA[:4], **own
    )


def config(tmp_path: Path, sections: dict[str, Any]) -> swapper.OffloadConfig:
    drive = tmp_path / "drive"
    drive.mkdir(exist_ok=True)
    return swapper.OffloadConfig(nvme_path=drive, pool_bytes="32MiB", **sections)


def results(trained: Trainer) -> tuple[list[Any], dict[str, torch.Tensor], dict[str, Any]]:
    """What is compared: losses and norms, parameters, state."""
    keys = ("loss", "grad_norm", "eval_loss")
    log = [[entry[key] for key in keys if key in entry] for entry in trained.state.log_history]
    return log, dict(trained.model.state_dict()), trained.optimizer.state_dict()


def assert_same(got: Trainer, expected: Trainer) -> None:
    log, values, state = results(got)
    expected_log, expected_values, expected_state = results(expected)
    assert log == expected_log
    assert values.keys() == expected_values.keys()
    for name, value in values.items():
        assert torch.equal(value, expected_values[name]), name
    assert state["param_groups"] == expected_state["param_groups"]
    assert state["state"].keys() == expected_state["state"].keys()
    for key, entries in state["state"].items():
        for name, value in entries.items():
            other = expected_state["state"][key][name]
            assert equal(value, other), (key, name)


def is_swapped(trained: Trainer, sections: dict[str, Any]) -> bool:
    inner = trained.optimizer.optimizer
    has_parameters = hasattr(trained.model, "swapper")
    return isinstance(inner.swapper, swapper.OptimizerSwapper) and has_parameters == ("offload_param" in sections)


OPTIONS: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation_steps": 3},
    "no clipping": {"max_grad_norm": 0.0},
    "small norm": {"max_grad_norm": 0.01},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "bf16": {"bf16": True},
    "epochs": {
        "max_steps": -1,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 5,
        "gradient_accumulation_steps": 2,
    },
    "for-loop": {"optim": "adamw_torch", "weight_decay": 0.1},
    "sgd": {"optim": "sgd"},
    "adafactor": {"optim": "adafactor"},
    "8 bits": {"optim": "adamw_bnb_8bit"},  # but embeddings have 32
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True},
    "warmup": {"lr_scheduler_type": "cosine", "warmup_steps": 2, "label_smoothing_factor": 0.1},
    "lora": {"lora": True},
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("sections", SECTIONS)
def test_training_has_the_bits_of_the_plain_run(tmp_path: Path, sections: str, options: str) -> None:
    if options == "8 bits":
        pytest.importorskip("bitsandbytes")
    plain = trainer(tmp_path / "plain", **OPTIONS[options])
    plain.train()
    swapped = trainer(
        tmp_path / "swapped", callbacks=[SwapCallback(config(tmp_path, SECTIONS[sections]))], **OPTIONS[options]
    )
    swapped.train()
    assert is_swapped(swapped, SECTIONS[sections])
    assert_same(swapped, plain)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sections", SECTIONS)
@pytest.mark.parametrize(("first", "second"), [(True, True), (False, True), (True, False)])
def test_resuming_from_its_own_and_from_plain_checkpoints(
    tmp_path: Path, sections: str, first: bool, second: bool
) -> None:
    """Who saves and who resumes is swapped or plain; files and results are those of the plain run."""
    options = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}
    expected = trainer(tmp_path / "expected", **options)
    expected.train()

    def callbacks(wanted: bool) -> list[Any]:
        return [SwapCallback(config(tmp_path, SECTIONS[sections]))] if wanted else []

    trainer(tmp_path / "run", callbacks=callbacks(first), **options).train()
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt"):
        saved, plain = (tmp_path / run / "checkpoint-4" / name for run in ("run", "expected"))
        if name == "optimizer.pt":
            loaded, other = (torch.load(path, weights_only=True)["state"] for path in (saved, plain))
            for key, entries in other.items():
                assert all(torch.equal(value, loaded[key][entry]) for entry, value in entries.items())
        elif name == "model.safetensors":
            assert saved.read_bytes() == plain.read_bytes()
    shutil.rmtree(tmp_path / "run" / "checkpoint-6")
    resumed = trainer(tmp_path / "run", callbacks=callbacks(second), **options)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6
    assert_same(resumed, expected)


@pytest.mark.parametrize("sections", SECTIONS)
def test_the_best_model_is_loaded_at_the_end(tmp_path: Path, sections: str) -> None:
    options = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,
    }
    plain = trainer(tmp_path / "plain", **options)
    plain.train()
    swapped = trainer(tmp_path / "run", callbacks=[SwapCallback(config(tmp_path, SECTIONS[sections]))], **options)
    swapped.train()
    assert_same(swapped, plain)
    assert swapped.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]
    assert swapped.predict(DATA[:3]).predictions.tobytes() == plain.predict(DATA[:3]).predictions.tobytes()
    for one in (swapped, plain):
        one.save_model()
    files = [tmp_path / run / "model.safetensors" for run in ("run", "plain")]
    assert files[0].read_bytes() == files[1].read_bytes()


class Overriding(Trainer):
    """As libraries derive from the Trainer: an optimizer of their own, a loss of their own."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.NAdam(self.model.parameters(), lr=1e-3)
        return self.optimizer

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **named: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **named)
        return (loss * 2, outputs) if return_outputs else loss * 2


@pytest.mark.long
def test_subclasses_mixins_and_callbacks_that_come_later(tmp_path: Path) -> None:
    class Mixed(SwapTrainer, Overriding): ...

    plain = trainer(tmp_path / "plain", kind=Overriding)
    plain.train()
    added = trainer(tmp_path / "added", kind=Overriding)
    added.add_callback(SwapCallback(config(tmp_path, EVERYTHING)))
    given = trainer(tmp_path / "given", kind=Overriding, callbacks=[SwapCallback(config(tmp_path, EVERYTHING))])
    mixed = trainer(tmp_path / "mixed", kind=Mixed, swap_config=config(tmp_path, EVERYTHING))
    for swapped in (added, given, mixed):
        swapped.train()
        assert is_swapped(swapped, EVERYTHING)
        assert_same(swapped, plain)


class WithoutHash(Trainer):
    """As those of TRL are that are dataclasses by their decorator (`KTOTrainer` of TRL 1.16)."""

    __hash__ = None  # type: ignore[assignment]


def test_a_trainer_that_has_no_hash(tmp_path: Path) -> None:
    plain = trainer(tmp_path / "plain", kind=WithoutHash)
    plain.train()
    swapped = trainer(tmp_path / "swapped", kind=WithoutHash, callbacks=[SwapCallback(config(tmp_path, EVERYTHING))])
    swapped.train()
    assert is_swapped(swapped, EVERYTHING)
    assert_same(swapped, plain)


def test_an_optimizer_of_the_users_with_a_schedule(tmp_path: Path) -> None:
    def with_optimizer(directory: Path, **options: Any) -> Trainer:
        made = trainer(directory, **options)
        made.optimizer = torch.optim.SGD(made.model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        made.lr_scheduler = torch.optim.lr_scheduler.StepLR(made.optimizer, 2)
        made.train()
        return made

    plain = with_optimizer(tmp_path / "plain")
    swapped = with_optimizer(tmp_path / "swapped", callbacks=[SwapCallback(config(tmp_path, EVERYTHING))])
    assert_same(swapped, plain)


@pytest.mark.parametrize("sections", SECTIONS)
def test_adafactor_with_the_schedule_that_reads_its_state(tmp_path: Path, sections: str) -> None:
    runs = []
    for name, callbacks in (("plain", []), ("swapped", [SwapCallback(config(tmp_path, SECTIONS[sections]))])):
        model = llama()
        optimizer = transformers.Adafactor(
            model.parameters(), scale_parameter=True, relative_step=True, warmup_init=True, lr=None
        )
        schedule = transformers.optimization.AdafactorSchedule(optimizer, 0.1)
        trained = trainer(tmp_path / name, model=model, callbacks=callbacks, optimizers=(optimizer, schedule))
        trained.train()
        runs.append((trained, [entry.get("learning_rate") for entry in trained.state.log_history]))
    (plain, plain_rates), (swapped, rates) = runs
    assert is_swapped(swapped, SECTIONS[sections]) and rates == plain_rates and len({*rates}) > 2
    assert_same(swapped, plain)


@pytest.mark.long
def test_training_again_and_models_that_are_made_anew(tmp_path: Path) -> None:
    """`train` twice goes on with the same optimizer; with `model_init` each begins with a new model."""
    for options in ({}, {"model_init": llama}):
        plain = trainer(tmp_path / "plain", **options)
        swapped = trainer(tmp_path / "swapped", callbacks=[SwapCallback(config(tmp_path, EVERYTHING))], **options)
        for _ in range(2):
            plain.train()
            swapped.train()
            assert is_swapped(swapped, EVERYTHING)
            assert_same(swapped, plain)


@pytest.mark.parametrize("shared", ["nothing", "config", "callback"])
def test_two_trainers_of_one_model(tmp_path: Path, shared: str) -> None:
    """As for two tasks, one after the other; an equal config is as good as the same."""
    own = config(tmp_path, EVERYTHING)
    callback = SwapCallback(own)

    def callbacks() -> list[Any]:
        kinds = {"nothing": SwapCallback(own.model_dump()), "config": SwapCallback(own), "callback": callback}
        return [kinds[shared]]

    models, losses = [llama(), llama()], []
    for model, swaps in zip(models, (False, True), strict=True):
        for steps in (3, 2):
            made = trainer(
                tmp_path / "run",
                model=model,
                callbacks=callbacks() if swaps else [],
                max_steps=steps,
            )
            made.train()
            losses.append([entry["loss"] for entry in made.state.log_history if "loss" in entry])
    assert losses[:2] == losses[2:]
    values = [dict(model.state_dict()) for model in models]
    assert all(torch.equal(value, values[1][name]) for name, value in values[0].items())


def test_what_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    settings = config(tmp_path, {"offload_optimizer": {"device": "nvme", "step_in_backward": True}})
    with pytest.raises(swapper.ConfigError, match="gradient_accumulation_steps"):
        trainer(tmp_path / "run", callbacks=[SwapCallback(settings)], gradient_accumulation_steps=2)
    with pytest.raises(swapper.ConfigError, match="max_grad_norm to 0"):
        trainer(tmp_path / "run", callbacks=[SwapCallback(settings)]).train()
    settings = config(tmp_path, {**OPTIMIZER, "gradient_accumulation_steps": 3})
    with pytest.raises(swapper.ConfigError, match="3 in the config, and 2 in TrainingArguments"):
        trainer(tmp_path / "run", callbacks=[SwapCallback(settings)], gradient_accumulation_steps=2)
    for name in ("bf16_full_eval", "fp16_full_eval"):
        trainer(tmp_path / "run", callbacks=[SwapCallback(config(tmp_path, GRADIENTS))], **{name: True})
        with pytest.raises(swapper.ConfigError, match=name):
            trainer(tmp_path / "run", callbacks=[SwapCallback(config(tmp_path, EVERYTHING))], **{name: True})
    with pytest.raises(swapper.ConfigError, match="offload_optimiser"):
        SwapCallback({"nvme_path": tmp_path, "offload_optimiser": {}})


def test_steps_in_backward_without_clipping(tmp_path: Path) -> None:
    settings = config(tmp_path, {"offload_optimizer": {"device": "nvme", "step_in_backward": True}})
    plain = trainer(tmp_path / "plain", max_grad_norm=0.0)
    plain.train()
    swapped = trainer(tmp_path / "run", callbacks=[SwapCallback(settings)], max_grad_norm=0.0)
    swapped.train()
    losses = [[entry["loss"] for entry in one.state.log_history if "loss" in entry] for one in (plain, swapped)]
    assert losses[0] == losses[1]


def test_nothing_stays_when_the_trainer_is_gone(tmp_path: Path) -> None:
    swapped = trainer(tmp_path / "run", callbacks=[SwapCallback(config(tmp_path, EVERYTHING))])
    swapped.train()
    del swapped
    gc.collect()
    assert not list((tmp_path / "drive").rglob("*.swap")) and not any((tmp_path / "drive").iterdir())


# --- accelerate -------------------------------------------------------------------------------------------------


def test_a_torch_without_settings_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2.6 has none. It is asked for where the Trainer may load a checkpoint; `torch.load` itself needs it today."""
    trained = trainer(tmp_path / "run", callbacks=[SwapCallback(config(tmp_path, OPTIMIZER))])
    monkeypatch.setitem(sys.modules, "torch.utils.serialization", None)
    trained._load_optimizer_and_scheduler(None)


def by_hand(directory: Path, settings: Any, accumulate: int, clip: str, resume: bool) -> tuple[Any, Any, list[float]]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader = torch.utils.data.DataLoader(DATA, batch_size=4)
    if settings is None:
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    else:
        model, optimizer, loader, schedule = prepare(accelerator, model, optimizer, settings, loader, schedule)
    losses = []
    for step, batch in enumerate(itertools.chain(loader, loader)):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients and clip == "norm":
                losses.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            elif accelerator.sync_gradients and clip == "value":
                accelerator.clip_grad_value_(model.parameters(), 1e-3)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if resume and step == 5:
            accelerator.save_state(str(directory))
            accelerator.wait_for_everyone()
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(2)
            accelerator.load_state(str(directory))
    return model, optimizer, losses


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sections", SECTIONS)
@pytest.mark.parametrize("resume", [False, True])
def test_a_loop_with_accelerate(tmp_path: Path, sections: str, resume: bool) -> None:
    accumulate, clip = random.Random(f"{sections}{resume}").choice(
        [(1, "norm"), (2, "value"), (3, "norm"), (2, "none")]
    )
    expected = by_hand(tmp_path / "plain", None, accumulate, clip, resume)
    got = by_hand(tmp_path / "run", config(tmp_path, SECTIONS[sections]), accumulate, clip, resume)
    assert got[2] == expected[2]
    for (name, value), other in zip(got[0].state_dict().items(), expected[0].state_dict().values(), strict=True):
        assert torch.equal(value, other), name
    state, expected_state = (each[1].state_dict()["state"] for each in (got, expected))
    for key, entries in expected_state.items():
        assert all(torch.equal(value, state[key][name]) for name, value in entries.items())


def test_prepare_refuses_by_name_what_is_no_accelerator_model_or_optimizer(tmp_path: Path) -> None:
    settings = config(tmp_path, OPTIMIZER)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    accelerator: Any = Accelerator(cpu=True)
    for given, says in (
        ((None, model, optimizer), "NoneType is not an accelerate.Accelerator"),
        ((accelerator, None, optimizer), "NoneType is not a torch.nn.Module"),
        ((accelerator, model, None), "NoneType is not a torch.optim.Optimizer"),
        ((accelerator, model, []), "no optimizer is given"),
    ):
        with pytest.raises(swapper.ConfigError, match=says):
            prepare(*given, settings)
    assert type(optimizer).__name__ == "AdamW" and not hasattr(optimizer, "swapper")


@pytest.mark.parametrize("how", ["clip_grad_norm_", "clip_grad_value_"])
def test_clipping_takes_its_arguments_by_name(tmp_path: Path, how: str) -> None:
    limit = {"clip_grad_norm_": "max_norm", "clip_grad_value_": "clip_value"}[how]
    found = []
    for swapped in (False, True):
        accelerator, model = Accelerator(cpu=True), llama()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
        if swapped:
            model, optimizer = prepare(accelerator, model, optimizer, config(tmp_path, EVERYTHING))
        accelerator.backward(model(input_ids=torch.arange(4)[None]).logits.square().sum())
        norm = getattr(accelerator, how)(parameters=model.parameters(), **{limit: 1e-3})
        optimizer.step()
        found.append((norm, [p.detach().clone() for p in model.parameters()]))
    assert found[0][0] == found[1][0]
    assert all(map(torch.equal, found[0][1], found[1][1]))


@pytest.mark.parametrize("shared", [False, True])
def test_two_models_prepared_one_after_the_other(tmp_path: Path, shared: bool) -> None:
    found = []
    one = config(tmp_path, EVERYTHING)
    for swapped in (False, True):
        accelerator = Accelerator(cpu=True)
        models, optimizers, norms = [], [], []
        for _ in range(2):
            model = llama()
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
            if swapped:
                settings = one if shared else config(tmp_path, EVERYTHING)
                model, optimizer = prepare(accelerator, model, optimizer, settings)
            models.append(model)
            optimizers.append(optimizer)
        for which in ([0], [1], [0], [0, 1]):
            for i in which:
                accelerator.backward(models[i](input_ids=torch.arange(4)[None]).logits.square().sum())
            parameters = itertools.chain(*(models[i].parameters() for i in which))
            norms.append(float(accelerator.clip_grad_norm_(parameters, 0.5)))
            for i in which:
                optimizers[i].step()
                optimizers[i].zero_grad()
        found.append((norms, [p.detach().clone() for model in models for p in model.parameters()]))
    assert found[0][0] == found[1][0]
    assert all(map(torch.equal, found[0][1], found[1][1]))


MEMORY = """
import sys, time
sys.path[:0] = {paths!r}
import torch, transformers
from torch import nn
from peak import Peak
from transformers import Trainer, TrainingArguments
import swapper
from swapper.hf import SwapCallback

torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(4)])

    def forward(self, x, labels):
        return {{"loss": (self.body(x) - labels).square().mean()}}


rows = [{{"x": torch.ones(2048), "labels": torch.ones(2048)}} for _ in range(4)]


def make():
    shared = {{"max_steps": 1, "report_to": [], "disable_tqdm": True, "use_cpu": True}}
    args = TrainingArguments(output_dir={output!r}, save_steps=1, **shared)
    return Trainer(Wide(), args, train_dataset=rows, callbacks=[SwapCallback({config!r})])


def measured(function):
    def call(*args, **named):
        with Peak() as before:
            time.sleep(0.05)
        with Peak() as peak:
            function(*args, **named)
        print(peak.bytes - before.bytes)
    return call


trainer = make()
trainer._save_optimizer_and_scheduler = measured(trainer._save_optimizer_and_scheduler)
trainer.train()
print(swapper.of(trainer.optimizer.optimizer).stats().state_bytes)
again = make()
again._load_optimizer_and_scheduler = measured(again._load_optimizer_and_scheduler)
again.train(resume_from_checkpoint=True)
print(swapper.of(again.optimizer.optimizer).stats().state_bytes)
"""


@pytest.mark.long
def test_saving_and_resuming_hold_no_copy_of_the_state(tmp_path: Path) -> None:
    tests = Path(__file__).resolve().parents[1]
    (tmp_path / "drive").mkdir()
    settings = {"nvme_path": str(tmp_path / "drive"), "pool_bytes": "8MiB", "bucket_bytes": "1MiB", **OPTIMIZER}
    script = MEMORY.format(
        paths=[str(tests.parent / "benchmarks"), str(tests / "support")], output=str(tmp_path / "run"), config=settings
    )
    done = run_program([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    numbers = [int(line) for line in done.stdout.splitlines() if line.lstrip("-").isdigit()]
    for grown_bytes, state_bytes in zip(numbers[::2], numbers[1::2], strict=True):
        assert state_bytes > 128 << 20
        assert grown_bytes < 48 << 20, "a pool of 8 MiB, pieces of 16 MiB"


# --- Several ranks --------------------------------------------------------------------------------------------------


def train_on_ranks(rank: int, tmp_path: Path, sections: str) -> None:
    """The Trainer's and accelerate's own data parallelism: each rank has its part of the batches, and the same bits."""
    transformers.utils.logging.set_verbosity_error()
    options = {"save_strategy": "steps", "save_steps": 3, "ddp_backend": "gloo", "gradient_accumulation_steps": 2}
    plain = trainer(tmp_path / "plain", **options)
    plain.train()
    assert torch.distributed.get_world_size() == 2
    settings = config(tmp_path, SECTIONS[sections])
    swapped = trainer(tmp_path / "swapped", callbacks=[SwapCallback(settings)], **options)
    swapped.train()
    assert is_swapped(swapped, SECTIONS[sections])
    assert_same(swapped, plain)
    of_plain = trainer(tmp_path / "plain", callbacks=[SwapCallback(settings)], **options)
    of_plain.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-3"))
    assert_same(of_plain, plain)
    expected, got = (by_hand(tmp_path / str(i), each, 2, "norm", True) for i, each in enumerate((None, settings)))
    assert got[2] == expected[2]
    for value, other in zip(got[0].state_dict().values(), expected[0].state_dict().values(), strict=True):
        assert torch.equal(value, other)
    torch.distributed.destroy_process_group()


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("sections", SECTIONS)
def test_data_parallel_training_has_the_bits_of_the_plain_run(tmp_path: Path, sections: str) -> None:
    (tmp_path / "drive").mkdir()
    in_processes(train_on_ranks, tmp_path, sections)


def train_more_than_the_pool_holds(rank: int, tmp_path: Path) -> None:
    """DDP makes models alike that begin otherwise on each rank, and has all parameters in memory for that."""
    transformers.utils.logging.set_verbosity_error()
    settings = swapper.OffloadConfig(
        nvme_path=tmp_path / "drive", pool_bytes="1MiB", bucket_bytes="32KiB", **EVERYTHING
    )

    def model() -> Any:
        made = llama()
        with torch.no_grad():
            for p in made.parameters():
                p.add_(0.01 * rank)
        return made

    options = {"ddp_backend": "gloo", "max_steps": 2}
    plain = trainer(tmp_path / "plain", model=model(), **options)
    plain.train()
    with small_records():
        swapped = trainer(tmp_path / "swapped", model=model(), callbacks=[SwapCallback(settings)], **options)
        swapped.train()
    assert sum(p.nbytes for p in swapped.model.parameters()) > 1 << 20
    assert_same(swapped, plain)
    torch.distributed.destroy_process_group()


@pytest.mark.long
def test_replicas_of_a_model_that_the_pool_does_not_hold(tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir()
    in_processes(train_more_than_the_pool_holds, tmp_path)
