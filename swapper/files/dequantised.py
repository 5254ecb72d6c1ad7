"""Lets transformers dequantise weights that are not read: later, part by part, as they are used.

It computes with each weight as it loads, some in memory that it makes itself. Here what it calls for that gives one
`Step`, with its own function as the operator, which is given a part of the rows at a time. The values do not depend on
how many: each is computed from its code and the scale of its block.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from swapper.errors import ConfigError, SwapError
from swapper.files.unread import RowWise, Step, Unread, sources_of

__all__ = ["DEQUANTISES", "check_scales", "dequantised"]

DEQUANTISES = {
    "fp8": ("transformers.integrations.finegrained_fp8", "Fp8Dequantize", "Fp8Dequantize._dequantize_one"),
    "mxfp8": ("transformers.integrations.finegrained_fp8", "Fp8Dequantize", "Fp8Dequantize._dequantize_one"),
    "mxfp4": ("transformers.integrations.mxfp4", "Mxfp4Dequantize", "dequantize_convertops"),
}
"""By name of a method of quantisation: a module of transformers; its class that dequantises the weights of a layer, by
`convert`; and the function that this calls with the codes and the scales of one."""

_CODES = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.int8})


@contextmanager
def dequantised(quantised_by: str, is_here: Callable[[], bool]) -> Iterator[list[Exception]]:
    """Within it what transformers dequantises is not computed, if it is `Unread`.

    Args:
        quantised_by: one of `DEQUANTISES`.
        is_here: returns True in the thread that this concerns.

    Returns:
        What went wrong. transformers goes on after an error, and raises one of its own at the end.

    Raises:
        ConfigError: this version of transformers does it in another way.
    """
    module_name, class_name, path = DEQUANTISES[quantised_by]
    wrong: list[Exception] = []
    try:
        module: Any = importlib.import_module(module_name)
        converter, (*within, name) = getattr(module, class_name), path.split(".")
        owner = converter if within else module
        convert: Callable[..., Any] = converter.convert
        plain: Callable[..., torch.Tensor] = getattr(owner, name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"this version of transformers dequantises weights ({quantised_by}) in a way that swapper does not know "
            f"({error}); load the model in memory and call swapper.offload"
        ) from error
    first = len(within)  # After `self`.

    def dequantise(*args: Any, **kwargs: Any) -> torch.Tensor:
        codes, scales = args[first : first + 2]
        if not (is_here() and isinstance(codes, Unread) and isinstance(scales, Unread)):
            return plain(*args, **kwargs)

        def function(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
            # transformers before 5.2 says on which device the codes are.
            more = (codes.device if isinstance(each, torch.device) else each for each in args[first + 2 :])
            return plain(*args[:first], codes, scales, *more, **kwargs).detach()

        like = function(codes.like, scales.like)
        # A matrix has rows of blocks, or the same scales for all its rows; experts in one tensor have each their own.
        matrix, of_rows = codes.dim() == 2, scales.shape[0] if scales.dim() == 2 else 0
        units = of_rows if matrix and of_rows > 1 else codes.shape[0]
        fits = scales.numel() == 1 or (of_rows in (1, units) if matrix else scales.shape[0] == units and not of_rows)
        if not units or not fits or any(each.shape[0] % units for each in (codes, like)):
            return plain(*args, **kwargs)
        step = Step(RowWise(function, units), (codes.recipe, scales.recipe), {}, like.shape, like.dtype)
        return Unread(step, like)

    def converting(self: Any, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        given = [each for value in input_dict.values() for each in (value if isinstance(value, list) else [value])]
        try:
            return convert(self, input_dict, *args, **kwargs)
        except Exception as error:
            stored = [each for u in given if isinstance(u, Unread) for each in sources_of(u.recipe)]
            if is_here() and isinstance(error, (SwapError, MemoryError, torch.OutOfMemoryError)):
                wrong.append(error)
            elif is_here() and stored:
                files = ", ".join(map(str, dict.fromkeys(each.path for each in stored)))
                wrong.append(
                    SwapError(
                        f"{files} does not fit the model: {kwargs.get('full_layer_name')} cannot be made of "
                        f"{', '.join(each.name for each in stored[:4])}{', ...' if stored[4:] else ''} ({error!r}); "
                        "copy or download the model again"
                    )
                )
            raise

    setattr(owner, name, dequantise)
    converter.convert = converting
    try:
        yield wrong
    finally:
        setattr(owner, name, plain)
        converter.convert = convert


def check_scales(model: torch.nn.Module) -> None:
    """Raise SwapError if codes of a weight were taken for its values, as transformers does where scales are missing."""
    parameters = dict(model.named_parameters())
    for name, p in parameters.items():
        if not isinstance(p, Unread) or (p.dtype in _CODES and f"{name}_scale_inv" in parameters):
            continue
        stored = list(sources_of(p.recipe))
        scaled = {module for module, _, own in (each.name.rpartition(".") for each in stored) if "scale" in own}
        for each in stored:
            if each.dtype in _CODES and each.name.rpartition(".")[0] not in scaled:
                raise SwapError(
                    f"{each.path} does not fit the model: {each.name} has quantised codes, of which {name} is made, "
                    "but no file has their scales by a name that transformers knows; copy or download the model again"
                )
