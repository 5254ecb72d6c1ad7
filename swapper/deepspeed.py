"""What a DeepSpeed config means in swapper's settings; used by `OffloadConfig.from_deepspeed`.

Source: https://www.deepspeed.ai/docs/config-json/, the sections `zero_optimization` and `aio`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from swapper.errors import ConfigError, show

__all__ = ["translate"]

_DEEPSPEED_OPTIMIZER_NOTES: dict[str, tuple[Callable[[Any], bool], str]] = {
    # key: (the values that need saying, why)
    "buffer_count": (lambda value: True, "memory is bounded by pool_bytes instead"),
    "pin_memory": (lambda value: value is False, "the pool is always page-locked, where the limit allows"),
    "pipeline_read": (lambda value: value is False, "reading ahead is always on"),
    "pipeline_write": (lambda value: value is False, "writing behind is always on"),
    "pipeline": (lambda value: value is False, "reading ahead and writing behind are always on"),
    "fast_init": (lambda value: value is True, "there is no other way to initialise"),
    "ratio": (lambda value: value != 1, "all of the state is offloaded, never a part"),
}

_DEEPSPEED_PARAM_NOTES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **{key: (lambda value: True, "memory is bounded by pool_bytes instead") for key in ("buffer_count", "buffer_size")},
    "max_in_cpu": (lambda value: True, "what the pool has room for is kept; resident_bytes keeps more"),
    "pin_memory": _DEEPSPEED_OPTIMIZER_NOTES["pin_memory"],
    "ratio": (lambda value: value != 1, "all parameters are offloaded, never a part"),
}


def _take(section: dict[str, Any], name: str, default: Any = None) -> Any:
    """Take `name` out of `section`. "auto" counts as not given; a float without a fraction is an integer."""
    value = section.pop(name, default)
    if value == "auto" or value is None:
        return default
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _take_section(document: dict[str, Any], name: str, path: str = "") -> dict[str, Any]:
    value = _take(document, name, {})
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}{name}: {show(value)} is not a mapping; DeepSpeed has one here")
    return dict(value)


def _rest(section: Mapping[str, Any], path: str = "") -> str:
    """The keys that nobody took, but for those left to Hugging Face."""
    return ", ".join(f"{path}{key}" for key, value in section.items() if value not in (None, "auto"))


def translate(document: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Our settings for a DeepSpeed config, and a line for each key that has none.

    Args:
        document: the content of the file; what was read is taken out of it.

    Returns:
        What `OffloadConfig` takes, and lines of the form "key: why".

    Raises:
        ConfigError: the document is not one of DeepSpeed's, or cannot be honoured and must not be ignored.
    """
    unhonoured: list[str] = []
    if isinstance(document.get("zero_optimization"), bool):  # DeepSpeed's oldest form
        document["zero_optimization"] = {"stage": int(document["zero_optimization"])}
    zero = _take_section(document, "zero_optimization")
    optimizer = _take_section(zero, "offload_optimizer", "zero_optimization.")
    param = _take_section(zero, "offload_param", "zero_optimization.")
    if _take(zero, "cpu_offload") is True:  # the older names of `device: cpu`
        optimizer.setdefault("device", "cpu")
    if _take(zero, "cpu_offload_params") is True:
        param.setdefault("device", "cpu")
    _take(zero, "cpu_offload_use_pin_memory")

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
    if device in ("cpu", "nvme"):
        unhonoured += _note_stage(stage, device)
        unhonoured += _note_section("offload_optimizer", optimizer, _DEEPSPEED_OPTIMIZER_NOTES)
    if param_device in ("cpu", "nvme"):
        unhonoured += _note_section("offload_param", param, _DEEPSPEED_PARAM_NOTES)
    if device == param_device == "none":
        unhonoured.append("zero_optimization.offload_optimizer: has no device, so nothing will be swapped")
    if device == param_device == "nvme" and path is not None and param_path not in (None, path):
        unhonoured.append(
            f"zero_optimization.offload_param.nvme_path ({show(param_path)}): all goes to offload_optimizer's, {path}"
        )
    if "sub_group_size" in zero and _take(zero, "sub_group_size") is not None:
        unhonoured.append("zero_optimization.sub_group_size: bucket_bytes bounds what is stepped at once instead")
    if _rest(zero):
        unhonoured.append(f"{_rest(zero, 'zero_optimization.')}: about sharding and communication, not read")

    masters = _translate_precision(document, unhonoured)
    values: dict[str, Any] = {
        "offload_optimizer": {"device": device, "master_weights": masters},
        # Where DeepSpeed's gradients go that have no room: as large as the parameters, they belong to both.
        "offload_gradient": {"device": "nvme" if device == param_device == "nvme" else "none"},
        "offload_param": {"device": param_device},
        "aio": _translate_aio(document, unhonoured),
    }
    if (steps := _take(document, "gradient_accumulation_steps")) is not None:
        values["gradient_accumulation_steps"] = steps
    if "nvme" in (device, param_device):
        values["nvme_path"] = path if path is not None else param_path
    if _rest(document):
        unhonoured.append(f"{_rest(document)}: not about swapping, not read; your training loop does this")
    return values, unhonoured


