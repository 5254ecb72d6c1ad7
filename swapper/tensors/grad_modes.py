"""Grad mode and inference mode, switched so that Ctrl-C leaves them as they were.

[Note: Ctrl-C and modes] `with torch.no_grad()` runs Python code of torch on entry and exit, and an interrupt there
leaves grad mode off for good. `torch.inference_mode` is worse: its guard lives on in the traceback, and sets the modes
to what they were when the traceback dies, at any later time. The guard below both is an object of C++: nothing can come
between its entry and the body of the `with`. It restores grad mode too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

__all__ = ["modes_kept", "outside_of_inference", "set_grad_mode"]


def modes_kept() -> AbstractContextManager[object]:
    """Grad mode and inference mode are after it as before. Within it grad mode is on, except in inference mode."""
    kept: AbstractContextManager[object] = torch._C._InferenceMode(torch.is_inference_mode_enabled())
    return kept


def outside_of_inference() -> AbstractContextManager[object]:
    """As `torch.inference_mode(False)`. See [Note: Ctrl-C and modes]."""
    outside: AbstractContextManager[object] = torch._C._InferenceMode(False)
    return outside


def set_grad_mode(enabled: bool) -> None:
    """Switch grad mode, within one of the above: together they are `torch.no_grad()`."""
    torch._C._set_grad_enabled(enabled)
