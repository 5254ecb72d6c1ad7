"""Warnings that a process logs once."""

from __future__ import annotations

import functools
import logging

__all__ = ["warn_once"]


@functools.cache
def warn_once(log: logging.Logger, text: str) -> None:
    """Log a warning, if this process has not done so before."""
    log.warning("%s", text)
