"""The file operations of payloads: whole, durable, and with errors that say whose fault they are."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import BinaryIO

from services.common.directory import sync_directory
from services.common.errors import CorruptStore, StoreFull

FRAME_BYTES = 1 << 20


def remove_file(path: Path) -> None:
    """Delete a file; its name is gone for good when this returns."""
    try:
        path.unlink()
        sync_directory(path.parent)
    except OSError as error:
        raise typed_error(error) from error


def write_all(file: BinaryIO, frame: bytes) -> None:
    """Write every byte of a frame."""
    view = memoryview(frame)
    try:
        while view:
            view = view[file.write(view) :]
    except OSError as error:
        raise typed_error(error) from error


def sync_and_close(file: BinaryIO, path: Path, *, is_new: bool = False) -> None:
    """Make a file's bytes durable, and its name if new, or remove it: what the disk holds of it is unknown then."""
    try:
        os.fsync(file.fileno())
        if is_new:
            sync_directory(path.parent)
    except OSError as error:
        path.unlink()
        raise typed_error(error) from error
    finally:
        file.close()


def typed_error(error: OSError) -> Exception:
    """StoreFull where the disk has no room, else CorruptStore."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull("the coordinator's disk is full", retry_after_s=5.0)
    return CorruptStore(f"the disk of the payloads failed: {error}")
