"""Everything a user can set: the pydantic models behind `config/*.yaml`.

    config = OffloadConfig.load("config/optimizer_nvme.yaml")
    config = OffloadConfig(nvme_path="/local_nvme", offload_optimizer={"device": "nvme", "master_weights": True})

A config is checked when it is made and does not change afterwards. Whatever is wrong with it, and however it was made,
is a `ConfigError` with one line for each mistake: the dotted field, the value given and the fix. `model_construct` is
pydantic's way around every check; do not use it.

`python -m swapper.config --schema config/schema.json` writes the JSON schema that editors complete and check files by.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from swapper.config.deepspeed import translate
from swapper.errors import ConfigError, show
from swapper.sizes import format_size, parse_size

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

__all__ = [
    "AioConfig",
    "CheckpointConfig",
    "OffloadConfig",
    "OffloadGradientConfig",
    "OffloadOptimizerConfig",
    "OffloadParamConfig",
    "json_schema",
    "read_mapping",
]

_Model = TypeVar("_Model", bound="_Section")

MINIMUM_BUCKET_BYTES = 16 << 10
DEFAULT_BUCKET_BYTES = 64 << 20
"""Below this a drive spends its time on requests, not on bytes."""

BLOCK_ALIGNMENT_BYTES = 4096
"""Every request must be a multiple of it, so that O_DIRECT works on every drive."""

BUCKETS_IN_POOL = 3
"""One arriving, one in use, one leaving."""


# --- What this version refuses ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _NotYet:
    """A setting that is part of the design and that this version cannot honour."""

    field: str
    refuses: Callable[[Any], bool]
    instead: str


_NOT_YET: tuple[_NotYet, ...] = (
    # A version that brings one of these deletes its row here, and "Not there yet" in the field's docstring.
    _NotYet("offload_optimizer.encoding", lambda value: value in ("bf16", "int8"), "use encoding: exact"),
)


def _not_yet(field: str, value: Any) -> str | None:
    """The refusal of `value` for `field`, without the field's name; None where this version can honour it."""
    for row in _NOT_YET:
        if row.field == field and row.refuses(value):
            return f"{show(value)} is not there yet in this version of swapper; {row.instead}"
    return None


# --- Types of fields ------------------------------------------------------------------------------------------------

Size = Annotated[
    int,
    BeforeValidator(parse_size),
    PlainSerializer(format_size, return_type=str, when_used="json"),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 0},
                {"type": "string", "pattern": r"^\s*[0-9]+(\.[0-9]+)?\s*([KkMmGgTtPp][Ii]?)?[Bb]?\s*$"},
            ]
        }
    ),
]
"""Bytes. An integer or a string such as "64MiB"; always an integer once validated."""


def _parse_nvme_path(value: object) -> Path | tuple[Path, ...] | None:
    if value is None:
        return None
    if not isinstance(value, (list, tuple)):
        return _parse_directory(value)
    paths = tuple(_parse_directory(item) for item in value)
    if not paths:
        raise ConfigError("[] names no directory; write a directory on the drive, or null for none")
    for i, path in enumerate(paths):
        if path in paths[:i]:
            raise ConfigError(f"{show(str(path))} is there twice; name each drive once")
    return paths if len(paths) > 1 else paths[0]


def _parse_directory(value: object) -> Path:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise ConfigError(f"{show(value)} is not a path; write a directory on the drive, such as /local_nvme")
    if not text.strip() or "\0" in text:
        raise ConfigError(f"{show(text)} is not a path; write a directory on the drive, or null for none")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(f"{show(text)}: there is no such user's home here; write the path in full") from None


NvmePath = Annotated[
    Path | tuple[Path, ...],
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "uniqueItems": True},
            ]
        }
    ),
]
NvmePathLike = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


# --- From pydantic's errors to ours ----------------------------------------------------------------------------------


