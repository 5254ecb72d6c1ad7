"""Arguments of the strategies: a config, or the keyword arguments of Lightning's `DeepSpeedStrategy`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from swapper.config import OffloadConfig, read_mapping
from swapper.config.fields import paths_of_environment
from swapper.errors import ConfigError, show

if TYPE_CHECKING:
    ConfigLike = OffloadConfig | str | os.PathLike[str] | Mapping[str, Any]
else:
    # LightningCLI sees this: it checks a mapping or a file as a config when it parses the command line.
    ConfigLike = OffloadConfig

__all__ = [
    "MEANINGLESS",
    "ConfigLike",
    "given_among",
    "import_in_use",
    "not_of_ddp",
    "register",
    "settings_of",
]

_SHARDING = (
    *("zero_optimization", "stage", "contiguous_gradients", "overlap_comm", "allgather_partitions", "reduce_scatter"),
    *("allgather_bucket_size", "reduce_bucket_size"),
)
_BUFFERS = ("params_buffer_count", "params_buffer_size", "max_in_cpu", "optimizer_buffer_count", "sub_group_size")
_SCALING = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
_ACTIVATIONS = (
    *("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization"),
    "synchronize_checkpoint_boundary",
)

MEANINGLESS: dict[str, str] = {
    **dict.fromkeys(_SHARDING, "it is about sharding and communication, and every process keeps all it is given"),
    **dict.fromkeys(_BUFFERS, "memory is bounded by pool_bytes of a config instead"),
    **dict.fromkeys(_SCALING, "Trainer(precision=...) scales the loss"),
    **dict.fromkeys(_ACTIVATIONS, "use torch.utils.checkpoint in the model"),
    "remote_device": "configure_model builds on the drive if parameters are offloaded to nvme",
    "pin_memory": "the pool is always page-locked, where the limit allows",
    "zero_allow_untested_optimizer": "what cannot be swapped exactly is refused by name",
    "logging_batch_size_per_gpu": "nothing needs the size of a batch",
    "logging_level": "set it with the module logging",
    "load_full_weights": "ordinary Lightning checkpoints are loaded anyway",
    "exclude_frozen_parameters": "checkpoints have all parameters",
}
"""Arguments of `DeepSpeedStrategy` that have no meaning here, and the reasons."""

_NAMED: Mapping[str, dict[str, Any]] = {
    "swapper_cpu": {"offload_optimizer": True, "offload_optimizer_device": "cpu"},
    "swapper_nvme": {"offload_optimizer": True, "offload_optimizer_device": "nvme"},
    "swapper_nvme_all": {
        "offload_optimizer": True,
        "offload_optimizer_device": "nvme",
        "offload_parameters": True,
        "offload_params_device": "nvme",
    },
}
"""Names of strategies for one device, with their arguments."""

_AIO = {
    "block_size": "block_size",
    "queue_depth": "queue_depth",
    "single_submit": "single_submit",
    "overlap_events": "overlap_events",
    "thread_count": "intra_op_parallelism",
}
"""Arguments of `DeepSpeedStrategy`, and their names in `aio` of a config."""

_SWITCHES = {
    "offload_optimizer": "offload_optimizer_device",
    "offload_parameters": "offload_params_device",
}

_ACCEPTED = frozenset({*_SWITCHES, *_SWITCHES.values(), "nvme_path", *_AIO, *MEANINGLESS})
"""All arguments of `DeepSpeedStrategy` that are accepted."""


def settings_of(name: str, config: ConfigLike | None, given: Mapping[str, Any]) -> OffloadConfig:
    """The config that the arguments of a strategy ask for.

    Args:
        name: of the strategy, for messages.
        config: as the user gave it.
        given: arguments of `DeepSpeedStrategy`; None counts as not given, except for those without a meaning.

    Returns:
        The config; with neither `config` nor arguments, one with the optimizer's state on the drive.

    Warns:
        UserWarning: once, if arguments have no meaning here, or nothing is offloaded. It names the line that calls the
            caller, which is the constructor of a strategy.

    Raises:
        ConfigError: both are given; an argument is unknown; the config cannot work.
    """
    for argument in given:
        if argument not in _ACCEPTED:
            near = difflib.get_close_matches(argument, _ACCEPTED, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{argument}: {name} has no such argument{hint}")
    idle = [argument for argument in given if argument in MEANINGLESS]
    meant = {argument: value for argument, value in given.items() if value is not None and argument not in idle}
    if config is not None and (meant or idle):
        names = ", ".join([*meant, *idle])
        raise ConfigError(f"{name} was given a config and {names} too; put all of it into the config")
    if idle:
        lines = "".join(f"\n  {argument}: {MEANINGLESS[argument]}" for argument in idle)
        warnings.warn(f"arguments that have no meaning for {name}:{lines}", UserWarning, stacklevel=3)
    if config is None:
        return _from_arguments(name, meant if meant or idle else _NAMED["swapper_nvme"])
    if isinstance(config, OffloadConfig):
        return config
    if isinstance(config, Mapping):
        is_deepspeeds = "zero_optimization" in config
        return OffloadConfig.from_deepspeed(config) if is_deepspeeds else OffloadConfig.model_validate(dict(config))
    path = Path(config)
    if path.suffix == ".json" and "zero_optimization" in read_mapping(path):
        return OffloadConfig.from_deepspeed(path)
    return OffloadConfig.load(path)


def _from_arguments(name: str, given: Mapping[str, Any]) -> OffloadConfig:
    devices, unused = {}, []
    for switch, argument in _SWITCHES.items():
        wanted = given.get(switch, False)
        if not isinstance(wanted, bool):
            raise ConfigError(f"{switch}: {show(wanted)} is not a switch; write True or False")
        device = given.get(argument, "cpu")
        if device not in ("cpu", "nvme"):
            raise ConfigError(f"{argument}: {show(device)} is not one of cpu, nvme")
        devices[switch] = device if wanted else "none"
        if argument in given and not wanted:
            unused.append(f"\n  {argument}: it needs {switch}=True")
    state, parameters = devices.values()
    if "nvme" not in (state, parameters):
        unused += [f"\n  {argument}: nothing goes to nvme" for argument in ("nvme_path", *_AIO) if argument in given]
    values: dict[str, Any] = {
        "offload_optimizer": {"device": state},
        # Gradients are as large as the parameters: a config for models that do not fit leaves neither in memory.
        "offload_gradient": {"device": "nvme" if state == parameters == "nvme" else "none"},
        "offload_param": {"device": parameters},
        "aio": {ours: given[theirs] for theirs, ours in _AIO.items() if theirs in given},
    }
    if "nvme" in (state, parameters):
        values["nvme_path"] = given.get("nvme_path") or _default_nvme_path()
    config = OffloadConfig.model_validate(values)
    if state == parameters == "none":
        why = "was given arguments, and neither offload_optimizer=True nor offload_parameters=True"
        warnings.warn(f"{name} {why}: nothing is offloaded", UserWarning, stacklevel=4)
    elif unused:
        warnings.warn(f"arguments of {name} without effect:{''.join(unused)}", UserWarning, stacklevel=4)
    return config


def _default_nvme_path() -> Path | tuple[Path, ...]:
    if named := paths_of_environment():
        return tuple(named) if len(named) > 1 else named[0]
    path = Path(".swapper")
    path.mkdir(exist_ok=True)
    return path


def given_among(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `DeepSpeedStrategy` that are not None among the local variables of a constructor."""
    return {name: value for name, value in variables.items() if name in _ACCEPTED and value is not None}


