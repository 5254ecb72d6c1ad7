"""DeepNVMe's names over `AsyncIOHandle`, so that a program written for them runs after changing its import.

    from swapper.deepnvme import AsyncIOBuilder  # was: from deepspeed.ops.op_builder import AsyncIOBuilder

What moves bytes is `swapper.handle`, which is the interface to write new programs for. Names, order of arguments and
what is returned are those of DeepSpeed 0.16 to 0.19. Where DeepNVMe returns -1, aborts the process or reports success
for what failed, a call here raises: `SwapIOError` for what the system refused, `ValueError` for what cannot be asked
for, `SwapError` for what cannot be done now. Lengths and offsets need no alignment.
"""

from swapper.deepnvme.builders import (
    AsyncIOBuilder,
    GDSBuilder,
    PinMemoryBuilder,
    UtilsBuilder,
    aio_read,
    aio_write,
    deepspeed_memcpy,
)
from swapper.deepnvme.byte_tensors import cast_from_byte_tensor, cast_to_byte_tensor
from swapper.deepnvme.handles import aio_handle, gds_handle
from swapper.deepnvme.locked_memory import pin_handle

__all__ = [
    "AsyncIOBuilder",
    "GDSBuilder",
    "PinMemoryBuilder",
    "UtilsBuilder",
    "aio_handle",
    "aio_read",
    "aio_write",
    "cast_from_byte_tensor",
    "cast_to_byte_tensor",
    "deepspeed_memcpy",
    "gds_handle",
    "pin_handle",
]
