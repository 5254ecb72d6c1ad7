"""`Section`, a group of settings as a pydantic model, and pydantic's errors in the words of `ConfigError`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_args

from pydantic import AliasChoices, BaseModel, ConfigDict, ValidationError

from swapper.config.fields import not_one_of
from swapper.config.files import parse_json, refuse_odd_keys
from swapper.errors import ConfigError, show

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo
    from pydantic.plugin._schema_validator import PluggableSchemaValidator
    from pydantic_core import ErrorDetails, SchemaValidator

__all__ = ["Section"]

_Model = TypeVar("_Model", bound="Section")


class Section(BaseModel, frozen=True):
    """A group of settings: immutable, without unknown keys, and refused with a `ConfigError`.

    [Note: one door] Every way to make a config (the constructor, `model_validate` and its forms for JSON and strings,
    pydantic's `TypeAdapter`) calls the class's `__pydantic_validator__`. So that is where a `ValidationError` becomes a
    `ConfigError`, once, see `_Validator`. It cannot be done inside of validation: pydantic wraps each ValueError there.

    [Note: what a type checker sees] A type checker would take the types of the fields for those of the arguments, and
    refuse "64MiB" for a size, a string for a path and a mapping for a section. So the classes with such fields declare
    an `__init__`, for the type checker alone.
    """

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    whole: ClassVar[type[Section]]
    """The config that the sections are part of: a key that is unknown in one may belong to another."""

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """Called by pydantic when the class and its validator are complete."""
        cls.__pydantic_validator__ = _Validator(cls, cls.__pydantic_validator__)  # type: ignore[assignment]

    if not TYPE_CHECKING:  # a type checker sees `frozen=True`, and would take this for "any attribute may be set"

        def __setattr__(self, name: str, value: object) -> None:
            raise ConfigError(
                f"{name}: {show(value)} cannot be set, a config does not change; "
                f"make another with config.model_copy(update={{{name!r}: ...}})"
            )

        def __delattr__(self, name: str) -> None:
            raise ConfigError(f"{name}: cannot be deleted, a config does not change")

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
        fields = _fields(type(self))
        replaced = [id(fields[key]) for key in update if key in fields]  # `update` may have other names of them
        given = {name: getattr(self, name) for name in self.model_fields_set if id(fields[name]) not in replaced}
        return type(self)(**{**given, **update})


class _Validator:
    """The `SchemaValidator` of a section, which raises `ConfigError`."""

    def __init__(self, model: type[Section], inner: SchemaValidator | PluggableSchemaValidator) -> None:
        self._model = model
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def validate_python(self, data: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        if isinstance(data, Mapping):
            refuse_odd_keys(data)
            data = dict(data)
        try:
            return self._inner.validate_python(data, **options)
        except ValidationError as error:
            lines = [line for one in error.errors(include_url=False) for line in _explain(self._model, one)]
            raise ConfigError("\n".join(lines)) from None

    def validate_json(self, data: str | bytes | bytearray, **options: Any) -> Any:
        __tracebackhide__ = True
        return self.validate_python(parse_json(data), **options)  # pydantic's parser accepts a key given twice

    validate_strings = validate_python


# --- The words of an error -------------------------------------------------------------------------------------------


def _explain(model: type[Section], error: ErrorDetails) -> list[str]:
    """The lines for one of pydantic's errors; each starts with the dotted field."""
    path = [str(part) for part in error["loc"]]
    value = error["input"]
    owner = model
    for part in path[:-1]:
        owner = _section(owner.model_fields[part]) or owner
    name = path[-1] if path else ""
    field = _fields(owner).get(name)
    dotted = ".".join(path) or "the config"
    match error["type"]:
        case _ if "error" in error.get("ctx", {}):  # a ConfigError of our own checks
            lines = str(error["ctx"]["error"]).splitlines()
            return [f"{dotted}: {line}" for line in lines] if path else lines  # those across fields name them
        case "extra_forbidden":
            text = _unknown_key(owner, name)
        case "literal_error" if field is not None:
            words = [str(word) for word in get_args(field.annotation)]
            text = not_one_of(value, words)
        case "bool_type":
            text = f"{show(value)} is not a switch; write true or false"
        case kind if kind.startswith(("int", "greater_than", "less_than")) and field is not None:
            text = f"{show(value)} is not allowed; write a whole number {_bounds(field)}"
        case "model_type" | "model_attributes_type" | "dict_type":
            keys = list(_fields((field and _section(field)) or owner))
            wants_device = value in ("none", "cpu", "nvme") and "device" in keys
            fix = f"; write {name}: {{device: {value}}}" if wants_device else ""
            text = f"{show(value)} is not a mapping of its keys ({', '.join(keys)}){fix}"
        case _:
            text = f"{show(value)}: {error['msg']}"
    return [f"{dotted}: {text}"]


def _fields(model: type[Section]) -> dict[str, FieldInfo]:
    """The keys that `model` takes, with their fields; other names of a field come last."""
    fields = dict(model.model_fields)
    for field in model.model_fields.values():
        if isinstance(field.validation_alias, AliasChoices):
            for alias in field.validation_alias.choices:
                fields.setdefault(str(alias), field)
    return fields


def _section(field: FieldInfo) -> type[Section] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _bounds(field: FieldInfo) -> str:
    """ "from 1 to 64", "of 1 or more": the field's own limits."""
    limits = {end: getattr(item, end) for item in field.metadata for end in ("ge", "le") if hasattr(item, end)}
    return f"from {limits['ge']} to {limits['le']}" if "le" in limits else f"of {limits['ge']} or more"


def _unknown_key(model: type[Section], name: str) -> str:
    """The advice for the unknown key `name` in `model`: the nearest name here, else in another section."""
    if name == "zero_optimization":
        return "unknown key; this is a DeepSpeed config, read it with OffloadConfig.from_deepspeed"
    known = _fields(model)
    if name in known:  # beside the name itself
        same = next(key for key, field in known.items() if field is known[name])
        return f"another name of {same!r}, which is given too; delete one of them"
    plain = name.lower().replace("-", "_")
    elsewhere: dict[str, list[str]] = {}
    for top, field in Section.whole.model_fields.items():
        inner = _section(field)
        if inner is None:
            elsewhere.setdefault(top, []).insert(0, f"{top!r} at the top level")
        for key in _fields(inner) if inner else ():
            elsewhere.setdefault(key, []).append(repr(f"{top}.{key}"))
    here = difflib.get_close_matches(plain, known, n=1, cutoff=0.6)
    if here and (plain == here[0] or plain not in elsewhere):
        return f"unknown key; did you mean {here[0]!r}?"
    near = [plain] if plain in elsewhere else difflib.get_close_matches(plain, elsewhere, n=1, cutoff=0.75)
    if near:
        return f"unknown key here; did you mean {' or '.join(elsewhere[near[0]])}?"
    return f"unknown key; known here are {', '.join(known)}"
