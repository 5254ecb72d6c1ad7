"""The type of `offload_optimizer.encoding`: one name for all state, or one for each tensor of it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BeforeValidator

from swapper.errors import ConfigError, show

__all__ = ["Encoding"]

_Encoding = Literal["exact", "packed", "unpacked", "bf16", "int8"]


def _parse_encoding(value: object) -> object:
    """Checked here, so that the error says it in words: a union's own would say it once for each of its members."""
    names = get_args(_Encoding)
    for key, name in value.items() if isinstance(value, Mapping) else [("", value)]:
        where = f"{key}: " if isinstance(value, Mapping) else ""
        if not isinstance(key, str):
            raise ConfigError(f"{show(key)} is not the name of a tensor of the state, such as exp_avg")
        if name not in names:
            near = difflib.get_close_matches(name.lower(), names, n=1) if isinstance(name, str) else ()
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{where}{show(name)} is not one of {', '.join(names)}{hint}")
    return dict(value) if isinstance(value, Mapping) else value


class _EncodingOfKeys(dict[str, _Encoding]):
    """A mapping that can be hashed, since a config can be, and does not change."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


def _as_hashable(value: object) -> object:
    return _EncodingOfKeys(value) if isinstance(value, dict) else value


Encoding = Annotated[_Encoding | dict[str, _Encoding], BeforeValidator(_parse_encoding), AfterValidator(_as_hashable)]
