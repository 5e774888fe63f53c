"""Checkpoints on the learner's disk: complete or absent.

    state_dir/checkpoints/v00000012/    one checkpoint, named by the version that its publication makes
        cursor.json                     position in training, and its publication:
                                        {"format": 1, "run_id", "step", "step_id", "version", "parent_version",
                                        "lineage_version", "state_root", "manifest": hex,
                                        "consumed": [[site, incarnation, sequence], ...], "reports": [{...}]}
        published.payload               snapshot of the published weights (heterorl.common.weights.payload)
        <variant>.scales                snapshot of the scales of each variant
        backend/                        files of TrainBackend.freeze
        DONE                            {"format": 1, "files": {relative path: blake3 of its bytes}}

Guarantees: the directory gets its name by one rename, after every byte in it is durable. It is a checkpoint only while
DONE names exactly its files with their digests; otherwise the backend's files are never read.
"""

import dataclasses
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import blake3

from heterorl.common.errors import CorruptData, CorruptStore
from heterorl.common.model.quantise import Variant, scale_layout
from heterorl.common.process.files import (
    BAD_ROW,
    NO_LINKS,
    link_or_copy,
    make_directory,
    room,
    sync_directory,
    sync_file,
)
from heterorl.common.types.common import Digest, StepReport, value_of_row
from heterorl.common.types.rollout import GroupId
from heterorl.common.weights.arena import Arena, Layout
from heterorl.common.weights.payload import apply_payload, file_digest
from heterorl.learner.backends.train_backend import TrainBackend, Weights
from heterorl.learner.publish.version_payloads import Encoded, PublishedHead, write_snapshot

CURSOR_FORMAT = 1
_GROUP = ("site", "incarnation", "sequence")
CURSOR_FILE = "cursor.json"
PUBLISHED_FILE = "published.payload"
BACKEND_DIRECTORY = "backend"
SCALES_SUFFIX = ".scales"
DONE_FILE = "DONE"
FORMAT = 1
_READING = "reading-"
"""Begin of the names of links to a checkpoint that a command reads."""
STATE_BYTES = 14
"""Bytes of a parameter: fp32 master, two moments, published value."""
LARGE_BYTES = 4 << 30
"""Checkpoints of this size may take longer to write than a step takes to compute."""
FEW = 10
NUM_KEPT = 2
"""The newest may belong to a publication that is refused; then the one before it counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A position in training, and the publication that makes it a version.

    `step` optimizer steps are in the weights. The publication has the key `step_id`, makes `version` from
    `parent_version` (the head at that time; -1 for none) and follows `lineage_version` (the same unless versions are
    abandoned). `consumed` and `reports` are of the steps since the parent.
    """

    run_id: str
    step: int
    step_id: str
    version: int
    parent_version: int
    lineage_version: int
    state_root: Digest
    manifest: bytes
    consumed: tuple[GroupId, ...]
    reports: tuple[StepReport, ...]


def cursor_of(
    encoded: Encoded, position: PublishedHead, *, consumed: Sequence[GroupId], reports: Sequence[StepReport]
) -> Cursor:
    """The cursor of a version that is encoded from a position."""
    manifest, parent = encoded.manifest, position.head_version
    return Cursor(
        run_id=manifest.run_id,
        step=manifest.step,
        step_id=step_id(
            run_id=manifest.run_id, parent_version=parent, step=manifest.step, state_root=manifest.state_root
        ),
        version=manifest.version,
        parent_version=parent,
        lineage_version=position.lineage_version,
        state_root=manifest.state_root,
        manifest=encoded.manifest_bytes,
        consumed=tuple(consumed),
        reports=tuple(reports),
    )


def step_id(*, run_id: str, parent_version: int, step: int, state_root: str) -> str:
    """Idempotency key of a publication.

    The same state at the same place in the lineage always has the same key. blake3("heterorl step" || run || parent ||
    step || state root), the first 32 hex characters.
    """
    text = json.dumps(["heterorl step", run_id, parent_version, step, state_root])
    return str(blake3.blake3(text.encode()).hexdigest()[:32])