def not_of_ddp(strategy: type, given: Mapping[str, Any], wrapper: type = DistributedDataParallel) -> list[str]:
    """The names in `given` that neither a base of `strategy` takes nor `wrapper`."""
    classes = (wrapper, *strategy.__mro__)
    inits = [vars(each)["__init__"] for each in classes if "__init__" in vars(each)]
    known = {name for init in inits for name in inspect.signature(init).parameters}
    return [name for name in given if name in _ACCEPTED or name not in known]


def register(registry: Any, one_device: type, ddp: type, model_parallel: type, fsdp: type) -> None:
    """Put the strategies into a registry of Lightning's, by their names. May be called again."""
    state = _NAMED["swapper_nvme"]
    for name, strategy, words, arguments in (
        *((name, one_device, name, arguments) for name, arguments in _NAMED.items()),
        ("swapper_ddp_nvme", ddp, "ddp", state),
        ("swapper_fsdp_nvme", fsdp, "FSDP1", state),
        ("swapper_model_parallel_nvme", model_parallel, "model parallel", state),
        # All ranks along the data-parallel dimension of the mesh.
        ("swapper_fsdp2_nvme", model_parallel, "FSDP2", {**state, "tensor_parallel_size": 1}),
    ):
        registry.register(name, strategy, description=f"swapper: {words}", override=True, **arguments)


def import_in_use(package: str, modules: Mapping[str, str]) -> ModuleType:
    """Import the modules of `package` for the packages of Lightning that the program uses, which register strategies.

    Args:
        package: ours.
        modules: package of Lightning: name of the module for it in `package`. The first is preferred.

    Returns:
        The first of them: of what is imported already, else of what is installed.

    Raises:
        ImportError: none is installed; the message says what `package` needs.
    """
    used = [name for theirs, name in modules.items() if sys.modules.get(theirs)] or [
        name for theirs, name in modules.items() if importlib.util.find_spec(theirs.partition(".")[0]) is not None
    ][:1]
    if not used:
        raise ImportError(f"{package} needs Lightning: pip install 'lightning>=2.6'")
    imported = [importlib.import_module(f"{package}.{name}") for name in used]
    return imported[0]
