"""Element types: their names in safetensors files, and the types that stand for those a file or a copy cannot have."""

from __future__ import annotations

import torch

__all__ = ["DTYPES", "NAMES", "PAIRS", "PLAIN_DTYPES", "WORDS", "dtype_name", "stored_dtype"]

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32,
    "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
if hasattr(torch, "float8_e8m0fnu"):  # From torch 2.7 on.
    DTYPES["F8_E8M0"] = torch.float8_e8m0fnu
"""Element types of safetensors files, by their names there."""

PAIRS = {torch.complex64: torch.float32, torch.complex128: torch.float64}
"""Complex types, each with the type of its real and imaginary part: records and checkpoints hold pairs of these."""

NAMES = {dtype: name for name, dtype in DTYPES.items()} | {torch.complex64: "F32", torch.complex128: "F64"}
"""Names of element types in the files that we write; complex numbers have a last dimension of 2."""

PLAIN_DTYPES = frozenset(
    (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
     torch.uint8, torch.bool, *PAIRS)
)  # fmt: skip
"""Types of state that records hold, and of values that checkpoints hold as they are. The format of checkpoints depends
on it: values of other types are bytes there."""

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their size in bytes: torch's copies of them keep all bits."""


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a type in torch, as checkpoints have it: "float32"."""
    return str(dtype).removeprefix("torch.")


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of the elements that a checkpoint holds for `dtype`: complex numbers as pairs, unknown types as bytes."""
    return PAIRS.get(dtype, dtype if dtype in DTYPES.values() else torch.uint8)