def cursor_to_bytes(cursor: Cursor) -> bytes:
    """Write as JSON."""
    table = dataclasses.asdict(cursor) | {
        "format": CURSOR_FORMAT,
        "manifest": cursor.manifest.hex(),
        "consumed": [[getattr(entry, name) for name in _GROUP] for entry in cursor.consumed],
    }
    return json.dumps(table, indent=1).encode()


def cursor_from_bytes(data: bytes) -> Cursor:
    """Read the bytes of `cursor_to_bytes`; raises CorruptStore for others."""
    try:
        table = json.loads(data)
        if table["format"] != CURSOR_FORMAT:
            raise CorruptStore(f"a cursor of format {table['format']}, known is {CURSOR_FORMAT}")
        del table["format"]
        table["manifest"] = bytes.fromhex(table["manifest"])
        table["consumed"] = [dict(zip(_GROUP, entry, strict=True)) for entry in table["consumed"]]
        return value_of_row(Cursor, table)
    except BAD_ROW as error:
        raise CorruptStore(f"not a cursor: {error!r}") from error


@dataclass(slots=True, kw_only=True, eq=False)
class UnfinishedCheckpoint:
    """A checkpoint of a step's end that is still to be written."""

    version: int
    directory: Path
    save: Callable[[], None]
    """Writes the backend's files; dropped afterwards, because it holds a copy of masters and optimizer."""


