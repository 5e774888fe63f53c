"""What foreign code may not ask the kernel for: a seccomp program, as bytes of classic BPF.

Refused is what outlives its process and has no namespace (keys, addresses of vsock, turns at the disk), what counts
for no limit (memory of memfd), and what opens much of the kernel to whoever asks (namespaces, io_uring, bpf).

Guarantees: another architecture's numbers of calls are refused all together, so no call is asked for by another name.
clone3, whose flags a filter cannot see, is unknown (ENOSYS): the C library falls back to clone.
"""

from __future__ import annotations

import errno
import struct

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""As the kernel's audit numbers them."""
_REFUSED = {
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "setns": (308, 268), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "ioprio_set": (251, 30), "sched_setattr": (314, 274),
}  # fmt: skip
"""Numbers of calls on x86_64 and aarch64."""
_CLONE3, _CLONE, _UNSHARE, _SOCKETS = (435, 435), (56, 220), (272, 97), ((41, 198), (53, 199))
_NEW_NAMESPACES = 0x7E020000
"""All CLONE_NEW* but that of time, which in clone is a part of a signal's number."""
_NEW_TIME = 0x80
_AF_UNIX = 1
_OTHER_NUMBERING = 0x40000000
"""Numbers of x32 begin here; no other architecture has so many."""
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
"""Offsets in struct seccomp_data; of an argument the lower half."""
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000


def program(machine: str) -> bytes:
    """The program for a machine, as os.uname() names it; empty where it is not known."""
    if machine not in _ARCHITECTURES:
        return b""
    column = list(_ARCHITECTURES).index(machine)

    def refuse_if(test: int, value: int, error: int) -> bytes:
        return _line(test, value, if_not=1) + _line(_RETURN, _ERROR | error)

    def refuse_by_argument(number: int, rule: bytes) -> bytes:
        # The rule ends by itself: behind it another argument is loaded.
        rule = _line(_LOAD, _FIRST_ARGUMENT) + rule + _line(_RETURN, _ALLOW)
        return _line(_IF_EQUAL, number, if_not=len(rule) // 8) + rule

    only_unix = _line(_IF_EQUAL, _AF_UNIX, if_so=1) + _line(_RETURN, _ERROR | errno.EAFNOSUPPORT)
    lines = [
        _line(_LOAD, _ARCHITECTURE),
        _line(_IF_EQUAL, _ARCHITECTURES[machine], if_so=1),
        _line(_RETURN, _ERROR | errno.ENOSYS),
        _line(_LOAD, _NUMBER),
        refuse_if(_IF_AT_LEAST, _OTHER_NUMBERING, errno.ENOSYS),
        refuse_if(_IF_EQUAL, _CLONE3[column], errno.ENOSYS),
        *(refuse_if(_IF_EQUAL, numbers[column], errno.EPERM) for numbers in _REFUSED.values()),
        *(refuse_by_argument(numbers[column], only_unix) for numbers in _SOCKETS),
        refuse_by_argument(_CLONE[column], refuse_if(_IF_ANY_BIT, _NEW_NAMESPACES, errno.EPERM)),
        refuse_by_argument(_UNSHARE[column], refuse_if(_IF_ANY_BIT, _NEW_NAMESPACES | _NEW_TIME, errno.EPERM)),
        _line(_RETURN, _ALLOW),
    ]
    return b"".join(lines)


def _line(code: int, value: int, *, if_so: int = 0, if_not: int = 0) -> bytes:
    """One instruction; of a test, how many lines are left out where it is so, and where not."""
    return struct.pack("=HBBI", code, if_so, if_not, value)
