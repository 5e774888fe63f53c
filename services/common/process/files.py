"""Durable files and directories: complete or absent after a power cut.

One process locks a directory.

A new name is durable only after an fsync of its directory. A function takes its descriptor before it changes anything,
so a process without descriptors fails before the first change.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import pwd
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

from heterorl.common.errors import ConfigError, DiskFull, OperatorError

_LOG = logging.getLogger(__name__)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk and of a full quota."""


@contextlib.contextmanager
def replacing(path: Path, *, is_durable: bool = True, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file, named after the body's end and deleted after its failure.

    With `is_durable` bytes and name survive a power cut. `mode` is the new file's mode before the umask.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    # A crash left it. A new file never follows a link, which another user may have put there.
    temporary.unlink(missing_ok=True)
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, mode)) as file:
            yield file
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if is_durable:
        sync_directory(path.parent)


def refuse_root(directory: Path) -> None:
    """Refuse root where a directory, or its nearest parent, is another user's.

    That user could not write what root leaves there, and could lead root elsewhere by links. Raises OperatorError.
    """
    if os.geteuid() != 0:
        return
    place = directory.absolute()
    while not place.exists():
        place = place.parent
    # Of a link, and of what it names.
    if owner := place.lstat().st_uid or place.stat().st_uid:
        try:
            name = pwd.getpwuid(owner).pw_name
        except KeyError:
            name = f"'#{owner}'"
        raise OperatorError(
            f"{place} belongs to user {name}, not to root", action=f"repeat the command after `sudo -u {name}`"
        )


@contextlib.contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """A directory, named after the body's end and removed after its failure.

    Files and name survive a power cut. Takes the place of an empty directory. Raises DiskFull.
    """
    temporary = path.with_name(f"{path.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        with room(path.parent):
            yield temporary
            for each in temporary.rglob("*"):
                sync_directory(each) if each.is_dir() else sync_file(each)
            sync_directory(temporary)
            temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_directory(path.parent)


@contextlib.contextmanager
def room(directory: Path) -> Iterator[None]:
    """A body that writes below a directory.
    Raises DiskFull: no room is left."""
    try:
        yield
    except Exception as error:
        if _number_of(error) in NO_ROOM:
            raise DiskFull(str(directory)) from error
        raise


@contextlib.contextmanager
def usable(key: str, directory: Path) -> Iterator[None]:
    """A body that takes the directory that a key names.
    Raises ConfigError: it cannot be used; DiskFull."""
    try:
        with room(directory):
            yield
    except OSError as error:
        action = "name a directory that this user can write"
        raise ConfigError(key, f"{directory} cannot be used: {error.strerror}", action=action) from error


def has_no_room(directory: Path) -> bool:
    """Whether a file of one block finds no room there."""
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            file.write(bytes(1 << 16))
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno in NO_ROOM
    return False


def _number_of(error: Exception) -> int | None:
    """The system's number of an error; safetensors states it in words."""
    if isinstance(error, OSError):
        return error.errno
    stated = re.search(r"\(os error (\d+)\)", str(error))
    return int(stated[1]) if stated else None


EVERY_HOST = ("0.0.0.0", "[::]")
"""Hosts of `listen` that stand for every address of a machine."""


def announce(directory: Path, listen: str, port: int, *, service: str) -> None:
    """Write host:port to the file `address` of a directory.

    The port is the one in place of 0, and the host one that a certificate can name.
    """
    path = directory / "address"
    host = listen.rpartition(":")[0]
    host = "127.0.0.1" if host in EVERY_HOST else host
    try:
        with replacing(path, is_durable=False) as file:
            file.write(f"{host}:{port}\n".encode("ascii"))
    except OSError as error:
        # The file is a convenience: the service runs without it.
        _LOG.warning("file %s is not written, the %s serves without it: %s", path, service, error)


def write_all(file: BinaryIO, data: bytes) -> None:
    """Write every byte to an unbuffered file, which may take fewer."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def cut_torn_line(path: Path) -> bytes:
    """Cut off a last line without its end; returns the others."""
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) != len(data):
        os.truncate(path, len(whole))
    return whole


BAD_ROW = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors that a foreign JSON row raises; 1e400 as an integer raises an ArithmeticError."""


def journal_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of JSON lines, without an incomplete last one; none without file.
    Raises one of BAD_ROW: a row is damaged."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def try_lock(file: IO[bytes] | IO[str]) -> bool:
    """Lock a file until its close or process exit; False if held."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def make_directory(path: Path, *, mode: int = 0o777) -> None:
    """Create a directory and its missing parents durably; `mode` is the last's."""
    if path.is_dir():
        return
    make_directory(path.parent)
    with opened_directory(path.parent) as parent:
        path.mkdir(mode=mode, exist_ok=True)
        try:
            os.fsync(parent)
        except OSError:
            # The next attempt must find it missing, not take its name for durable.
            with contextlib.suppress(OSError):
                path.rmdir()
            raise


NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EXDEV, errno.EMLINK)
"""Errors of a file system without hard links."""


def link_or_copy(source: Path, target: Path) -> None:
    """Give a durable file a second name, or copy it durably."""
    try:
        target.hardlink_to(source)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        shutil.copyfile(source, target)
        sync_file(target)


def sync_file(path: Path) -> None:
    """Make a file's bytes durable."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    with opened_directory(path) as descriptor:
        os.fsync(descriptor)


@contextlib.contextmanager
def opened_directory(path: Path) -> Iterator[int]:
    """A directory's descriptor, for the fsync after a change of names."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