class CheckpointStore:
    """The checkpoints under one directory.
    Used by one process at a time, off the event loop."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._unreadable: set[Path] = set()
        make_directory(root)

    def begin(self, version: int, backend: TrainBackend) -> UnfinishedCheckpoint:
        """Take a backend's state for the checkpoint of a version.
        The next step may then begin. After DiskFull all checkpoints are as before."""
        temporary = self._root / f"writing-v{version:08d}"
        with room(self._root):
            _remove(temporary)
            (temporary / BACKEND_DIRECTORY).mkdir(parents=True)
            save = backend.freeze(temporary / BACKEND_DIRECTORY)
        return UnfinishedCheckpoint(version=version, directory=temporary, save=save)

    def write(
        self,
        cursor: Cursor,
        *,
        begun: UnfinishedCheckpoint,
        arena: Weights,
        snapshot: Path | None,
        scales: Mapping[str, Arena] = MappingProxyType({}),
    ) -> Path:
        """Write a checkpoint and drop all except the two newest.

        Sharded weights are written already, by `write_published` or as `snapshot`. After DiskFull all are as before.
        """
        final = self._root / f"v{cursor.version:08d}"
        temporary = begun.directory
        assert begun.version == cursor.version, "a state belongs to one version"
        with room(self._root):
            begun.save()
            begun.save = lambda: None
            if snapshot is not None:
                link_or_copy(snapshot, temporary / PUBLISHED_FILE)
            elif isinstance(arena, Arena):
                write_snapshot(temporary / PUBLISHED_FILE, arena)
            for variant, values in scales.items():
                write_snapshot(temporary / f"{variant}{SCALES_SUFFIX}", values)
            (temporary / CURSOR_FILE).write_bytes(cursor_to_bytes(cursor))
            digests = {name: file_digest(temporary / name) for name in _files(temporary)}
            (temporary / DONE_FILE).write_text(json.dumps({"format": FORMAT, "files": digests}), encoding="utf-8")
            for path in (*sorted(temporary.rglob("*"), reverse=True), temporary):
                (sync_directory if path.is_dir() else sync_file)(path)
            if final in self._unreadable:
                _set_aside(final)
                self._unreadable.discard(final)
            _remove(final)
            temporary.rename(final)
            sync_directory(self._root)
        # Versions above this one are of a history that the coordinator has lost: the first to go.
        others = [path for path in self.paths() if path not in self._unreadable and path != final]
        for old in sorted(others, key=lambda path: path > final)[NUM_KEPT - 1 :]:
            _remove(old)
        return final

    def write_published(self, begun: UnfinishedCheckpoint, weights: Weights) -> None:
        """Write published weights that all ranks hold, while they take part."""
        with room(self._root):
            write_snapshot(begun.directory / PUBLISHED_FILE, weights)

    def keep_unreadable(self, path: Path) -> None:
        """Note a checkpoint that the disk does not give now.
        It is neither counted among the newest nor removed."""
        self._unreadable.add(path)

    def remove_unfinished(self) -> None:
        """Remove unfinished checkpoints, and links of exports that were killed."""
        for path in [*self._root.glob("writing-*"), *self._root.glob(f"{_READING}*")]:
            _remove(path)

    def paths(self) -> list[Path]:
        """Directories named as checkpoints, newest first; `read_checkpoint` tells whether they are valid."""
        return sorted(self._root.glob("v[0-9]*"), reverse=True)

    def discard(self, path: Path) -> None:
        _remove(path)
        sync_directory(self._root)


@contextmanager
def linked(path: Path) -> Iterator[Path]:
    """A checkpoint's links, which stay while a learner removes it.

    Yields `path` itself on a disk without links. Raises FileNotFoundError: it was removed before.
    """
    held: Path | None = None
    try:
        try:
            held = Path(tempfile.mkdtemp(prefix=_READING, dir=path.parent))
            for name in _files(path):
                (held / name).parent.mkdir(parents=True, exist_ok=True)
                os.link(path / name, held / name)
            kept = held
        except OSError as error:
            if error.errno not in (*NO_LINKS, errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT):
                raise
            kept = path
        yield kept
    finally:
        if held is not None:
            shutil.rmtree(held, ignore_errors=True)


def cadence(every_versions: int, *, num_elements: int) -> int:
    """Versions between checkpoints, chosen by their size where `every_versions` is 0."""
    return every_versions or (1 if STATE_BYTES * num_elements < LARGE_BYTES else FEW)


def read_checkpoint(path: Path) -> Cursor:
    """Check every byte of a checkpoint and return its cursor.

    Raises:
        CorruptStore: it is incomplete or changed; names the first file.
        OSError: the disk does not give it now.
    """
    try:
        data = (path / DONE_FILE).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CorruptStore(f"{path} was not completed: {error!r}") from error
    try:
        done = json.loads(data)
        stated = {str(name): Digest(digest) for name, digest in done["files"].items()}
        if done["format"] != FORMAT:
            raise CorruptStore(f"{path} has format {done['format']}, known is {FORMAT}")
    except BAD_ROW as error:
        raise CorruptStore(f"{path} was not completed: {error!r}") from error
    present = set(_files(path)) - {DONE_FILE}
    if present != set(stated):
        raise CorruptStore(f"{path} has other files than it was written with: {sorted(present ^ set(stated))}")
    for name, digest in sorted(stated.items()):
        if file_digest(path / name) != digest:
            raise CorruptStore(f"{path / name} was changed after it was written")
    return cursor_from_bytes((path / CURSOR_FILE).read_bytes())


def find_published(paths: Sequence[Path], version: int, state_root: str, layout: Layout) -> Arena | None:
    """A version's published weights from any checkpoint; None where none gives them."""
    for path in paths:
        try:
            cursor = cursor_from_bytes((path / CURSOR_FILE).read_bytes())
            if (cursor.version, cursor.state_root) == (version, state_root):
                arena = Arena(layout)
                apply_payload(path / PUBLISHED_FILE, arena, expected_from_root=None)
                if arena.state_root() == state_root:
                    return arena
        except (OSError, CorruptData):
            continue
    return None


def read_all_scales(path: Path, layouts: Mapping[Variant, Layout]) -> dict[str, Arena]:
    """The scales of the variants that a checkpoint has.
    Raises CorruptData: they are broken."""
    found: dict[str, Arena] = {}
    for name, layout in layouts.items():
        file = path / f"{name}{SCALES_SUFFIX}"
        if file.exists():
            found[name] = Arena(scale_layout(layout))
            apply_payload(file, found[name], expected_from_root=None)
    return found


def _files(root: Path) -> list[str]:
    # Not by glob, which skips unreadable directories.
    found = [Path(place) / name for place, _, names in os.walk(root, onerror=_refuse) for name in names]
    return sorted(str(path.relative_to(root)) for path in found)


def _refuse(error: OSError) -> None:
    raise error


def _remove(path: Path) -> None:
    # DONE goes first: a crash then leaves no valid checkpoint.
    (path / DONE_FILE).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _set_aside(path: Path) -> None:
    number = 1
    while (aside := path.with_name(f"unreadable-{path.name}-{number}")).exists():
        number += 1
    path.rename(aside)
