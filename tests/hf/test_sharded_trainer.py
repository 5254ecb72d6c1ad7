"""`SwapCallback` and `prepare` where accelerate shards by FSDP2: each rank has its shards, and all ranks the same bits.

accelerate does so on accelerators only, so it is told that each process has one.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from peft import LoraConfig, get_peft_model
from ranks import in_processes
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import swapper
from swapper.hf import SwapCallback, prepare
from swapper.hf.accelerator import swap_when_sharded

OPTIMIZER: dict[str, Any] = {"offload_optimizer": {"device": "nvme"}}
EVERYTHING = {**OPTIMIZER, "offload_gradient": {"device": "nvme"}, "offload_param": {"device": "nvme"}}
IN_BACKWARD = {**EVERYTHING, "offload_optimizer": {"device": "nvme", "step_in_backward": True}}
SECTIONS = {"optimizer": OPTIMIZER, "everything": EVERYTHING, "in backward": IN_BACKWARD}

_tokens = torch.Generator().manual_seed(1)
DATA = [{"input_ids": (row := torch.randint(0, 256, (16,), generator=_tokens)), "labels": row} for _ in range(24)]


def pretend_to_have_accelerators() -> None:
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_NPU
    AcceleratorState._reset_state(False)


class ShardingTrainer(Trainer):
    """A Trainer whose accelerate shards on the CPU."""

    def create_accelerator_and_postprocess(self) -> None:
        pretend_to_have_accelerators()
        super().create_accelerator_and_postprocess()
        assert self.accelerator.is_fsdp2


def llama(lora: bool = False) -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=2, max_position_embeddings=64, **shape))
    if lora:
        return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    return model


def config(path: Path, sections: dict[str, Any]) -> swapper.OffloadConfig:
    return swapper.OffloadConfig(nvme_path=path / "drive", pool_bytes="32MiB", **sections)


# --- The Trainer ----------------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "sharded files": {},
    "full files": {"fsdp": {"state_dict_type": "FULL_STATE_DICT"}},
    "bf16": {"bf16": True},
    "LoRA": {"lora": True},
    "recomputed": {"gradient_checkpointing": True, "fsdp": {"reshard_after_forward": False}},
    "compiled": {"torch_compile": True},
    "fused": {"optim": "adamw_torch_fused", "load_best_model_at_end": True, "metric_for_best_model": "loss"},
}


def trainer(
    path: Path,
    settings: swapper.OffloadConfig | None,
    lora: bool = False,
    fsdp: dict[str, Any] | None = None,
    **options: Any,
) -> Trainer:
    defaults = {"max_steps": 4, "save_steps": 2, "eval_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 2}
    fixed = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "ddp_backend": "gloo", "save_strategy": "steps"}
    shards = {"fsdp_version": 2, "version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], **(fsdp or {})}
    arguments = TrainingArguments(
        output_dir=str(path), eval_strategy="steps", fsdp=True, fsdp_config=shards, **{**fixed, **defaults, **options}
    )
    return ShardingTrainer(
        llama(lora),
        arguments,
        train_dataset=DATA,
        eval_dataset=DATA[:4],
        callbacks=[] if settings is None else [SwapCallback(settings)],
    )


def log_of(trained: Trainer) -> list[dict[str, Any]]:
    timed = ("runtime", "per_second", "flos")
    logs = trained.state.log_history
    return [{key: value for key, value in log.items() if not any(name in key for name in timed)} for log in logs]


def values_of(trained: Trainer) -> dict[str, torch.Tensor]:
    """Of all ranks on the first, nothing on others. Collective."""
    whole = trained.accelerator.get_state_dict(trained.model)
    return {name: value.detach().clone() for name, value in whole.items()}


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in got.items():
        assert torch.equal(value, expected[name]), name


def train(rank: int, path: Path, sections: str, which: str) -> None:
    transformers.utils.logging.set_verbosity_error()
    steps_late = sections != "in backward"
    options = {**OPTIONS[which], "gradient_accumulation_steps": 2 if steps_late else 1}
    options["max_grad_norm"] = 1.0 if steps_late else 0.0
    plain = trainer(path / "plain", None, **options)
    plain.train()
    settings = config(path, SECTIONS[sections])
    swapped = trainer(path / "swapped", settings, **options)
    swapped.train()
    assert isinstance(swapped.optimizer.optimizer.swapper, swapper.OptimizerSwapper)
    assert hasattr(swapped.model, "swapper") == (sections != "optimizer")
    logs = log_of(swapped), log_of(plain)
    if not steps_late:  # Then nobody knows the norm of all gradients.
        for log in logs[1]:
            log.pop("grad_norm", None)
    assert logs[0] == logs[1]
    expected = values_of(plain)
    assert len(expected) == (0 if rank else len(plain.model.state_dict()))
    assert_same(values_of(swapped), expected)
    assert swapped.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]
    for settings_of_resumed, of in ((settings, "plain"), (None, "swapped")):
        resumed = trainer(path / "resumed", settings_of_resumed, **options)
        resumed.train(resume_from_checkpoint=str(path / of / "checkpoint-2"))
        assert_same(values_of(resumed), expected)
    swapped.train()  # Again accelerate is asked to prepare what it has sharded. Plain, that is a KeyError.
    assert all(math.isfinite(log["loss"]) for log in log_of(swapped) if "loss" in log)
    (step, *_) = {float(state["step"]) for state in swapped.optimizer.state.values()}
    assert step == 8
    torch.distributed.destroy_process_group()


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("which", OPTIONS)
@pytest.mark.parametrize("sections", SECTIONS)
def test_training_has_the_bits_of_the_plain_run(tmp_path: Path, sections: str, which: str) -> None:
    (tmp_path / "drive").mkdir()
    in_processes(train, tmp_path, sections, which)


# --- accelerate -----------------------------------------------------------------------------------------------------


def loop(
    rank: int, path: Path, settings: swapper.OffloadConfig | None, scaled: bool, ignores: bool
) -> tuple[list[float], Any, Any]:
    """Six batches in windows of two, saved after the fourth, spoilt and loaded."""
    pretend_to_have_accelerators()
    model = llama()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    if ignores:
        plugin.ignored_modules = [model.lm_head]
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2)
    if scaled:
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    if settings is None:
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    else:
        model, optimizer, schedule = prepare(accelerator, model, optimizer, settings, schedule)
        assert "prepare" not in vars(accelerator), "the next model may be another one's"
    numbers = []
    for step in range(6):
        generator = torch.Generator().manual_seed(2 * step + rank)
        tokens = torch.randint(0, 256, (2, 16), generator=generator)
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            numbers.append(loss.item())
            if accelerator.sync_gradients:
                norm: Any = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                numbers.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if step == 3 and not scaled:  # accelerate 1.15 loads no scaler that has been used.
            accelerator.save_state(str(path / f"state of {settings is None}"))
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(2)
            accelerator.load_state(str(path / f"state of {settings is None}"))
    if scaled:
        numbers.append(accelerator.scaler.get_scale())
    return numbers, accelerator.get_state_dict(model), optimizer


def train_by_hand(rank: int, path: Path, sections: str, way: str) -> None:
    ways = way == "scaled", way == "ignoring a module"
    expected, values, _ = loop(rank, path, None, *ways)
    got, others, optimizer = loop(rank, path, config(path, SECTIONS[sections]), *ways)
    assert got == expected
    assert_same(others, values)
    assert len(values) == (0 if rank else 21)
    assert isinstance(optimizer.optimizer.swapper, swapper.OptimizerSwapper)
    torch.distributed.destroy_process_group()


@pytest.mark.long
@pytest.mark.parametrize("way", ["plain", "scaled", "ignoring a module"])
@pytest.mark.parametrize("sections", ["optimizer", "everything"])
def test_a_loop_with_accelerate(tmp_path: Path, sections: str, way: str) -> None:
    (tmp_path / "drive").mkdir()
    in_processes(train_by_hand, tmp_path, sections, way)


def offer_another(rank: int, path: Path) -> None:
    pretend_to_have_accelerators()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = llama()
    whole = list(model.parameters())
    settings = config(path, EVERYTHING)
    model, _ = prepare(accelerator, model, torch.optim.AdamW(whole), settings)
    with pytest.raises(swapper.ConfigError, match="has parameters that are not its own"):
        prepare(accelerator, model, torch.optim.AdamW(whole), settings)
    prepare(accelerator, model, torch.optim.AdamW(model.parameters()), settings)
    swap_when_sharded(accelerator, settings)
    with pytest.raises(ValueError, match="should be a list with 2 elements"):
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()), device_placement=[True])
    torch.distributed.destroy_process_group()


@pytest.mark.long
def test_an_optimizer_of_what_the_model_was_before_it_was_sharded_is_refused(tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir()
    in_processes(offer_another, tmp_path)


@pytest.mark.parametrize(
    ("kind", "says"), [("FSDP", "set fsdp_version to 2"), ("DEEPSPEED", "accelerate runs as DEEPSPEED")]
)
def test_what_shards_otherwise_is_refused_by_name(nvme_path: Path, kind: str, says: str) -> None:
    accelerator: Any = SimpleNamespace(distributed_type=SimpleNamespace(value=kind), is_fsdp2=False)
    model = torch.nn.Linear(2, 2)
    settings = swapper.OffloadConfig(nvme_path=nvme_path, pool_bytes="8MiB", **OPTIMIZER)
    with pytest.raises(swapper.ConfigError, match=says):
        prepare(accelerator, model, torch.optim.AdamW(model.parameters()), settings)
