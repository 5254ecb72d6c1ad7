"""`swapper.from_pretrained`: a model of transformers whose weights stay in the files that they are in."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from swapper.api.arguments import ConfigLike, as_config
from swapper.api.from_files import OWNERS, is_first_of_ranks, offload_from_files
from swapper.errors import ConfigError, SwapError, SwapIOError, path_given
from swapper.files.dequantised import DEQUANTISES, check_scales
from swapper.files.tensor_files import parse_json, read_small
from swapper.files.torchao_weights import check_fits, check_parts
from swapper.files.unread_models import FilesRead, import_transformers, make_hollow, unread_files
from swapper.files.weights import PACKED_INDEX, find_by_index, newest_snapshot
from swapper.parameter.building import device_of
from swapper.storage.agreement import agreed
from swapper.tensors.grad_modes import outside_of_inference

__all__ = ["from_pretrained"]

_HUB = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
"""Arguments that say where a model is."""

_REFUSED = {
    "state_dict": "the weights come from files; load the model in memory and call swapper.offload",
    "gguf_file": "GGUF files are not read; convert them to safetensors",
    "quantization_config": "the files have the weights as they are used; save the model quantised, as by torchao "
    "(one with dequantize=True, of a model that is quantised, is passed on)",
    "distributed_config": "one process has the whole model in this version of swapper",
    "tp_plan": "one process has the whole model in this version of swapper",
    "tp_size": "one process has the whole model in this version of swapper",
    "device_mesh": "one process has the whole model in this version of swapper",
    "offload_folder": "the weights are read from the files that they are in; leave it out",
    "max_memory": "offload_param and pool_bytes say what may be in memory; leave it out",
}

_QUANTISED = ("torchao", "bitsandbytes", *DEQUANTISES)
"""Names that transformers has for methods of quantisation: what they have quantised may stay in its files."""

_PLAIN = ("model.safetensors", "model.safetensors.index.json")
"""Files by which transformers finds weights that are not of a variant; `swapper.pack_weights` makes one."""

_SPREADS = ("balanced", "balanced_low_0", "sequential")
"""Values of `device_map` that share a model out to all devices."""


def from_pretrained(
    path: str | os.PathLike[str],
    config: ConfigLike,
    *,
    model_class: Any = None,
    strict: bool = True,
    device: torch.device | str | int | None = None,
    **kwargs: Any,
) -> Any:
    """Make a model of transformers whose weights stay in the safetensors files that they are in, for inference.

    The model is what transformers makes of it, by its own `from_pretrained`: class, config, generation config, dtype,
    tied and renamed weights, buffers; in evaluation mode. But no weight is read before it is used. See
    `swapper.offload` with `weights` for what happens then.

    Args:
        path: directory of a model; its name on the Hub, which is downloaded if it is not in the cache; or its directory
            in the cache (`models--NAME`).
        config: an `OffloadConfig`, or what makes one: `{"pool_bytes": "4GiB"}` is enough. With `offload_param.device`
            it must be nvme. Models that are given the same object share one pool.
        model_class: class of transformers, or the name of one; its `from_pretrained` is called. None: the class in
            `architectures` of the model's config, or else `AutoModelForCausalLM`.
        strict: every parameter of the model must be in the files. False: transformers makes what is not, at random
            where it is not known better; it stays in memory.
        device: where the model computes, as for `swapper.offload`; None: what `device_map` says, else torch's default.
        kwargs: of transformers' `from_pretrained`: `dtype`, `attn_implementation`, `revision` and others. What has
            `config` there is `model_config` here. A `quantization_config` may only say `dequantize=True`. A
            `device_map` names one device, by itself or for all modules; "auto" is the accelerator, or the CPU where
            there is none.

    Returns:
        The model; with `output_loading_info=True` what transformers returns then.

    Raises:
        ConfigError: transformers is not there; or an argument, or the model, cannot work. The message says which.
        SwapError: the files do not fit the model, or one is no safetensors file; the message names file and tensor.
        SwapIOError: a file cannot be read, or is cut off.
        OSError: from transformers: there is no such model, or a file of it is missing.
    """
    transformers = import_transformers()
    if isinstance(config, transformers.PreTrainedConfig):
        raise ConfigError("config: this is the model's; give that as model_config, and an OffloadConfig as config")
    settings = as_config(config, waited_for="always")
    tells = kwargs.pop("output_loading_info", False)
    with outside_of_inference():  # What is made here is used outside of that mode too.
        with agreed(is_first_of_ranks(settings)):
            model, files, told, on = _load(transformers, path, model_class, strict, device, kwargs)
        offload_from_files(model, settings, lambda: make_hollow(model, files), next(OWNERS), on)
    return (model, told) if tells else model


def _load(
    transformers: Any,
    path: str | os.PathLike[str],
    model_class: Any,
    strict: bool,
    device: torch.device | str | int | None,
    kwargs: dict[str, Any],
) -> tuple[Any, FilesRead, dict[str, Any], torch.device]:
    """Have transformers make the model. Returns it, its files, what transformers tells, and where it is to compute."""
    _check(kwargs)
    on = _device_of(device, kwargs.pop("device_map", None))
    where = _find(path, kwargs)
    model_config = kwargs.pop("model_config", None)
    if model_config is not None:
        kwargs["config"] = model_config
    maker, quantised_by = _class_of(transformers, model_class, where, kwargs)
    if quantised_by:
        _check_quantised(where, quantised_by, kwargs)
    asked = kwargs.pop("ignore_mismatched_sizes", False)
    kwargs.update(ignore_mismatched_sizes=True, output_loading_info=True, use_safetensors=True)
    # On the CPU, whatever the default: no weight is read to be copied elsewhere.
    with unread_files(on, quantised_by) as files, torch.device("cpu"):
        made = maker.from_pretrained(where, **kwargs)
    if not isinstance(made, tuple):  # A config, say.
        raise ConfigError(f"model_class: {getattr(maker, '__name__', maker)}.from_pretrained makes no model")
    model, told = made
    for directory in {each.parent for each in files.paths()} if where == path else ():
        _check_index(directory, kwargs)
    _check_loaded(where, files, told, strict, asked)
    if quantised_by:
        check_fits(where, files, model)
        check_scales(model)
    return model, files, told, on


def _check(kwargs: dict[str, Any]) -> None:
    for name, why in _REFUSED.items():
        if kwargs.get(name) is not None and not getattr(kwargs[name], "dequantize", False):
            raise ConfigError(f"{name}: {why}")
    if kwargs.pop("use_safetensors", None) is False:
        raise ConfigError("use_safetensors: False asks for files of torch.save; convert the model to safetensors")


def _device_of(given: torch.device | str | int | None, device_map: Any) -> torch.device:
    """The device, with its index, that `device` or `device_map` names.

    Raises:
        ConfigError: it is none, or they are several.
    """
    places = list(device_map.values()) if isinstance(device_map, Mapping) else [device_map]
    if device_map is None:
        return device_of(given)
    if device_map in ("auto", *_SPREADS):
        count = torch.accelerator.device_count()
        if device_map != "auto" or count > 1:
            raise ConfigError(
                f"device_map: {device_map} spreads the model over devices ({count} here), and one has all of it in "
                "this version of swapper; name one"
            )
        places = [torch.accelerator.current_accelerator() if count else "cpu"]
    if "disk" in places:
        raise ConfigError("device_map: disk: the weights stay in their files anyway; name the device that computes")
    if device_map == "cuda":  # As in transformers, for `torchrun`.
        places = [f"cuda:{os.environ.get('LOCAL_RANK', 0)}"]
    devices = {str(device): device for device in map(device_of, places)}
    if given is not None:
        devices.setdefault(str(device_of(given)), device_of(given))
    if len(devices) != 1:
        raise ConfigError(
            f"device_map: {device_map} names {len(devices)} devices, and a model whose weights stay in files is on one "
            "in this version of swapper; name one"
        )
    return devices.popitem()[1]


def _find(path: str | os.PathLike[str], kwargs: dict[str, Any]) -> str:
    """The directory of a model, whose index is looked at; or its name on the Hub."""
    where = path_given("path", path)
    if os.path.isdir(where):
        found = newest_snapshot(Path(where))
        inside = found / (kwargs.get("subfolder") or "")
        if kwargs.get("variant") is None and not any((inside / name).exists() for name in _PLAIN):
            kwargs["variant"] = "packed" if (inside / PACKED_INDEX).exists() else None
        _check_index(inside, kwargs)
        return os.fspath(found)
    if os.path.exists(where):
        raise ConfigError(f"{where} is a file; give the directory of the model, with its config.json")
    if not isinstance(path, str) or os.path.isabs(where) or where.startswith((".", "~")):
        raise SwapIOError(errno.ENOENT, "open", where, detail="there is no such directory")
    return where


def _check_index(directory: Path, kwargs: dict[str, Any]) -> None:
    """Refuse an index that is broken, or names files elsewhere, or tensors that are not where it says.

    None is used beside a whole file: `save_pretrained` leaves the index of former shards, which it removes.
    """
    variant = f"{kwargs['variant']}." if kwargs.get("variant") else ""
    index = directory / f"model.safetensors.index.{variant}json"
    if index.exists() and not (directory / f"model.{variant}safetensors").exists():
        find_by_index(index)


def _check_quantised(path: str, by: str, kwargs: dict[str, Any]) -> None:
    """Refuse a model that is quantised in a way that is not known to stay in its files.

    Raises:
        ConfigError: by another than `_QUANTISED`.
        SwapError, SwapIOError: a file is broken. transformers reads what is said of the tensors there, by itself.
    """
    if by not in _QUANTISED:
        raise ConfigError(
            f"{path} is a quantised model ({by}); only what these have quantised stays in its files in this version of "
            f"swapper: {', '.join(_QUANTISED)}. Load it in memory, run a forward, in which some decompress their "
            "weights, and then call swapper.offload"
        )
    if by == "bitsandbytes":
        kwargs["device_map"] = {"": "cpu"}  # Else it goes to the accelerator, where there is one.
    elif by == "mxfp4":  # Kernels for the codes want them in an order of their own, in memory.
        as_told = kwargs.get("quantization_config")
        kwargs["quantization_config"] = as_told or import_transformers().Mxfp4Config(dequantize=True)
    elif os.path.isdir(path):
        check_parts(sorted(Path(path, kwargs.get("subfolder") or "").glob("*.safetensors")))


def _class_of(transformers: Any, given: Any, path: str, kwargs: dict[str, Any]) -> tuple[Any, str]:
    """The class whose `from_pretrained` is called; and by what the model is quantised, or "".

    Raises:
        ConfigError: it is none of a model.
    """
    if isinstance(given, str):
        found = getattr(transformers, given, None)
        if not hasattr(found, "from_pretrained"):
            raise ConfigError(f"model_class: transformers has no model class {given}")
        given = found
    if given is not None and not hasattr(given, "from_pretrained"):
        raise ConfigError(f"model_class: {given!r} has no from_pretrained")
    config = kwargs.get("config")
    if not isinstance(config, transformers.PreTrainedConfig):
        hub = {name: kwargs[name] for name in (*_HUB, "trust_remote_code", "code_revision") if name in kwargs}
        reader = getattr(given, "config_class", None) or transformers.AutoConfig
        config = reader.from_pretrained(_base_of(path) if config is None else config, **hub)
    said = (getattr(each, "quantization_config", None) for each in (config, config.get_text_config(decoder=True)))
    quantised: Any = next(filter(None, said), {})  # As transformers looks for it.
    method = (quantised if isinstance(quantised, dict) else vars(quantised)).get("quant_method", "")
    by = str(getattr(method, "value", method)) or ("a method that its config does not name" if quantised else "")
    if given is not None:
        return given, by
    if "AutoModelForCausalLM" not in (getattr(config, "auto_map", None) or {}):
        for name in config.architectures or ():
            if hasattr(made := getattr(transformers, name, None), "from_pretrained"):
                return made, by
    return transformers.AutoModelForCausalLM, by


def _base_of(path: str) -> str:
    """The directory or name of the model that `path` has an adapter of; else `path`."""
    adapter = Path(path) / "adapter_config.json"
    if not adapter.is_file() or (Path(path) / "config.json").is_file():
        return path
    try:
        base = parse_json(read_small(adapter))["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError) as error:
        raise SwapError(f"{adapter} is not the config of an adapter ({error}); name a model's directory") from error
    return str(base)


def _check_loaded(path: str, files: FilesRead, told: dict[str, Any], strict: bool, may_mismatch: bool) -> None:
    if told["mismatched_keys"] and not may_mismatch:
        shapes = [f"{name} is {tuple(a)} and in the model {tuple(b)}" for name, a, b in sorted(told["mismatched_keys"])]
        raise SwapError(f"{path} does not fit the model: {'; '.join(shapes)} (in {files}); load weights of this model")
    if told["missing_keys"] and strict:
        raise SwapError(
            f"{path} does not fit the model: it lacks {', '.join(sorted(told['missing_keys']))} (in {files}); load "
            "weights of this model, or pass strict=False to have transformers make them, at random for the most part"
        )
