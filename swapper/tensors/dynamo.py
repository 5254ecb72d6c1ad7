"""Keeps `torch.compile` out of functions that are made for one parameter, or for one optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch._compile import _disable_dynamo

__all__ = ["not_compiled"]

_CallableT = TypeVar("_CallableT", bound=Callable[..., Any])


def not_compiled(function: _CallableT) -> _CallableT:
    """Have `function` called as it is where a caller is compiled.

    For functions of a module, or of a class, torch's own decorator does. It puts what it has made of a function into
    that function's attributes: a reference cycle, which would keep what a function of its own refers to until the
    garbage collector comes, and then the parameters that others have kept would lose their values.
    """

    @functools.wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        return _call(function, args, kwargs)

    return outside  # type: ignore[return-value]


@_disable_dynamo
def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)