def _names(model: type[BaseModel]) -> list[str]:
    """The keys `model` takes, aliases last."""
    names = list(model.model_fields)
    for name, field in model.model_fields.items():
        if isinstance(field.validation_alias, AliasChoices):
            names += [str(choice) for choice in field.validation_alias.choices if choice != name]
    return names


def _section_of(annotation: Any) -> type[_Section] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, _Section) else None


def _unknown_key(model: type[BaseModel], name: str) -> str:
    """What to write instead of the unknown key `name` in `model`: the nearest name here, else in another section."""
    if name == "zero_optimization":
        return "unknown key; this is a DeepSpeed config, read it with OffloadConfig.from_deepspeed"
    if name in _names(model):  # an alias beside the name itself
        same = next(key for key, field in model.model_fields.items() if name in _aliases(field.validation_alias))
        return f"another name of {same!r}, which is given too; delete one of them"
    plain = name.lower().replace("-", "_")
    places: dict[str, list[str]] = {}
    for section, field in OffloadConfig.model_fields.items():
        inner = _section_of(field.annotation)
        for key in _names(inner) if inner else ():
            places.setdefault(key, []).append(f"{section}.{key}")
        if inner is None:
            places.setdefault(section, []).insert(0, section)
    here = difflib.get_close_matches(plain, _names(model), n=1, cutoff=0.6)
    if here and (plain == here[0] or plain not in places):
        return f"unknown key; did you mean {here[0]!r}?"
    elsewhere = [plain] if plain in places else difflib.get_close_matches(plain, list(places), n=1, cutoff=0.75)
    if elsewhere:
        where = " or ".join(
            repr(place) if "." in place else f"{place!r} at the top level" for place in places[elsewhere[0]]
        )
        return f"unknown key here; did you mean {where}?"
    return f"unknown key; known here are {', '.join(_names(model))}"


def _bound(model: type[BaseModel], name: str) -> str:
    """ "from 1 to 64", "of 1 or more": what the field's own limits allow."""
    low = high = None
    for item in model.model_fields[name].metadata:
        low = getattr(item, "ge", low)
        high = getattr(item, "le", high)
    return f"from {low} to {high}" if high is not None else f"of {low} or more"