def _note_section(
    name: str, section: Mapping[str, Any], notes: Mapping[str, tuple[Callable[[Any], bool], str]]
) -> Iterator[str]:
    for key, value in section.items():
        applies, why = notes.get(key, (lambda value: True, "swapper has no such setting"))
        if value != "auto" and value is not None and applies(value):
            yield f"zero_optimization.{name}.{key} ({show(value)}): {why}"


def _note_stage(stage: object, device: str) -> Iterator[str]:
    if stage == 0 or (stage in (1, 2) and device == "nvme"):
        yield (
            f"zero_optimization.stage ({stage}): DeepSpeed accepts device {device!r} at this stage and offloads "
            f"nothing; swapper does offload the state"
        )
    if stage in (1, 2, 3):
        yield f"zero_optimization.stage ({stage}): no sharding over ranks, each process steps and swaps all it is given"


def _translate_precision(document: dict[str, Any], unhonoured: list[str]) -> bool:
    """Whether DeepSpeed would keep fp32 masters."""
    masters = False
    for name, dtype in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16")):
        section = _take_section(document, name)
        enabled = section.pop("enabled", False)
        if enabled not in (True, "auto"):
            if enabled is not False:
                raise ConfigError(f"{name}.enabled: {show(enabled)} is not a switch; write true or false")
            continue
        masters = True
        for key in ("bf16_master_weights_and_grads", "fp16_master_weights_and_grads"):
            if _take(section, key) is True:
                masters = False
        if enabled is True:
            unhonoured.append(f"{name}.enabled: the model is not cast for you; call model.to(torch.{dtype})")
        if enabled is True and name == "fp16":
            unhonoured.append("fp16: the loss is not scaled for you; use torch.amp.GradScaler")
        if _rest(section):
            unhonoured.append(f"{_rest(section, f'{name}.')}: not read")
    return masters


def _translate_aio(document: dict[str, Any], unhonoured: list[str]) -> dict[str, Any]:
    aio = _take_section(document, "aio")
    values: dict[str, Any] = {}
    for key in ("block_size", "queue_depth", "single_submit", "overlap_events", "intra_op_parallelism"):
        value = _take(aio, key)
        if value is not None:
            values[key] = value
    threads = _take(aio, "thread_count")
    if threads is not None and values.setdefault("intra_op_parallelism", threads) != threads:
        unhonoured.append(f"aio.thread_count ({threads}): intra_op_parallelism is given too, and used")
    if _take(aio, "use_gds") is True:
        unhonoured.append("aio.use_gds: bytes go through the pool, not straight to the GPU; not there yet")
    if _rest(aio):
        unhonoured.append(f"{_rest(aio, 'aio.')}: swapper has no such setting")
    return values
