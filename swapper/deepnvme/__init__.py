"""DeepNVMe's names over `AsyncIOHandle`: change one import and a program runs."""

from swapper.deepnvme.deepnvme import (
    AsyncIOBuilder,
    GDSBuilder,
    PinMemoryBuilder,
    UtilsBuilder,
    aio_handle,
    aio_read,
    aio_write,
    cast_from_byte_tensor,
    cast_to_byte_tensor,
    deepspeed_memcpy,
    gds_handle,
    pin_handle,
)

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
