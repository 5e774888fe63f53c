"""Fuzz targets: payload files with and without valid checksums, composing them, and trainable state on disk."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import struct
import tempfile
import weakref
from pathlib import Path
from typing import Any

import xxhash

from campaigns.fuzz.mutate import LONG_EDGES, mutated
from heterorl.common.errors import CorruptData
from heterorl.common.weights.arena import Arena
from heterorl.common.weights.compose import compose
from heterorl.common.weights.payload import apply_payload, read_header, read_roots, write_delta, write_snapshot
from tests.support.arenas import changed_arena, random_arena, small_layout

_RECORDS = 112
_RECORD = struct.Struct("<IQQ")


def scratch(owner: object) -> Path:
    """A temporary directory that is deleted with its owner; in memory if possible."""
    memory = Path("/dev/shm")
    directory = tempfile.mkdtemp(dir=memory if memory.is_dir() else None)
    weakref.finalize(owner, shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


def sealed(data: bytes) -> bytes:
    """The file with valid checksums, as far as its own numbers allow."""
    result = bytearray(data)
    if len(result) < _RECORDS + 8:
        return data
    (size,) = struct.unpack_from("<I", result, 8)
    (count,) = struct.unpack_from("<I", result, 108)
    if size > len(result) - 20 or 100 + 20 * count != size:
        return data
    position = 20 + size
    for number in range(count):
        method, num_bytes, _ = _RECORD.unpack_from(result, _RECORDS + 20 * number)
        checksum = xxhash.xxh3_64_intdigest(bytes(result[position : position + num_bytes]))
        _RECORD.pack_into(result, _RECORDS + 20 * number, method, num_bytes, checksum)
        position += num_bytes
    struct.pack_into("<Q", result, 12 + size, xxhash.xxh3_64_intdigest(bytes(result[12 : 12 + size])))
    return bytes(result)


class _Payloads:
    """Valid payloads of a small layout, and a file for damaged ones."""

    def __init__(self) -> None:
        self.path = scratch(self) / "case"
        self.layout = small_layout()
        self.old = random_arena(self.layout, seed=1)
        self.root = self.old.state_root()
        self.files = []
        for number, density in enumerate((0.02, 0.2, 0.9)):
            write_delta(self.path, self.old, changed_arena(self.old, seed=number, density=density))
            self.files.append(self.path.read_bytes())
        write_snapshot(self.path, self.old)
        self.files.append(self.path.read_bytes())

    def draw_file(self, draw: random.Random) -> bytes:
        data = draw.choice(self.files)
        if draw.random() < 0.3:
            # One number of one record, under checksums that fit.
            damaged = bytearray(data)
            at = _RECORDS + 20 * draw.randrange(len(self.layout.chunks)) + draw.choice((0, 4))
            struct.pack_into("<I", damaged, at, draw.choice(LONG_EDGES) % 2**32)
            return sealed(bytes(damaged))
        damaged_bytes = mutated(data, draw, other=draw.choice(self.files))
        return sealed(damaged_bytes) if draw.random() < 0.6 else damaged_bytes


class ContainerTarget(_Payloads):
    """read_header: records that fit the chunks and the file, or a typed error."""

    def case(self, draw: random.Random) -> bytes:
        return self.draw_file(draw)

    def run(self, case: bytes) -> None:
        self.path.write_bytes(case)
        with contextlib.suppress(CorruptData):
            read_roots(self.path)
        with self.path.open("rb") as file:
            header = read_header(file, layout_id=self.layout.layout_id, chunks=self.layout.chunks)
            rest = len(case) - file.tell()
        assert sum(record.num_bytes for record in header.records) == rest, "records and file disagree"


class PayloadTarget(_Payloads):
    """apply_payload: a state, or a typed error."""

    def case(self, draw: random.Random) -> tuple[bytes, bool]:
        """A file's bytes, and whether there is no base state."""
        data = self.draw_file(draw)
        return data, data[44:76] == bytes(32)

    def run(self, case: tuple[bytes, bool]) -> None:
        data, is_snapshot = case
        self.path.write_bytes(data)
        staging = Arena(self.layout) if is_snapshot else self.old.copy()
        apply_payload(self.path, staging, expected_from_root=None if is_snapshot else self.root)


class ComposeTarget(_Payloads):
    """compose: one payload of one damaged one, or a typed error and no file."""

    def case(self, draw: random.Random) -> bytes:
        return self.draw_file(draw)

    def run(self, case: bytes) -> None:
        self.path.write_bytes(case)
        target = self.path.with_name("out")
        try:
            compose([self.path], target, layout_id=self.layout.layout_id, chunks=self.layout.chunks)
        except CorruptData:
            assert not target.exists(), "a refused composition left a file"
            raise
        target.unlink()


class StateTarget:
    """The safetensors reader: trainable state, or a typed error that leaves the model unchanged."""

    def __init__(self) -> None:
        import torch

        from heterorl.common.types.common import NO_LORA
        from heterorl.learner.backends.optimizer_state import copy_state

        self._path = scratch(self)
        self._torch = torch
        self._model = torch.nn.Linear(3, 2)
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._model(torch.ones(1, 3)).sum().backward()
        self._optimizer.step()
        copy_state(self._model, self._optimizer, applied_steps=1, lora=NO_LORA)(self._path)
        self._files = {path.name: path.read_bytes() for path in self._path.iterdir()}
        self._weights = [parameter.detach().clone() for parameter in self._model.parameters()]

    def case(self, draw: random.Random) -> tuple[str, bytes]:
        """One of the three files, damaged; in safetensors often the JSON header."""
        name = draw.choice(sorted(self._files))
        data = self._files[name]
        if name.endswith(".json") or draw.random() < 0.3:
            return name, mutated(data, draw)
        (size,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + size])
        self._damage(header, draw)
        text = json.dumps(header).encode()
        return name, struct.pack("<Q", len(text)) + text + data[8 + size :]

    def run(self, case: tuple[str, bytes]) -> None:
        """Read the state with the damaged file in place."""
        from heterorl.learner.backends.optimizer_state import read_state

        name, data = case
        (self._path / name).write_bytes(data)
        random_state = self._torch.get_rng_state()
        try:
            read_state(self._path, self._model, self._torch.optim.AdamW(self._model.parameters()))
        except CorruptData:
            for parameter, before in zip(self._model.parameters(), self._weights, strict=True):
                assert self._torch.equal(parameter, before), "a refused state changed the model"
            raise
        finally:
            (self._path / name).write_bytes(self._files[name])
            self._torch.set_rng_state(random_state)
            with self._torch.no_grad():
                for parameter, before in zip(self._model.parameters(), self._weights, strict=True):
                    parameter.copy_(before)

    @staticmethod
    def _damage(header: dict[str, Any], draw: random.Random) -> None:
        names = [name for name in header if name != "__metadata__"]
        name = draw.choice(names)
        way = draw.randrange(5)
        if way == 0:
            header[name]["dtype"] = draw.choice(("F16", "BF16", "I8", "U8", "F64", "BOOL", "X"))
        elif way == 1:
            header[name]["shape"] = draw.choice(([], [1], [2**62, 4], [0], [6], [3, 2], [-1]))
        elif way == 2:
            header[name]["data_offsets"] = [draw.choice((0, 4, 24, 2**63)), draw.choice((0, 4, 24, 28, 2**63))]
        elif way == 3:
            del header[name]
        else:
            header[draw.choice(names)] = header[name]
