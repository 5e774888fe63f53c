"""Files of the authority: written whole or not at all, secret ones never readable by others.

Layout of an authority's directory:
    ca.crt ca.key        the authority; ca.key stays here
    issued/SERIAL.crt    every certificate that it issued
    tokens/NUMBER.json   tokens by which nodes join, without their secrets
    revoked              serial numbers that are no longer accepted; the coordinator's `tls.revoked`
    ROLE-SITE/           what one node needs: ca.crt, node.crt, node.key; a coordinator also a copy of revoked
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from heterorl.common.process.files import sync_directory

SECRET = 0o600
PUBLIC = 0o644


def write_file(path: Path, data: bytes, *, mode: int) -> None:
    """Replace a file atomically and durably; its mode holds from the first byte on."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Let one process at a time change an authority's directory."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
