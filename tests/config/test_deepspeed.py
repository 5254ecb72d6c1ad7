"""DeepSpeed's configs are read as ours, or refused in words."""

from __future__ import annotations

import copy
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from configs import error_of

from swapper.config import (
    AioConfig,
    OffloadConfig,
)

# --- DeepSpeed ---

ZERO_INFINITY: dict[str, Any] = {
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": "/local_nvme",
            "pin_memory": True,
            "buffer_count": 4,
            "pipeline_read": True,
            "pipeline_write": False,
            "fast_init": False,
            "ratio": 1.0,
        },
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "sub_group_size": 1e9,
    },
    "aio": {
        "block_size": 262144,
        "queue_depth": 8,
        "thread_count": 2,
        "single_submit": False,
        "overlap_events": True,
        "use_gds": True,
    },
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW"},
    "train_batch_size": "auto",
}


def converted(document: dict[str, Any], **options: Any) -> tuple[OffloadConfig, list[str]]:
    """The config, and the lines of the only warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = OffloadConfig.from_deepspeed(document, **options)
    assert len(caught) <= 1
    for one in caught:
        assert one.category is UserWarning
        assert one.filename == __file__
    return config, [line.strip() for one in caught for line in str(one.message).splitlines()[1:]]


def zero(stage: int, device: str = "nvme", **values: Any) -> dict[str, Any]:
    section = {"device": device, "nvme_path": "/local_nvme"}
    return {"zero_optimization": {"stage": stage, "offload_optimizer": section, **values}}


def test_deepspeed_settings_are_mapped() -> None:
    before = copy.deepcopy(ZERO_INFINITY)
    config, lines = converted(ZERO_INFINITY)
    assert before == ZERO_INFINITY
    assert config == OffloadConfig(
        nvme_path="/local_nvme",
        gradient_accumulation_steps=4,
        offload_optimizer={"device": "nvme", "master_weights": True},
        aio={"block_size": 262144, "queue_depth": 8, "intra_op_parallelism": 2},
    )
    keys = {key for line in lines for key in re.sub(r" \(.*?\)", "", line.split(": ")[0]).split(", ")}
    assert keys == {
        "bf16.enabled",
        "zero_optimization.stage",
        "zero_optimization.offload_optimizer.buffer_count",
        "zero_optimization.offload_optimizer.pipeline_write",
        "zero_optimization.overlap_comm",
        "zero_optimization.sub_group_size",
        "aio.use_gds",
        "gradient_clipping",
        "optimizer",
    }


def test_deepspeed_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ZERO_INFINITY))
    with pytest.warns(UserWarning, match=re.escape(f"{path}: what swapper does otherwise")) as caught:
        config = OffloadConfig.from_deepspeed(path)
    assert len(caught) == 1
    assert config == converted(ZERO_INFINITY)[0]


@pytest.mark.parametrize(
    ("text", "message"), [("", "the file is empty"), ("{", "line 1"), ("[]", "not a mapping"), (None, "no such file")]
)
def test_broken_deepspeed_file_is_refused_by_name(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    found = error_of(lambda: OffloadConfig.from_deepspeed(path))
    assert found.startswith(f"{path}: ")
    assert message in found


def test_auto_values_are_defaults() -> None:
    document = {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "auto", "nvme_path": "auto"}},
        "aio": dict.fromkeys(["block_size", "queue_depth", "thread_count", "single_submit", "overlap_events"], "auto"),
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": "auto",
    }
    config, lines = converted(document)
    assert config == OffloadConfig()
    assert lines == ["zero_optimization.offload_optimizer: has no device, so nothing will be swapped"]


def test_deepspeed_keys_that_are_no_strings_are_named_like_others() -> None:
    for section, path in (("zero_optimization", "zero_optimization."), ("checkpoint", "checkpoint.")):
        _, lines = converted({section: {1: "one"}})
        assert f"{path}1: swapper has no such setting" in lines


@pytest.mark.parametrize(
    ("document", "masters"),
    [
        ({}, False),
        ({"bf16": {"enabled": True}}, True),
        ({"bfloat16": {"enabled": True}}, True),
        ({"fp16": {"enabled": True}}, True),
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, True),
        ({"bf16": {"enabled": False}, "fp16": {}}, False),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, False),
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, False),
    ],
)
def test_half_precision_keeps_masters(document: dict[str, Any], masters: bool) -> None:
    assert converted({**document, **zero(3)})[0].offload_optimizer.master_weights is masters


def test_loss_scaling_and_casting_are_named() -> None:
    lines = converted({"fp16": {"enabled": True, "loss_scale": 0}, **zero(3)})[1]
    assert "fp16: the loss is not scaled for you; use torch.amp.GradScaler" in lines
    assert "fp16.enabled: the model is not cast for you; call model.to(torch.float16)" in lines
    assert "fp16.loss_scale: not read" in lines


@pytest.mark.parametrize(
    ("stage", "device", "ignored"),
    [(0, "nvme", True), (1, "nvme", True), (2, "nvme", True), (3, "nvme", False), (0, "cpu", True), (2, "cpu", False)],
)
def test_offload_that_deepspeed_ignores_is_honoured_and_said(stage: int, device: str, ignored: bool) -> None:
    config, lines = converted(zero(stage, device))
    assert config.offload_optimizer.device == device
    assert any("offloads nothing; swapper does" in line for line in lines) is ignored


@pytest.mark.parametrize("state", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_parameters_are_offloaded(device: str, state: str, nvme_path: Path) -> None:
    document = zero(3, state, offload_param={"device": device, "nvme_path": str(nvme_path), "max_in_cpu": 5})
    document["zero_optimization"]["offload_optimizer"].pop("nvme_path", None)
    config, lines = converted(document)
    assert (config.offload_optimizer.device, config.offload_param.device) == (state, device)
    assert config.offload_gradient.device == ("nvme" if state == device == "nvme" else "none")
    if "nvme" in (state, device):
        assert config.nvme_path == nvme_path
    assert any(line.startswith("zero_optimization.offload_param.max_in_cpu (5): ") for line in lines)
    assert config.offload_param.resident_bytes == (20 if device == "nvme" else 0)
    assert not any("nothing will be swapped" in line for line in lines)


def test_a_second_path_for_parameters_is_named(tmp_path: Path) -> None:
    document = zero(3, offload_param={"device": "nvme", "nvme_path": str(tmp_path / "other")})
    assert any("offload_param.nvme_path" in line for line in converted(document)[1])


def test_parameters_go_to_their_own_path_if_the_state_is_on_no_drive(tmp_path: Path) -> None:
    theirs = {"device": "nvme", "nvme_path": str(tmp_path)}
    assert converted(zero(3, "cpu", offload_param=theirs))[0].nvme_path == tmp_path
    del theirs["nvme_path"]
    assert converted(zero(3, "cpu", offload_param=theirs))[0].nvme_path == Path("/local_nvme")


def test_an_unknown_device_of_parameters_is_refused() -> None:
    assert "offload_param.device: 'disk'" in error_of(
        lambda: OffloadConfig.from_deepspeed(zero(3, offload_param={"device": "disk"}))
    )


def test_parameter_offload_that_deepspeed_ignores_is_named() -> None:
    lines = converted(zero(2, offload_param={"device": "cpu"}))[1]
    assert any(line.startswith("zero_optimization.offload_param: parameters stay in memory") for line in lines)


def test_parameter_offload_to_none_is_fine() -> None:
    lines = converted(zero(3, offload_param={"device": "none", "buffer_count": 5}))[1]
    assert not any("offload_param" in line for line in lines)


def test_older_deepspeed_names_are_read() -> None:
    config, _ = converted({"zero_optimization": {"stage": 2, "cpu_offload": True}})
    assert config.offload_optimizer.device == "cpu"
    assert converted({"zero_optimization": True})[0].offload_optimizer.device == "none"
    for name in ("cpu_offload_param", "cpu_offload_params"):
        config, _ = converted({"zero_optimization": {"stage": 3, name: True}})
        assert config.offload_param.device == "cpu"


def test_older_deepspeed_names_beside_newer_ones_are_named() -> None:
    for older, name in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        for device in ("none", "nvme"):
            config, lines = converted(zero(3, **{older: True, name: {"device": device, "nvme_path": "/local_nvme"}}))
            assert getattr(config, name).device == device
            assert f"zero_optimization.{older}: {name}.device is given too, and used" in lines
    assert not any("cpu_offload" in line for line in converted(zero(3, "cpu", cpu_offload=True))[1])


def test_switches_of_deepspeed_may_be_one_and_zero() -> None:
    document: dict[str, Any] = {"zero_optimization": {"stage": 3, "cpu_offload": 1, "cpu_offload_params": "1"}}
    document["bf16"] = {"enabled": 1, "bf16_master_weights_and_grads": 1}
    config, lines = converted({**document, "fp16": {"enabled": 0}, "aio": {"use_gds": 1}})
    assert (config.offload_optimizer.device, config.offload_param.device) == ("cpu", "cpu")
    assert not config.offload_optimizer.master_weights
    assert "bf16.enabled: the model is not cast for you; call model.to(torch.bfloat16)" in lines
    assert any(line.startswith("aio.use_gds") for line in lines)


def test_a_section_without_its_switch_is_named() -> None:
    document = zero(3, offload_param={"device": "cpu"})
    document["zero_optimization"]["offload_optimizer"] = {"Device": "nvme", "nvme_path": "/local_nvme"}
    config, lines = converted({**document, "bf16": {"Enabled": True}, "fp16": {}})
    assert (config.offload_optimizer.device, config.offload_optimizer.master_weights) == ("none", False)
    assert (
        "zero_optimization.offload_optimizer: has no key 'device' beside 'Device', 'nvme_path', so it is off, as in "
        "DeepSpeed"
    ) in lines
    assert "bf16: has no key 'enabled', so it is off, as in DeepSpeed" in lines
    assert not any(line.startswith("fp16") for line in lines)


def test_partial_offload_is_named() -> None:
    document = zero(3)
    document["zero_optimization"]["offload_optimizer"] |= {"ratio": 0.5, "pin_memory": False, "novelty": 1}
    text = "\n".join(converted(document)[1])
    assert "offload_optimizer.ratio (0.5): all of the state is offloaded" in text
    assert "offload_optimizer.pin_memory (False): the pool is always page-locked" in text
    assert "offload_optimizer.novelty (1): swapper has no such setting" in text


def test_thread_counts_that_differ_are_named() -> None:
    config, lines = converted({**zero(3), "aio": {"thread_count": 2, "intra_op_parallelism": 4}})
    assert config.aio.intra_op_parallelism == 4
    assert any(line.startswith("aio.thread_count (2)") for line in lines)


QUOTED = {
    "zero_optimization": {
        "stage": "3",
        "offload_optimizer": {"device": "nvme", "nvme_path": "7", "pipeline_read": "True", "ratio": "1.0"},
        "offload_param": {"device": "nvme", "nvme_path": "7", "max_in_cpu": "1e3"},
    },
    "aio": {
        "single_submit": "false",
        "overlap_events": "true",
        "num_threads": "4",
        "queue_depth": "16",
        "block_size": "1048576",
        "use_gds": "False",
    },
    "bf16": {"enabled": "true"},
    "gradient_accumulation_steps": "2",
}


def test_strings_mean_what_they_mean_without_quotes() -> None:
    config, lines = converted(QUOTED)
    assert config == OffloadConfig(
        nvme_path="7",
        gradient_accumulation_steps=2,
        pool_bytes=(1 << 30) + 2000,
        offload_optimizer={"device": "nvme", "master_weights": True},
        offload_gradient={"device": "nvme"},
        offload_param={"device": "nvme", "resident_bytes": 2000},
        aio={"block_size": 1 << 20, "queue_depth": 16, "intra_op_parallelism": 4},
    )
    assert not any("aio" in line or "ratio" in line or "pipeline" in line for line in lines)


def test_what_the_tuner_of_deepspeed_prints_is_read() -> None:
    printed = '{"aio": {"single_submit": "true", "overlap_events": "false", "num_threads": 2, "queue_depth": 32, '
    document = {**json.loads(printed + '"block_size": 8388608}}'), **zero(3)}
    wanted = AioConfig(
        block_size="8MiB", queue_depth=32, single_submit=True, overlap_events=False, intra_op_parallelism=2
    )
    assert converted(document)[0].aio == wanted


def test_aio_inside_of_zero_optimization_is_read() -> None:
    config, lines = converted(zero(3, aio={"queue_depth": 4, "single_submit": "true"}))
    assert (config.aio.queue_depth, config.aio.single_submit) == (4, True)
    assert not any("aio" in line for line in lines)
    config, lines = converted({**zero(3, aio={"queue_depth": 4, "block_size": 8192}), "aio": {"queue_depth": 8}})
    assert (config.aio.queue_depth, config.aio.block_size) == (8, 8192)
    assert "zero_optimization.aio.queue_depth (4): aio.queue_depth is given too, and used" in lines


@pytest.mark.parametrize(
    ("precision", "numel_bytes"),
    [({}, 4), ({"bf16": {"enabled": True}}, 2), ({"fp16": {"enabled": "auto"}}, 2), ({"bf16": {"enabled": False}}, 4)],
)
def test_max_in_cpu_is_elements_that_stay(precision: dict[str, Any], numel_bytes: int) -> None:
    document = {**zero(3, offload_param={"device": "nvme", "max_in_cpu": 1e9}), **precision}
    config, lines = converted(document)
    assert config.offload_param.resident_bytes == numel_bytes * 10**9
    assert config.pool_bytes == OffloadConfig().pool_bytes + numel_bytes * 10**9
    assert sum("max_in_cpu (1000000000)" in line for line in lines) == 1
    for absent in (None, "auto", 0):
        document = {**zero(3, offload_param={"device": "nvme", "max_in_cpu": absent}), **precision}
        config, lines = converted(document)
        assert (config.offload_param.resident_bytes, config.pool_bytes) == (0, OffloadConfig().pool_bytes)
        assert not any("max_in_cpu" in line for line in lines)


SHARDING = [
    "allgather_partitions",
    "allgather_bucket_size",
    "overlap_comm",
    "reduce_scatter",
    "reduce_bucket_size",
    "grad_hooks",
    "round_robin_gradients",
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_gradients",
    "zeropp_loco_param",
    "stage3_allgather_sequential",
    "stage3_use_all_reduce_for_fetch_params",
    "use_multi_rank_bucket_allreduce",
    "legacy_stage1",
    "mics_shard_size",
    "mics_hierarchical_params_gather",
]
OF_OTHER_THINGS = {
    "stage3_max_live_parameters": "pool_bytes has no room",
    "stage3_max_reuse_distance": "pool_bytes has no room",
    "stage3_prefetch_bucket_size": "read ahead",
    "stage3_param_persistence_threshold": "small parameters are swapped too",
    "stage3_model_persistence_threshold": "small parameters are swapped too",
    "stage3_module_granularity_threshold": "share a record",
    "stage3_gather_16bit_weights_on_model_save": "save_checkpoint",
    "stage3_gather_fp16_weights_on_model_save": "save_checkpoint",
    "sub_group_size": "bucket_bytes",
    "contiguous_gradients": "gradients are tensors of their own",
    "load_from_fp32_weights": "master weights are saved",
    "elastic_checkpoint": "save_checkpoint",
    "pipeline_loading_checkpoint": "save_checkpoint",
    "ignore_unused_parameters": "left out of the step",
    "log_trace_cache_warnings": "diagnostics",
    "enable_sanity_checks": "diagnostics",
    "zero_quantized_nontrainable_weights": "keep their dtype",
    "memory_efficient_linear": "stay as they are",
    "override_module_apply": "stay as they are",
    "save_muon_momentum_buffer_in_memory": "resident_bytes",
    "leaf_module": "each module",
    "zenflow": "step_in_backward",
    "novelty": "swapper has no such setting",
}


def test_the_reason_of_each_key_of_zero_is_its_own() -> None:
    given = {**dict.fromkeys(SHARDING, 1), **dict.fromkeys(OF_OTHER_THINGS, 1)}
    of_key = {}
    for line in converted(zero(3, **given))[1]:
        keys, _, why = line.partition(": ")
        of_key.update(dict.fromkeys(keys.split(", "), why))
    for key in given:
        assert OF_OTHER_THINGS.get(key, "about sharding and communication") in of_key[f"zero_optimization.{key}"]


def test_the_reason_of_each_key_of_checkpoint_is_its_own() -> None:
    section = {"writer": {"type": "FAST"}, "tag_validation": "Warn", "load_universal": False, "novelty": 1}
    section |= {"use_node_local_storage": False, "parallel_write": {"pipeline_stage": False}}
    document = {**zero(3), "checkpoint": {**section, "checkpoint_serialization": True}, "scheduler": {}}
    document["activation_checkpointing"] = {"cpu_checkpointing": True}
    text = "\n".join(converted(document)[1])
    assert "checkpoint.writer: swapper.save_checkpoint writes with the engine" in text
    assert "checkpoint.tag_validation: a checkpoint is a path" in text
    assert "checkpoint.novelty: swapper has no such setting" in text
    assert "activation_checkpointing: activations are not swapped" in text
    assert "scheduler: not about swapping" in text
    for key in document["checkpoint"]:
        assert text.count(f"checkpoint.{key}: ") == 1


def test_path_may_come_from_outside_the_deepspeed_config() -> None:
    document = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}
    assert "nvme_path: null is not enough" in error_of(lambda: OffloadConfig.from_deepspeed(document))
    assert converted(document, nvme_path="/x")[0].nvme_path == Path("/x")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"zero_optimization": "on"}, "zero_optimization: 'on' is not a mapping"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: 4 is not a stage"),
        ({"zero_optimization": {"offload_optimizer": True}}, "zero_optimization.offload_optimizer: True is not a map"),
        (zero(3, "hpu"), "offload_optimizer.device: 'hpu' is not one of none, cpu, nvme"),
        ({**zero(3), "aio": {"block_size": 1000}}, "aio.block_size: 1000 bytes"),
        ({**zero(3), "aio": {"queue_depth": "deep"}}, "aio.queue_depth: 'deep' is not allowed"),
        ({**zero(3), "aio": 3}, "aio: 3 is not a mapping"),
        ({**zero(3), "aio": {"single_submit": "no"}}, "aio.single_submit: 'no' is not"),
        (zero(3, aio=[]), "zero_optimization.aio: [] is not a mapping"),
        ({**zero(3), "checkpoint": "x"}, "checkpoint: 'x' is not a mapping"),
        (
            zero(3, offload_param={"device": "nvme", "max_in_cpu": "all"}),
            "zero_optimization.offload_param.max_in_cpu: 'all' is not a number",
        ),
        ({**zero(3), "bf16": {"enabled": "maybe"}}, "bf16.enabled: 'maybe' is not a switch"),
        (
            {**zero(3), "bf16": {"enabled": True, "bf16_master_weights_and_grads": "yes"}},
            "bf16.bf16_master_weights_and_grads: 'yes' is not a switch",
        ),
        (zero(3, cpu_offload="on"), "zero_optimization.cpu_offload: 'on' is not a switch"),
        (zero(3, cpu_offload_param={}), "zero_optimization.cpu_offload_param: {} is not a switch"),
        ({**zero(3), "aio": {"use_gds": "maybe"}}, "aio.use_gds: 'maybe' is not a switch"),
        (
            {"deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "nvme"}, "mixed_precision": "bf16"},
            "deepspeed_config: this is a config of accelerate; give the DeepSpeed JSON",
        ),
        ({**zero(3), "gradient_accumulation_steps": 0}, "gradient_accumulation_steps: 0 is not allowed"),
    ],
)
def test_wrong_deepspeed_config_is_refused(document: dict[str, Any], message: str) -> None:
    assert error_of(lambda: OffloadConfig.from_deepspeed(document)).startswith(f"DeepSpeed config: {message}")
