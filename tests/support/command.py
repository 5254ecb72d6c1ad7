"""The command line, called in this process."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner, Result

from swapper.cli import app


def swapper(*arguments: object, code: int = 0) -> Result:
    """Run a command in this process, and check how it ended."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    assert "\x1b" not in result.output, "no colour where there is no terminal"
    return result


def as_json(*arguments: object, code: int = 0) -> dict[str, Any]:
    """What a command prints with --json, which must be all that it prints on standard output."""
    data = json.loads(swapper(*arguments, "--json", code=code).stdout)
    assert isinstance(data, dict)
    return data
