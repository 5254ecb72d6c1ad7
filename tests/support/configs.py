"""Configs of tests, and what refusing one says."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from swapper.errors import ConfigError


def error_of(make: Callable[[], object]) -> str:
    """The message of the ConfigError that `make` raises; it must be that class and nothing derived from pydantic's."""
    with pytest.raises(ConfigError) as caught:
        make()
    assert type(caught.value) is ConfigError
    assert isinstance(caught.value, ValueError)
    return str(caught.value)
