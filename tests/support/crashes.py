"""Every state of the disk that a crash can leave: watched at the border to the operating system, rebuilt as directories.

Before each effect of the code under test (a file is created or truncated, bytes are written, fsync, rename, link,
unlink, mkdir, rmdir, a commit of SQLite) the whole directory is read, and what a crash at that moment leaves is kept:

    kill      the process dies: everything done so far is there, nothing else; no `finally` of it runs
    lost      power is cut: names are there, bytes that no fsync made durable are not
    torn      power is cut: of those bytes the first half is there
    strict    power is cut: nothing is there that no fsync made durable, neither bytes nor names in directories

An fsync of a file makes its bytes durable, one of a directory the names in it; a commit makes SQLite's files durable,
because SQLite does its own fsyncs. After the last byte of a commit the log is also left torn. Equal states are kept
once. Bytes that a C library writes by itself appear with the next effect; renames and fsyncs are always Python's here.
"""

from __future__ import annotations

import builtins
import hashlib
import io
import os
import sqlite3
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

KILL, LOST, TORN, STRICT = "kill", "lost", "torn", "strict"
Tree = dict[str, bytes | None]
"""Relative path to bytes, None for a directory."""
_Names = dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Image:
    """What one crash left: before effect `number` (from 0), called `effect`; `acknowledged` is what was promised."""

    number: int
    effect: str
    mode: str
    tree: Tree
    acknowledged: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.mode} before effect {self.number} ({self.effect}), acknowledged: {self.acknowledged}"

    def write(self, directory: Path) -> Path:
        """Make the directory that the crash left."""
        directory.mkdir(parents=True)
        for name, data in sorted(self.tree.items()):
            if data is None:
                (directory / name).mkdir()
            else:
                (directory / name).write_bytes(data)
        return directory