def _explain_one(model: type[BaseModel], error: ErrorDetails) -> list[str]:
    """The lines for one of pydantic's errors; each starts with the dotted field."""
    path = [str(part) for part in error["loc"]]
    value = error["input"]
    kind = error["type"]
    cause = error.get("ctx", {}).get("error")
    owner = model
    for part in path[:-1]:
        owner = _section_of(owner.model_fields[part].annotation) or owner
    name = path[-1] if path else ""
    fields = {alias: key for key, f in owner.model_fields.items() for alias in [key, *_aliases(f.validation_alias)]}
    annotation = owner.model_fields[fields[name]].annotation if name in fields else None
    dotted = ".".join(path)

    if cause is not None:
        # A section made by its own `__init__`, or our checks across fields, have said where already.
        joint = ("." if _section_of(annotation) and isinstance(cause, ConfigError) else ": ") if path else ""
        return [f"{dotted}{joint}{line}" for line in str(cause).splitlines()]
    if kind == "extra_forbidden":
        return [f"{dotted}: {_unknown_key(owner, name)}"]
    if kind == "literal_error":
        words = [str(word) for word in get_args(annotation)]
        near = difflib.get_close_matches(str(value).lower(), words, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return [f"{dotted}: {show(value)} is not one of {', '.join(words)}{hint}"]
    if kind == "bool_type":
        return [f"{dotted}: {show(value)} is not a switch; write true or false"]
    if kind.startswith(("int", "greater_than", "less_than")):
        return [f"{dotted}: {show(value)} is not allowed; write a whole number {_bound(owner, fields[name])}"]
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        keys = ", ".join(_names(_section_of(annotation) or owner))
        place = dotted or "the config"
        fix = f"; write {name}: {{device: {value}}}" if value in ("none", "cpu", "nvme") and "device" in keys else ""
        return [f"{place}: {show(value)} is not a mapping of its keys ({keys}){fix}"]
    return [f"{dotted or 'the config'}: {show(value)}: {error['msg']}"]


def _aliases(alias: object) -> list[str]:
    return [str(choice) for choice in alias.choices] if isinstance(alias, AliasChoices) else []


def _explain(model: type[BaseModel], error: ValidationError) -> str:
    return "\n".join(line for one in error.errors(include_url=False) for line in _explain_one(model, one))


def _refuse_odd_keys(data: Mapping[Any, Any], path: str = "") -> None:
    """YAML reads `1:` and `on:` as keys that are no strings, which pydantic answers with a bare TypeError."""
    for key, value in data.items():
        if not isinstance(key, str):
            raise ConfigError(f"{path}{key}: unknown key; a key is a word, put it in quotes if YAML reads it otherwise")
        if isinstance(value, Mapping):
            for inner in value:
                if not isinstance(inner, str):
                    _refuse_odd_keys(value, f"{path}{key}.")


def _prefixed(prefix: str, error: ConfigError) -> ConfigError:
    return ConfigError("\n".join(f"{prefix}: {line}" for line in str(error).splitlines()))


# --- The models ------------------------------------------------------------------------------------------------------


class _Section(BaseModel, frozen=True):
    """A group of settings: immutable, without unknown keys, and wrong only in the words of `ConfigError`.

    [Note: one way in] pydantic wraps a ValueError raised inside validation, so it is turned into `ConfigError` outside
    of it, in `__init__`. pydantic calls a model's own `__init__` for nested mappings too: a section then raises
    ConfigError inside the validation of the whole, and `_explain` puts the section's name before each of its lines.

    [Note: what a type checker sees] It would take the types of the fields for those of the arguments, and refuse
    "64MiB" for a size, a string for a path and a mapping for a section. So the classes with such fields declare an
    `__init__` of their own, for it alone.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=False)

    def __init__(self, /, **data: Any) -> None:
        __tracebackhide__ = True
        _refuse_odd_keys(data)
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ConfigError(_explain(type(self), error)) from None

    if not TYPE_CHECKING:  # a type checker sees `frozen=True`, and would take this for "any attribute may be set"

        def __setattr__(self, name: str, value: object) -> None:
            raise ConfigError(
                f"{name}: {show(value)} cannot be set, a config does not change; "
                f"make another with config.model_copy(update={{{name!r}: ...}})"
            )

        def __delattr__(self, name: str) -> None:
            raise ConfigError(f"{name}: cannot be deleted, a config does not change")

    @classmethod
    def model_validate(cls: type[_Model], obj: Any, **options: Any) -> _Model:
        """A config from a mapping; see pydantic for `options`.

        Raises:
            ConfigError: what is wrong with `obj`, a line for each mistake.
        """
        __tracebackhide__ = True
        if isinstance(obj, Mapping):
            _refuse_odd_keys(obj)
            obj = dict(obj)
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise ConfigError(_explain(cls, error)) from None

    @classmethod
    def model_validate_json(cls: type[_Model], json_data: str | bytes | bytearray, **options: Any) -> _Model:
        """A config from JSON text. Unlike pydantic's, refuses a key given twice.

        Raises:
            ConfigError: what is wrong with the text or its values.
        """
        __tracebackhide__ = True
        return cls.model_validate(_parse_json(json_data), **options)

    @classmethod
    def model_validate_strings(cls: type[_Model], obj: Any, **options: Any) -> _Model:
        """A config from a mapping whose leaves are all strings; see pydantic for `options`.

        Raises:
            ConfigError: what is wrong with `obj`, a line for each mistake.
        """
        __tracebackhide__ = True
        try:
            return super().model_validate_strings(obj, **options)
        except ValidationError as error:
            raise ConfigError(_explain(cls, error)) from None

    def model_copy(self: _Model, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> _Model:
        """A copy with other values. Unlike pydantic's, checks them.

        Args:
            update: field to value. A section is replaced as a whole; to change one of its settings write
                `{"aio": config.aio.model_copy(update={"queue_depth": 64})}`.
            deep: without effect: what a config holds does not change either.

        Raises:
            ConfigError: the copy cannot work.
        """
        __tracebackhide__ = True
        if not update:
            return super().model_copy(deep=deep)
        given = {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}
        for name, field in type(self).model_fields.items():
            if any(alias in update for alias in _aliases(field.validation_alias)):
                given.pop(name, None)
        return type(self)(**{**given, **update})


class OffloadOptimizerConfig(_Section, frozen=True):
    """Where the optimizer's state lives, and in which form."""

    if TYPE_CHECKING:

        def __init__(self, /, **data: Any) -> None: ...  # [Note: what a type checker sees]

    device: Literal["none", "cpu", "nvme"] = "none"
    """Where the state is between steps. "nvme": on the drive at `nvme_path`. "cpu": in host memory, for a model on a
    GPU; with a model on the CPU the state only moves to page-locked memory. Default and off: "none", where the
    optimizer keeps it."""

    master_weights: bool = Field(default=False, strict=True)
    """Keep an fp32 master copy of every bf16 and fp16 parameter, and step on that: mixed-precision training. fp32
    parameters need none and get none. With device "none" the masters live in memory. Changes what the optimizer
    computes, so default and off: false."""

    encoding: Literal["exact", "bf16", "int8"] = "exact"
    """How the state is written. "exact" loses nothing; "bf16" and "int8" move fewer bytes and are lossy. Default and
    off: "exact". Not there yet: "bf16" and "int8"."""

    step_in_backward: bool = Field(default=False, strict=True)
    """Step each bucket as soon as the last gradient of its window has arrived, inside backward, and free the gradients;
    needs `gradient_accumulation_steps`. Cannot be combined with GradScaler, clipping by a global norm,
    DistributedDataParallel, step pre-hooks, or parameters that share memory with other tensors of the model (one
    parameter object used twice is fine). Default and off: false."""

    resident_bytes: Size = 0
    """Bytes of state kept in the pool from one step to the next, so that they are not read again (they are still
    written). Part of `pool_bytes`; needs device "nvme". Default and off: 0."""


class OffloadGradientConfig(_Section, frozen=True):
    """Where gradients live from backward to the step."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """Where gradients are between backward and the step. "nvme": each is written to the drive as it arrives, and what
    arrives in further micro-batches is added there. "cpu": for a model on a GPU, each moves to the pool, which must
    hold them all; for a model on the CPU the same as "none", which is said. Gradients under 16 KiB stay where they are.
    Default and off: "none", where autograd puts them."""


class OffloadParamConfig(_Section, frozen=True):
    """Where parameters live while no module uses them."""

    if TYPE_CHECKING:

        def __init__(self, /, **data: Any) -> None: ...  # [Note: what a type checker sees]

    device: Literal["none", "cpu", "nvme"] = "none"
    """Where parameters are while unused. "nvme": on the drive, for a model on the CPU. "cpu": in host memory, where
    those of a model on the CPU are anyway. Default and off: "none", in the model."""

    resident_bytes: Size = 0
    """Bytes of parameters kept in the pool whatever is used next, so that they are not read again. Part of
    `pool_bytes`; needs device "nvme". What the pool has room for is kept anyway. Default and off: 0."""


def _add_thread_count(schema: dict[str, Any]) -> None:
    schema["properties"]["thread_count"] = {
        **schema["properties"]["intra_op_parallelism"],
        "title": "Thread Count",
        "description": "DeepNVMe's older name of intra_op_parallelism.",
        "deprecated": True,
    }


class AioConfig(_Section, frozen=True):
    """How the drive is driven. The names are DeepNVMe's; the defaults suit most drives."""

    # A name among its own aliases is accepted anyway; jsonargparse, of LightningCLI, needs to be told.
    model_config = ConfigDict(json_schema_extra=_add_thread_count, populate_by_name=True)

    if TYPE_CHECKING:

        def __init__(self, /, **data: Any) -> None: ...  # [Note: what a type checker sees]

    backend: Literal["auto", "uring", "aio", "threads"] = "auto"
    """Which system moves the bytes: io_uring, kernel AIO, or threads with ordinary reads and writes. A named one that
    the machine refuses is an error. Default: "auto", the first of these that works here."""

    block_size: Size = 1 << 20
    """Bytes in one request; a transfer is cut into requests of this size. A multiple of 4096, at most 1GiB. Default:
    "1MiB"."""

    queue_depth: int = Field(default=32, ge=1, le=4096, strict=True)
    """Requests in flight at once, 1 to 4096. Default: 32."""

    single_submit: bool = Field(default=False, strict=True)
    """Hand requests to the kernel one by one instead of in batches. Default and off: false."""

    overlap_events: bool = Field(default=True, strict=True)
    """Submit new requests while earlier ones are in flight. Default: true; false waits for each batch to finish."""

    intra_op_parallelism: int = Field(
        default=1, ge=1, le=64, strict=True, validation_alias=AliasChoices("intra_op_parallelism", "thread_count")
    )
    """Threads that work on one transfer, 1 to 64. Also accepted as `thread_count`, DeepNVMe's older name. Default and
    off: 1."""

    @field_validator("block_size", mode="after")
    @classmethod
    def _check_block_size(cls, value: int) -> int:
        if value == 0 or value % BLOCK_ALIGNMENT_BYTES or value > 1 << 30:
            raise ConfigError(
                f"{value} bytes ({format_size(value)}) cannot be read with O_DIRECT in one request; write a multiple "
                f"of {BLOCK_ALIGNMENT_BYTES}, from 4KiB to 1GiB, such as '1MiB'"
            )
        return value


class CheckpointConfig(_Section, frozen=True):
    """What happens to checkpoints."""

    keep_last: int | None = Field(default=None, ge=1, strict=True)
    """Checkpoints to keep: when `swapper.save_checkpoint` has made another, older ones of the same training beside it
    are removed, and their files used again. Default and off: null, keep all."""


def _add_dollar_schema(schema: dict[str, Any]) -> None:
    schema["properties"]["$schema"] = {"type": "string", "description": "Where an editor finds this schema; not read."}


class OffloadConfig(_Section, frozen=True):
    """What is kept out of memory, where, and with how much of it.

    Sizes are bytes: 4096, "64MiB" (powers of 1024) or "2GB" (powers of 1000). Swappers given the same object share one
    pool, engine and run directory.
    """

    model_config = ConfigDict(json_schema_extra=_add_dollar_schema)

    if TYPE_CHECKING:

        def __init__(self, /, **data: Any) -> None: ...  # [Note: what a type checker sees]

    nvme_path: NvmePath | None = None
    """A directory on the drive to swap to, or a list of directories on several drives, whose bandwidths add up: each
    gets a part of the bytes in proportion to its speed, which is measured at the start. They must exist; `~` is your
    home; a relative path is relative to the working directory. Needed by device "nvme", else unused. Default and off:
    null."""

    pool_bytes: Size = 1 << 30
    """Page-locked host memory for everything on its way to or from the drive, allocated once. At least three
    `bucket_bytes` (one arriving, one in use, one leaving) and what `resident_bytes` keeps. Default: "1GiB"."""

    bucket_bytes: Size = 0
    """Host memory that one bucket may take while it is stepped: state, master, fp32 gradient and encode buffer
    together. Larger ones make fewer, longer transfers. At least "16KiB". Default: 0, which chooses "64MiB", or a
    quarter of the pool if that is less."""

    verify: Literal["none", "crc32c"] = "none"
    """Check what comes back from the drive against a checksum of what was written. "crc32c": a CRC-32C of every block,
    in memory (8 bytes for each 64 KiB), computed by the I/O threads; a block that is not as it was written raises
    `SwapIOError` with the file and the offset. Used by device "nvme". Default and off: "none"."""

    gradient_accumulation_steps: int = Field(default=1, ge=1, strict=True)
    """Backward passes for each step of the optimizer: reading ahead starts in the last of them. Default: 1."""

    offload_optimizer: OffloadOptimizerConfig = Field(default_factory=OffloadOptimizerConfig)
    """The optimizer's state. Default and off: device "none"."""

    offload_gradient: OffloadGradientConfig = Field(default_factory=OffloadGradientConfig)
    """Gradients. Default and off: device "none"."""

    offload_param: OffloadParamConfig = Field(default_factory=OffloadParamConfig)
    """Parameters. Default and off: device "none"."""

    aio: AioConfig = Field(default_factory=AioConfig)
    """How the drive is driven."""

    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """What happens to checkpoints."""

    @property
    def nvme_paths(self) -> tuple[Path, ...]:
        """The directories of `nvme_path`, however many: none, one or several."""
        if self.nvme_path is None:
            return ()
        return self.nvme_path if isinstance(self.nvme_path, tuple) else (self.nvme_path,)

    @field_validator("nvme_path", mode="before")
    @classmethod
    def _parse_nvme_path(cls, value: object) -> Path | tuple[Path, ...] | None:
        return _parse_nvme_path(value)

    @field_validator("offload_optimizer", "offload_gradient", "offload_param", "aio", "checkpoint", mode="before")
    @classmethod
    def _empty_section_is_default(cls, value: object) -> object:
        if value is None:  # in YAML: a heading whose settings are all commented out
            return {}
        return dict(value) if isinstance(value, Mapping) else value

    @field_validator("bucket_bytes", mode="after")
    @classmethod
    def _check_bucket_bytes(cls, value: int) -> int:
        if 0 < value < MINIMUM_BUCKET_BYTES:
            raise ConfigError(f"{format_size(value)} is too little to move at once; write at least '16KiB'")
        return value

    @model_validator(mode="after")
    def _choose_bucket_bytes(self) -> OffloadConfig:
        if not self.bucket_bytes:
            free_bytes = self.pool_bytes - self.offload_optimizer.resident_bytes - self.offload_param.resident_bytes
            chosen = min(DEFAULT_BUCKET_BYTES, free_bytes // 4 // 4096 * 4096)
            # Around the frozen model's own check; not among the fields that were set, so that a copy chooses anew.
            self.__dict__["bucket_bytes"] = max(chosen, MINIMUM_BUCKET_BYTES)
        return self

    @model_validator(mode="after")
    def _check_together(self) -> OffloadConfig:
        lines = list(self._refusals()) or list(self._contradictions())
        if lines:
            raise ConfigError("\n".join(lines))
        return self

    def _refusals(self) -> Iterator[str]:
        for row in _NOT_YET:
            value: Any = self
            for part in row.field.split("."):
                value = getattr(value, part)
            refusal = _not_yet(row.field, value)
            if refusal is not None:
                yield f"{row.field}: {refusal}"

    def _contradictions(self) -> Iterator[str]:
        devices = {
            "offload_optimizer": self.offload_optimizer.device,
            "offload_gradient": self.offload_gradient.device,
            "offload_param": self.offload_param.device,
        }
        for name, device in devices.items():
            if device == "nvme" and self.nvme_path is None:
                yield (
                    f"nvme_path: null is not enough for {name}.device: nvme; give a directory on the drive: "
                    "nvme_path: /local_nvme in the file, nvme_path='/local_nvme' in Python"
                )
        residents = {
            "offload_optimizer": self.offload_optimizer.resident_bytes,
            "offload_param": self.offload_param.resident_bytes,
        }
        for name, resident_bytes in residents.items():
            if resident_bytes and devices[name] != "nvme":
                yield (
                    f"{name}.resident_bytes: {format_size(resident_bytes)} has no use with {name}.device: "
                    f"{devices[name]}; use device: nvme or resident_bytes: 0"
                )
        buckets_bytes = BUCKETS_IN_POOL * self.bucket_bytes
        if buckets_bytes + sum(residents.values()) > self.pool_bytes:
            yield self._pool_sum(buckets_bytes, sum(residents.values()))

    def _pool_sum(self, buckets_bytes: int, resident_bytes: int) -> str:
        rest_bytes = (self.pool_bytes - resident_bytes) // BUCKETS_IN_POOL
        rest_bytes -= rest_bytes % (1 << 20 if rest_bytes >= 1 << 20 else MINIMUM_BUCKET_BYTES)
        smaller = f", or bucket_bytes to at most '{format_size(rest_bytes)}'" if rest_bytes > 0 else ""
        resident = f" + resident_bytes {format_size(resident_bytes)}" if resident_bytes else ""
        total = format_size(buckets_bytes + resident_bytes)
        return (
            f"pool_bytes: {format_size(self.pool_bytes)} is too small for {BUCKETS_IN_POOL} x bucket_bytes "
            f"{format_size(self.bucket_bytes)} (one arriving, one in use, one leaving){resident} = {total}; "
            f"set pool_bytes to at least '{total}'{smaller}"
        )

    # --- Files ---

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, nvme_path: NvmePathLike | None = None) -> OffloadConfig:
        """The config in a file.

        Args:
            path: a .yaml, .yml or .json file. A key given twice in it is an error; a key `$schema` is skipped.
            nvme_path: used instead of the file's; None leaves it. A path or several.

        Raises:
            ConfigError: the file is missing, unreadable, empty or broken, or what it says cannot work. Each line of
                the message starts with the path.
        """
        __tracebackhide__ = True
        path = Path(path)
        if path.suffix not in (".yaml", ".yml", ".json"):
            raise ConfigError(f"{path}: a config file's name ends in .yaml, .yml or .json, not in {path.suffix!r}")
        document = read_mapping(path)
        if isinstance(document.get("$schema"), str):
            del document["$schema"]
        if nvme_path is not None:
            document["nvme_path"] = nvme_path
        try:
            return cls.model_validate(document)
        except ConfigError as error:
            raise _prefixed(str(path), error) from None

    def to_yaml(self) -> str:
        """Every setting as YAML, defaults included; `load` reads it back to an equal config."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    def with_nvme_path(self, path: NvmePathLike) -> OffloadConfig:
        """A copy that swaps to `path`. It is another object, so it shares no pool with this one."""
        __tracebackhide__ = True
        return self.model_copy(update={"nvme_path": path})

    @classmethod
    def from_deepspeed(
        cls, source: str | os.PathLike[str] | Mapping[str, Any], *, nvme_path: NvmePathLike | None = None
    ) -> OffloadConfig:
        """The config that does what a DeepSpeed config asks for.

        Read are `zero_optimization.offload_optimizer` and, at stage 3, `offload_param` (device, nvme_path), `aio`,
        `gradient_accumulation_steps`, and from `bf16.enabled` or `fp16.enabled` that `master_weights` is true, because
        DeepSpeed then keeps fp32 masters (unless `bf16_master_weights_and_grads` says that it does not). The value
        "auto" (Hugging Face's) counts as not given; for `enabled` it counts as true, since masters are made for bf16
        and fp16 parameters only and an fp32 model is left as it is. `offload_param.max_in_cpu`, a number of elements,
        is `offload_param.resident_bytes` at 2 bytes an element, or 4 without bf16 and fp16, and `pool_bytes` is its
        default and that. Otherwise `pool_bytes` and `bucket_bytes` keep their defaults: DeepSpeed's buffers are counted
        in elements of its largest sub-group (16 GB by default) and say nothing about what is needed here. Switches and
        numbers may be strings, as DeepSpeed's tuner prints them, and `aio` may be inside `zero_optimization`.

        Where DeepSpeed takes an offload device and offloads nothing (nvme below stage 3, anything at stage 0), swapper
        offloads the state, and says so. With state and parameters on nvme gradients go there too.

        Args:
            source: a DeepSpeed JSON file, or its content.
            nvme_path: used instead of the one in `source`; None leaves it. A path or several.

        Warns:
            UserWarning: once, with a line for each key that cannot be honoured and why.

        Raises:
            ConfigError: `source` cannot be read or cannot work.
        """
        __tracebackhide__ = True
        if isinstance(source, Mapping):
            name, document = "DeepSpeed config", dict(source)
        else:
            name, document = str(Path(source)), read_mapping(Path(source))
        try:
            values, unhonoured = translate(document, cls.model_fields["pool_bytes"].default)
            if nvme_path is not None:
                values["nvme_path"] = nvme_path
            config = cls.model_validate(values)
        except ConfigError as error:
            raise _prefixed(name, error) from None
        if unhonoured:
            lines = "".join(f"\n  {line}" for line in unhonoured)
            warnings.warn(f"{name}: what swapper does otherwise than DeepSpeed:{lines}", UserWarning, stacklevel=2)
        return config


# --- Reading files ---------------------------------------------------------------------------------------------------


class _YamlLoader(yaml.SafeLoader):
    """YAML without tags that run code, and without keys given twice."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        first_lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            line = key.start_mark.line + 1
            if key.value in first_lines:
                problem = f"key {key.value!r} is given twice, first on line {first_lines[key.value]}; delete one"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            first_lines[key.value] = line
        return node


def _parse_yaml(text: str) -> Any:
    try:
        return yaml.load(text, _YamlLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{where}not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"not valid YAML: {' '.join(str(error).split())}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(f"key {key!r} is given twice; delete one")
        found[key] = value
    return found


def _parse_json(text: str | bytes | bytearray) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise ConfigError(f"line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"byte {error.start}: not valid JSON: {error.reason}; save it as UTF-8") from None
    except RecursionError:
        raise ConfigError("not a config: nested too deeply") from None


def read_mapping(path: Path) -> dict[str, Any]:
    """The content of a YAML or JSON file; by its name's end, JSON where that says nothing.

    Raises:
        ConfigError: it cannot be read, is not valid, gives a key twice, or is no mapping. Starts with the path.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file{_near_files(path)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start}: {error.reason}; save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # a null character in the path
        raise ConfigError(f"{str(path)!r}: not a path: {error}") from None
    if not text.strip():
        raise ConfigError(f"{path}: the file is empty; start from a file in config/")
    try:
        document = _parse_yaml(text) if path.suffix in (".yaml", ".yml") else _parse_json(text)
        if isinstance(document, dict):
            _refuse_odd_keys(document)
            return document
    except ConfigError as error:
        raise _prefixed(str(path), error) from None
    except RecursionError:
        raise ConfigError(f"{path}: not a config: nested too deeply") from None
    if document is None:
        raise ConfigError(f"{path}: the file holds comments only; start from a file in config/")
    raise ConfigError(f"{path}: {show(document)} is not a mapping; a config is lines of `key: value`")


def _near_files(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml", ".json")]
    except OSError:
        return f", nor a directory {str(path.parent)!r}"
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {str(path.parent / near[0])!r}?" if near else ""


# --- The schema ------------------------------------------------------------------------------------------------------


def json_schema() -> dict[str, Any]:
    """The JSON schema of a config file, as in `config/schema.json`."""
    schema = _plain(OffloadConfig.model_json_schema())
    assert isinstance(schema, dict)
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema}


def _plain(value: Any) -> Any:
    """`value` without the line breaks of our docstrings, but for those between paragraphs.

    Also without the `allOf` that older versions of pydantic put around a reference, so that the file does not depend
    on the version.
    """
    if isinstance(value, dict):
        everything = value.get("allOf")
        if isinstance(everything, list) and len(everything) == 1:
            value = {**everything[0], **{key: inner for key, inner in value.items() if key != "allOf"}}
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return re.sub(r"(?<!\n)\n(?!\n)", " ", value) if isinstance(value, str) else value
