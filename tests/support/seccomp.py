"""System calls that are refused from now on, as by a container's profile. See seccomp(2)."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

_NUMBERS = {  # x86-64, aarch64
    "seccomp": (317, 277),
    "io_setup": (206, 0),
    "io_submit": (209, 2),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
}
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH

_PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER = 1
_FILTER_FLAG_TSYNC = 1
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000

_libc = ctypes.CDLL(None, use_errno=True)


def supported() -> bool:
    """Whether the machine's system calls are known here."""
    return platform.machine() in _MACHINES


def refuse(errors: dict[str, int]) -> None:
    """Every thread of this process, now and later, gets the errno for the system call. There is no way back."""
    column, architecture = _MACHINES[platform.machine()]
    program = [(_LOAD, 0, 0, 4), (_JUMP_IF_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _ALLOW), (_LOAD, 0, 0, 0)]
    for name, error in errors.items():
        program += [(_JUMP_IF_EQUAL, 0, 1, _NUMBERS[name][column]), (_RETURN, 0, 0, _ERRNO | error)]
    program.append((_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    number = _NUMBERS["seccomp"][column]
    if _libc.syscall(number, _SET_MODE_FILTER, _FILTER_FLAG_TSYNC, header) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp: {os.strerror(number)}")