@dataclass
class Disk:
    """Watches one directory. What is there when `watch` begins counts as durable.

    `machines` are directories right below that lose power one by one as well; the others are killed at that moment.
    `on_effect` is called before each effect, for invariants of what is in memory.
    """

    root: Path
    machines: tuple[str, ...] = ()
    on_effect: Callable[[], None] = lambda: None
    acknowledged: list[Any] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)
    effects: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._is_watching = False
        self._known: set[bytes] = set()
        self._bytes: dict[int, bytes] = {}
        self._names: dict[int, _Names] = {}
        self._pinned: dict[int, int] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """See what this process does; connections of SQLite must be opened inside."""
        with pytest.MonkeyPatch.context() as patches:
            for name in ("replace", "rename", "unlink", "remove", "mkdir", "rmdir", "link", "truncate", "ftruncate"):
                patches.setattr(os, name, self._noting(name, getattr(os, name)))
            patches.setattr(os, "open", self._noting_open(os.open))
            patches.setattr(os, "fsync", self._fsync(os.fsync))
            opened = self._file_open(io.open)
            patches.setattr(io, "open", opened)
            patches.setattr(builtins, "open", opened)
            patches.setattr(sqlite3, "connect", self._connect(sqlite3.connect))
            yield
        for descriptor in self._pinned.values():
            os.close(descriptor)
        self._pinned.clear()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Keep images until the end, which is the last one."""
        names, self._bytes = self._scan()
        self._names = names
        self._is_watching = True
        try:
            yield
            self.effect("end")
        finally:
            self._is_watching = False

    def effect(self, name: str) -> None:
        """Something is about to change."""
        with self._lock:
            if not self._is_watching:
                return
            self.on_effect()
            # Read before the files: what is promised later than the files were read cannot be in them.
            acknowledged = tuple(self.acknowledged)
            names, data = self._scan()
            number = self.effects.total()
            self.effects[name] += 1
            for mode, of in self._modes():
                tree: Tree = {}
                self._build(self.root.stat().st_ino, "", of, tree, names, data)
                self._keep(Image(number=number, effect=name, mode=mode, tree=tree, acknowledged=acknowledged))

    def _modes(self) -> Iterator[tuple[str, Mapping[str, str]]]:
        for mode in (KILL, LOST, TORN, STRICT):
            yield mode, {"": mode}
        for machine in self.machines:
            yield f"{STRICT} of {machine}", {"": KILL, machine: STRICT}

    def _keep(self, image: Image) -> None:
        digest = hashlib.sha256(repr((sorted(image.tree.items()), image.acknowledged)).encode()).digest()
        if digest not in self._known:
            self._known.add(digest)
            self.images.append(image)

    def _build(
        self, inode: int, path: str, of: Mapping[str, str], tree: Tree, names: dict[int, _Names], data: dict[int, bytes]
    ) -> None:
        mode = of.get(path.partition("/")[0], of[""])
        for name, child in (self._names.get(inode, {}) if mode == STRICT else names[inode]).items():
            inner = f"{path}/{name}" if path else name
            if child in names or child in self._names:
                tree[inner] = None
                self._build(child, inner, of, tree, names, data)
            else:
                tree[inner] = self._left(child, name, of.get(inner.partition("/")[0], of[""]), data)

    def _left(self, inode: int, name: str, mode: str, data: dict[int, bytes]) -> bytes:
        durable = self._bytes.get(inode, b"")
        if mode == STRICT or inode not in data:
            return durable
        now = data[inode]
        if mode == KILL or now == durable:
            return now
        assert not name.endswith(".sqlite"), "a checkpoint of SQLite is not modelled: the scenario is too large"
        if mode == LOST:
            return durable
        same = next((place for place, (a, b) in enumerate(zip(now, durable, strict=False)) if a != b), len(durable))
        same = min(same, len(now))
        return now[: same + (len(now) - same) // 2]

    # what is on disk

    def _scan(self) -> tuple[dict[int, _Names], dict[int, bytes]]:
        while True:
            names: dict[int, _Names] = {}
            data: dict[int, bytes] = {}
            try:
                self._scan_into(self.root, names, data)
            except FileNotFoundError:
                continue  # another thread removed it meanwhile
            return names, data

    def _scan_into(self, directory: Path, names: dict[int, _Names], data: dict[int, bytes]) -> None:
        self._pin(directory)
        found: _Names = {}
        names[directory.stat().st_ino] = found
        with os.scandir(directory) as entries:
            for entry in entries:
                found[entry.name] = entry.inode()
                if entry.is_dir(follow_symlinks=False):
                    self._scan_into(Path(entry.path), names, data)
                else:
                    self._pin(Path(entry.path))
                    data[entry.inode()] = self._read(entry.inode())

    def _pin(self, path: Path) -> None:
        # An open file keeps its inode's number from being given to another one.
        if path.stat().st_ino not in self._pinned:
            descriptor = _OPEN(path, os.O_RDONLY)
            self._pinned[os.fstat(descriptor).st_ino] = descriptor

    def _read(self, inode: int) -> bytes:
        descriptor = self._pinned[inode]
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)

    def _make_durable(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        if status.st_ino not in self._pinned:
            return
        if stat.S_ISDIR(status.st_mode):
            with os.scandir(descriptor) as entries:
                self._names[status.st_ino] = {entry.name: entry.inode() for entry in entries}
        else:
            self._bytes[status.st_ino] = self._read(status.st_ino)

    def _committed(self) -> None:
        """SQLite has synced its files and, when they were new, their names."""
        names, data = self._scan()
        for directory, found in names.items():
            for name, inode in found.items():
                if ".sqlite" in name and inode in data:
                    self._bytes[inode] = data[inode]
                    self._names.setdefault(directory, {})[name] = inode

    # the border

    def _noting(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*positional: Any, **named: Any) -> Any:
            self.effect(name)
            return real(*positional, **named)

        return call

    def _noting_open(self, real: Callable[..., int]) -> Callable[..., int]:
        def call(path: Any, flags: int, *positional: Any, **named: Any) -> int:
            if flags & (os.O_CREAT | os.O_TRUNC):
                self.effect("create")
            return real(path, flags, *positional, **named)

        return call

    def _fsync(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def call(descriptor: int) -> None:
            self.effect("fsync")
            real(descriptor)
            with self._lock:
                if self._is_watching:
                    self._make_durable(descriptor)

        return call

    def _file_open(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", buffering: int = -1, *positional: Any, **named: Any) -> Any:
            if isinstance(file, int) or not set(mode) & set("wax+"):
                return real(file, mode, buffering, *positional, **named)
            self.effect("create")
            raw = _File(file, mode.replace("b", "").replace("t", ""), self.effect)
            if buffering == 0:
                return raw
            buffered: Any = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, *positional, **named)

        return call

    def _connect(self, real: Callable[..., Any]) -> Callable[..., Any]:
        disk = self

        class Connection(sqlite3.Connection):
            def execute(self, statement: str, *parameters: Any) -> sqlite3.Cursor:
                if statement != "COMMIT":
                    return super().execute(statement, *parameters)
                with disk._lock:
                    disk.effect("commit")
                    cursor = super().execute(statement)
                    disk.effect("committed")
                    disk._committed()
                    return cursor

        def connect(*positional: Any, **named: Any) -> Any:
            return real(*positional, factory=Connection, **named)

        return connect


class _File(io.FileIO):
    """A file that tells of each write and truncation, after any buffer."""

    def __init__(self, file: Any, mode: str, effect: Callable[[str], None]) -> None:
        super().__init__(file, mode)
        self._effect = effect

    def write(self, data: Any, /) -> int:
        self._effect("write")
        return super().write(data) or 0

    def truncate(self, size: int | None = None, /) -> int:
        self._effect("truncate")
        return super().truncate(size)


_OPEN = os.open
