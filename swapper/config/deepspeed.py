"""Translates a DeepSpeed config into swapper's settings, for `OffloadConfig.from_deepspeed`.

Source: https://www.deepspeed.ai/docs/config-json/, the sections `zero_optimization`, `aio` and `checkpoint`, and what
DeepSpeed 0.19 accepts in them besides.

[Note: strings] DeepSpeed's tuner prints switches as "true" and "false", and templates fill numbers in as strings. Both
mean what they would mean without the quotes.

[Note: max_in_cpu] DeepSpeed counts elements of the parameters, here bytes are counted. An element is one of 2 bytes if
`bf16` or `fp16` is enabled (or "auto"), else of 4. The pool grows by that much, since `resident_bytes` is part of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from swapper.errors import ConfigError, show

__all__ = ["translate"]

_ANY = object()  # equal to no value
_BOUNDED = (_ANY, "memory is bounded by pool_bytes instead")
_PINNED = (True, "the pool is always page-locked, where the limit allows")

_Notes = Mapping[str, tuple[object, str]]
"""Key: the value that means what swapper does anyway, and the reason why another has no setting."""

_OPTIMIZER_NOTES: _Notes = {
    "buffer_count": _BOUNDED,
    "pin_memory": _PINNED,
    "pipeline_read": (True, "reading ahead is always on"),
    "pipeline_write": (True, "writing behind is always on"),
    "pipeline": (True, "reading ahead and writing behind are always on"),
    "fast_init": (False, "there is no other way to initialise"),
    "ratio": (1, "all of the state is offloaded, never a part"),
}

_PARAM_NOTES: _Notes = {
    "buffer_count": _BOUNDED,
    "buffer_size": _BOUNDED,
    "max_in_cpu": (_ANY, "it bounds what device nvme keeps in memory, and the device is cpu"),
    "pin_memory": _PINNED,
    "ratio": (1, "all parameters are offloaded, never a part"),
}

_PREFETCH = "parameters are read ahead in the order of the step before, as far as pool_bytes has room"
_LIVE = "a parameter leaves memory when pool_bytes has no room; offload_param.resident_bytes keeps some for good"
_PERSISTENT = "small parameters are swapped too, several modules in one record; offload_param.resident_bytes keeps some"
_SAVING = "swapper.save_checkpoint saves whole tensors, read with load_checkpoint or exported"
_LINEAR = "modules of the model stay as they are"
_CHECKS = "swapper has no such diagnostics"
_SHARDING = "about sharding and communication, not read"

_ZERO_NOTES: dict[str, str] = {
    "sub_group_size": "bucket_bytes bounds what is stepped at once instead",
    "prefetch_bucket_size": _PREFETCH,
    "max_live_parameters": _LIVE,
    "max_reuse_distance": _LIVE,
    "param_persistence_threshold": _PERSISTENT,
    "model_persistence_threshold": _PERSISTENT,
    "module_granularity_threshold": "small modules that follow one another share a record of about 16 MiB",
    "leaf_module": "parameters are brought in for each module that uses them",
    "contiguous_gradients": "gradients are tensors of their own, as autograd makes them",
    "save_muon_momentum_buffer_in_memory": "all optimizer state is offloaded; resident_bytes keeps some in memory",
    "zenflow": "each step() steps all parameters; step_in_backward overlaps it with backward",
    "zero_quantized_nontrainable_weights": "frozen parameters keep their dtype",
    "load_from_fp32_weights": "master weights are saved and loaded with the state, to the bit",
    "elastic_checkpoint": _SAVING,
    "gather_16bit_weights_on_model_save": _SAVING,
    "gather_fp16_weights_on_model_save": _SAVING,
    "pipeline_loading_checkpoint": _SAVING,
    "memory_efficient_linear": _LINEAR,
    "override_module_apply": _LINEAR,
    "ignore_unused_parameters": "a parameter without a gradient is left out of the step, as in PyTorch",
    "log_trace_cache_warnings": _CHECKS,
    "enable_sanity_checks": _CHECKS,
    **dict.fromkeys(
        (
            "allgather_bucket_size", "allgather_partitions", "allgather_sequential", "grad_hooks", "legacy_stage1",
            "mics_hierarchical_params_gather", "mics_shard_size", "overlap_comm", "reduce_bucket_size",
            "reduce_scatter", "round_robin_gradients", "use_all_reduce_for_fetch_params",
            "use_multi_rank_bucket_allreduce", "zero_hpz_partition_size", "zero_quantized_gradients",
            "zero_quantized_weights", "zeropp_loco_param",
        ),
        _SHARDING,
    ),
}  # fmt: skip
"""Reasons why keys of `zero_optimization` have no setting here. Keys of stage 3 are without their `stage3_`."""

_CHECKPOINT_NOTES: dict[str, str] = {
    "writer": "swapper.save_checkpoint writes with the engine of `aio`, and swapper.save does for torch.save",
    "checkpoint_serialization": "swapper.save_checkpoint has a format of its own; swapper.save has torch.save's",
    "tag_validation": "a checkpoint is a path, without tags",
    "load_universal": "checkpoints of DeepSpeed are not read",
    "use_node_local_storage": "swapper.save_checkpoint writes where it is told to",
    "parallel_write": "swapper has no pipeline parallelism",
}


_ELSEWHERE: dict[str, str] = {
    "activation_checkpointing": "activations are not swapped; use torch.utils.checkpoint",
    "compile": "nothing is compiled for you; call torch.compile",
    "data_types": "gradients have the dtype of their parameters",
    **dict.fromkeys(
        ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
        "every optimizer is stepped by its own class",
    ),
}
"""Reasons why other sections have no setting here, though they are about memory."""

_READ = ("zero_optimization", "aio", "checkpoint", "bf16", "bfloat16", "fp16", "gradient_accumulation_steps")


def _unquoted(value: Any) -> Any:
    """`value` with strings that are switches or numbers converted, but for paths. See [Note: strings]."""
    if isinstance(value, Mapping):
        return {key: item if key == "nvme_path" else _unquoted(item) for key, item in value.items()}
    if not isinstance(value, str):
        return value
    text = value.strip().lower()
    if text in ("true", "false"):
        return text == "true"
    if re.fullmatch(r"[+-]?\d{1,18}", text):
        return int(text)
    if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", text):
        return float(text)
    return value


def _take(section: dict[str, Any], name: str, default: Any = None) -> Any:
    """Take `name` out of `section`. "auto" counts as not given; a float without a fraction is an integer."""
    value = section.pop(name, default)
    if value == "auto" or value is None:
        return default
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _take_switch(section: dict[str, Any], name: str, path: str) -> bool:
    """Take a switch out of `section`: false if it is not given. DeepSpeed takes 1 and 0 for one, too."""
    value = _take(section, name, False)
    if value not in (True, False):
        raise ConfigError(f"{path}{name}: {show(value)} is not a switch; write true or false")
    return bool(value)


def _take_section(document: dict[str, Any], name: str, path: str = "") -> dict[str, Any]:
    value = _take(document, name, {})
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}{name}: {show(value)} is not a mapping; DeepSpeed has one here")
    return dict(value)


def _rest(section: Mapping[str, Any], path: str = "") -> str:
    """The keys that nobody took, without those left to Hugging Face."""
    return ", ".join(f"{path}{key}" for key, value in section.items() if value not in (None, "auto"))


def _note_rest(section: Mapping[str, Any], path: str, notes: Mapping[str, str]) -> Iterator[str]:
    """A line for each reason in `notes`, with the keys that nobody took and that it is for."""
    keys_of: dict[str, dict[str, Any]] = {}
    for key, value in section.items():
        why = notes.get(str(key).removeprefix("stage3_"), "swapper has no such setting")
        keys_of.setdefault(why, {})[key] = value
    for why, keys in keys_of.items():
        if names := _rest(keys, path):
            yield f"{names}: {why}"


def translate(document: dict[str, Any], pool_bytes: int) -> tuple[dict[str, Any], list[str]]:
    """Our settings for a DeepSpeed config, and a line for each key that has none.

    Args:
        document: the content of the file; what was read is taken out of it.
        pool_bytes: the size of the pool without what `max_in_cpu` keeps in it.

    Returns:
        What `OffloadConfig` takes, and lines of the form "key: why".

    Raises:
        ConfigError: the document is not one of DeepSpeed's, or cannot be honoured and must not be ignored.
    """
    unhonoured: list[str] = []
    if isinstance(document.get("deepspeed_config"), Mapping):
        raise ConfigError(
            "deepspeed_config: this is a config of accelerate; give the DeepSpeed JSON that its deepspeed_config_file "
            "names, or make an OffloadConfig with what its offload_..._device and offload_..._nvme_path say"
        )
    document.update({name: _unquoted(document[name]) for name in _READ if name in document})
    if isinstance(document.get("zero_optimization"), bool):  # DeepSpeed's oldest form
        document["zero_optimization"] = {"stage": int(document["zero_optimization"])}
    zero = _take_section(document, "zero_optimization")
    optimizer = _take_section(zero, "offload_optimizer", "zero_optimization.")
    param = _take_section(zero, "offload_param", "zero_optimization.")
    for older, name, section in (  # the older names of `device: cpu`
        ("cpu_offload", "offload_optimizer", optimizer),
        ("cpu_offload_param", "offload_param", param),
        ("cpu_offload_params", "offload_param", param),
    ):
        if _take_switch(zero, older, "zero_optimization.") and section.setdefault("device", "cpu") != "cpu":
            unhonoured.append(f"zero_optimization.{older}: {name}.device is given too, and used")
    for name, section in (("offload_optimizer", optimizer), ("offload_param", param)):
        if section and "device" not in section:
            unhonoured.append(
                f"zero_optimization.{name}: has no key 'device' beside {', '.join(map(repr, section))}, so it is off, "
                "as in DeepSpeed"
            )
    _take(zero, "cpu_offload_use_pin_memory")
    aio = _translate_aio(document, _take_section(zero, "aio", "zero_optimization."), unhonoured)
    masters, numel_bytes = _translate_precision(document, unhonoured)

    stage = zero.pop("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3, "auto"):
        raise ConfigError(f"zero_optimization.stage: {show(stage)} is not a stage; DeepSpeed has 0, 1, 2 and 3")
    device = _take(optimizer, "device", "none")
    path = _take(optimizer, "nvme_path")
    param_device = _take(param, "device", "none")
    param_path = _take(param, "nvme_path")

    if param_device != "none" and stage in (0, 1, 2):
        unhonoured.append(
            f"zero_optimization.offload_param: parameters stay in memory; DeepSpeed ignores it at stage {stage} as well"
        )
        param_device = "none"
    resident_bytes = 0
    if param_device == "nvme" and (numel := _take(param, "max_in_cpu")) is not None:
        if not isinstance(numel, int) or isinstance(numel, bool) or numel < 0:
            raise ConfigError(f"zero_optimization.offload_param.max_in_cpu: {show(numel)} is not a number of elements")
        resident_bytes = numel * numel_bytes
        if resident_bytes:
            unhonoured.append(
                f"zero_optimization.offload_param.max_in_cpu ({numel}): with {numel_bytes} bytes an element it is "
                f"offload_param.resident_bytes, {resident_bytes}, and pool_bytes is larger by as much"
            )
    if device in ("cpu", "nvme"):
        unhonoured += _note_stage(stage, device)
        unhonoured += _note_section("offload_optimizer", optimizer, _OPTIMIZER_NOTES)
    if param_device in ("cpu", "nvme"):
        unhonoured += _note_section("offload_param", param, _PARAM_NOTES)
    if device == param_device == "none":
        unhonoured.append("zero_optimization.offload_optimizer: has no device, so nothing will be swapped")
    if device == param_device == "nvme" and path is not None and param_path not in (None, path):
        unhonoured.append(
            f"zero_optimization.offload_param.nvme_path ({show(param_path)}): all goes to offload_optimizer's, {path}"
        )
    unhonoured += _note_rest(zero, "zero_optimization.", _ZERO_NOTES)
    checkpoint = _take_section(document, "checkpoint")
    unhonoured += _note_rest(checkpoint, "checkpoint.", _CHECKPOINT_NOTES)
    values: dict[str, Any] = {
        "offload_optimizer": {"device": device, "master_weights": masters},
        # DeepSpeed's gradients go there if they have no room: as large as the parameters, they belong to both.
        "offload_gradient": {"device": "nvme" if device == param_device == "nvme" else "none"},
        "offload_param": {"device": param_device, "resident_bytes": resident_bytes},
        "aio": aio,
    }
    if resident_bytes:
        values["pool_bytes"] = pool_bytes + resident_bytes
    if (steps := _take(document, "gradient_accumulation_steps")) is not None:
        values["gradient_accumulation_steps"] = steps
    if "nvme" in (device, param_device):
        paths = [path, param_path] if device == "nvme" else [param_path, path]
        values["nvme_path"] = next((each for each in paths if each is not None), None)
    unhonoured += _note_rest({key: document.pop(key) for key in _ELSEWHERE if key in document}, "", _ELSEWHERE)
    if _rest(document):
        unhonoured.append(f"{_rest(document)}: not about swapping, not read; your training loop does this")
    return values, unhonoured


def _note_section(name: str, section: Mapping[str, Any], notes: _Notes) -> Iterator[str]:
    for key, value in section.items():
        same, why = notes.get(key, (_ANY, "swapper has no such setting"))
        if value not in ("auto", None, same):
            yield f"zero_optimization.{name}.{key} ({show(value)}): {why}"


def _note_stage(stage: object, device: str) -> Iterator[str]:
    if stage == 0 or (stage in (1, 2) and device == "nvme"):
        yield (
            f"zero_optimization.stage ({stage}): DeepSpeed accepts device {device!r} at this stage and offloads "
            f"nothing; swapper does offload the state"
        )
    if stage in (1, 2, 3):
        yield f"zero_optimization.stage ({stage}): no sharding over ranks, each process steps and swaps all it is given"


def _translate_precision(document: dict[str, Any], unhonoured: list[str]) -> tuple[bool, int]:
    """True if DeepSpeed would keep fp32 masters, and the bytes of an element of a parameter."""
    masters, numel_bytes = False, 4
    for name, dtype in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16")):
        section = _take_section(document, name)
        if section and "enabled" not in section:
            unhonoured.append(f"{name}: has no key 'enabled', so it is off, as in DeepSpeed")
        enabled = section.pop("enabled", False)
        if enabled not in (True, False, "auto"):
            raise ConfigError(f"{name}.enabled: {show(enabled)} is not a switch; write true or false")
        if not enabled:
            continue
        without = [_take_switch(section, f"{each}_master_weights_and_grads", f"{name}.") for each in ("bf16", "fp16")]
        masters, numel_bytes = not any(without), 2
        if enabled != "auto":
            unhonoured.append(f"{name}.enabled: the model is not cast for you; call model.to(torch.{dtype})")
        if enabled != "auto" and name == "fp16":
            unhonoured.append("fp16: the loss is not scaled for you; use torch.amp.GradScaler")
        if _rest(section):
            unhonoured.append(f"{_rest(section, f'{name}.')}: not read")
    return masters, numel_bytes


def _translate_aio(document: dict[str, Any], inner: dict[str, Any], unhonoured: list[str]) -> dict[str, Any]:
    """The section `aio`, and what is misplaced: `inner`, of `zero_optimization`."""
    aio = _take_section(document, "aio")
    for key, value in inner.items():
        if aio.setdefault(key, value) != value:
            unhonoured.append(f"zero_optimization.aio.{key} ({show(value)}): aio.{key} is given too, and used")
    values: dict[str, Any] = {}
    for key in ("block_size", "queue_depth", "single_submit", "overlap_events", "intra_op_parallelism"):
        value = _take(aio, key)
        if value is not None:
            values[key] = value
    for key in ("thread_count", "num_threads"):  # As in the documentation, and as its tuner prints.
        threads = _take(aio, key)
        if threads is not None and values.setdefault("intra_op_parallelism", threads) != threads:
            unhonoured.append(f"aio.{key} ({threads}): another number of threads is given too, and used")
    if _take_switch(aio, "use_gds", "aio."):
        unhonoured.append("aio.use_gds: aio.gds is auto, with which bytes go through the pool where they must")
    if _rest(aio):
        unhonoured.append(f"{_rest(aio, 'aio.')}: swapper has no such setting")
    return values
