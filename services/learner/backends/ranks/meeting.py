"""Where the ranks of one learner meet: a store of torch.distributed, before there is a group and beside it.

    heterorl/hello/R           rank R's newest process is there, by a word that it made up
    heterorl/welcome/R/WORD    rank 0 has seen it, and names the round
    heterorl/ROUND/here/R      rank R has seen that
    heterorl/ROUND/config/N    what rank 0 says is to be trained, in the N-th place; empty: the end
    heterorl/ROUND/heard/R     rank R has heard of the end
    heterorl/ROUND/beat/R      see `watch`

A launcher may start the ranks again one by one, beside a store that keeps what dead ones wrote. A round is of processes
that live: rank 0 names a new one, and is done only when every rank answers to it.

Guarantees: all ranks train by the configuration of rank 0, bit for bit; the others need no file of it. What the ranks
read beside it must agree: packages and releases, and the model directory of every machine.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import secrets
import time
from pathlib import Path

import blake3
import torch
from torch.distributed import FileStore, PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

import heterorl
from heterorl.common.errors import ConfigError, OperatorError
from heterorl.learner.backends.loading.shards import weight_files
from heterorl.learner.backends.ranks.collectives import Collectives, missing_device
from heterorl.learner.backends.ranks.place import Place

_FOREVER = datetime.timedelta(days=365)
_CONNECT = datetime.timedelta(minutes=5)
"""How long a rank waits for the others to be there."""
_FAREWELL = datetime.timedelta(seconds=10)
_POLL_S = 0.05
_PREFIX = "heterorl"


class RanksApart(OperatorError):
    """The ranks did not find each other."""

    action = "see that MASTER_ADDR and MASTER_PORT can be reached from every machine, and that all of them were started"


class Meeting:
    """One rank's way to the store, and over it to the others."""

    def __init__(self, place: Place) -> None:
        """Connect; with a port, to the launcher's store or to one that rank 0 makes.

        Raises:
            RanksApart: the store or another rank was not there within five minutes.
        """
        self.place = place
        self._num_said = 0
        try:
            store = self._open()
            self._round = _new_round(store, place) if place.rank == 0 else _welcome(store, place)
        except (RuntimeError, OSError) as error:
            raise RanksApart(f"rank {place.rank} does not meet the others: {error}") from error
        self._store = PrefixStore(self._round, store)

    def connect(self) -> Store:
        """One more connection: a store serves one caller at a time, and one may wait for long."""
        return PrefixStore(self._round, self._open())

    def _open(self) -> Store:
        place = self.place
        if place.file is not None:
            store: Store = FileStore(str(place.file), place.world_size)
        else:
            # The launcher's own rule of who makes the store. One process may make it twice: they are then one.
            stores = rendezvous(
                f"tcp://{_bracketed(place.host)}:{place.port}",
                rank=place.rank,
                world_size=place.world_size,
                timeout=_CONNECT,
            )
            store = next(stores)[0]
        return PrefixStore(_PREFIX, store)

    def say(self, config: str) -> None:
        """Tell the other ranks what to train."""
        self._store.set(f"config/{self._num_said}", config)
        self._num_said += 1

    def hear(self) -> str:
        """What rank 0 says is to be trained; empty when nothing is any more."""
        key = f"config/{self._num_said}"
        self._store.wait([key], _FOREVER)
        self._num_said += 1
        return bytes(self._store.get(key)).decode()

    def end(self) -> None:
        """Tell the others that all is done, and wait a little for them, as the store may end with this process."""
        self.say("")
        others = [f"heard/{rank}" for rank in range(1, self.place.world_size)]
        # What is late sees the store gone.
        with contextlib.suppress(RuntimeError):
            self._store.wait(others, _FAREWELL)

    def note_end(self) -> None:
        """Tell rank 0 that this rank knows of the end."""
        self._store.set(f"heard/{self.place.rank}", "")

    def join(self, *, device: str) -> Collectives:
        """Make the process group; every rank calls it once.

        Raises:
            RanksApart: another one did not come.
        """
        try:
            return Collectives(place=self.place, store=self._store, device=device)
        except RuntimeError as error:
            raise RanksApart(f"rank {self.place.rank} cannot join the others: {error}") from error


def _new_round(store: Store, place: Place) -> str:
    name = secrets.token_hex(8)
    deadline = time.monotonic() + _CONNECT.total_seconds()
    missing = set(range(1, place.world_size))
    seen: dict[int, bytes] = {}
    while missing:
        for rank in sorted(missing):
            if not store.check([f"hello/{rank}"]):
                continue
            word = bytes(store.get(f"hello/{rank}"))
            if seen.get(rank) != word:
                # The first may be of a process that has ended.
                seen[rank] = word
                store.set(f"welcome/{rank}/{word.decode()}", name)
            if store.check([f"{name}/here/{rank}"]):
                missing.remove(rank)
        if time.monotonic() > deadline:
            raise RuntimeError(f"nothing is heard of rank {min(missing)}")
        time.sleep(_POLL_S)
    return name


def _welcome(store: Store, place: Place) -> str:
    word = secrets.token_hex(8)
    store.set(f"hello/{place.rank}", word)
    key = f"welcome/{place.rank}/{word}"
    store.wait([key], _CONNECT)
    name = bytes(store.get(key)).decode()
    store.set(f"{name}/here/{place.rank}", "")
    return name


def check_alike(ranks: Collectives, *, model_dir: str, device: str) -> None:
    """See that every rank has its device and the same releases, and every machine the same bytes of the model.

    A rank reads its own pieces from the directory of its machine: with other bytes there, the trained model would be a
    mixture of two. On one machine the directory is one, and is not read for this.

    Raises:
        ConfigError: on all ranks; names the first of those that differ from rank 0.
    """
    releases = {
        "heterorl": heterorl.__version__,
        "torch": str(torch.__version__),
        "python": ".".join(platform.python_version_tuple()[:2]),
    }
    place = ranks.place
    digest = ""
    if place.is_first_here and place.local_world_size < place.world_size:
        try:
            digest = model_digest(model_dir)
        except (OSError, ValueError) as error:
            digest = f"cannot be read: {error}"
    own = [releases, digest, missing_device(device, place)]
    rows = [json.loads(row) for row in ranks.all_gather_bytes(json.dumps(own).encode())]
    for row in rows:
        if row[2]:
            raise ConfigError("backend.device", row[2], action="start as many processes of a machine as it has GPUs")
    others = [rank for rank, row in enumerate(rows) if row[0] != rows[0][0]]
    if others:
        problem = f"rank 0 has {rows[0][0]}, rank {others[0]} has {rows[others[0]][0]}"
        raise ConfigError("backend.kind", problem, action="install the same releases on every machine")
    others = [rank for rank, row in enumerate(rows) if row[1] and row[1] != rows[0][1]]
    if others:
        problem = f"{model_dir} of rank {others[0]} is not that of rank 0: {rows[others[0]][1]}, not {rows[0][1]}"
        raise ConfigError("model_dir", problem, action="copy the directory of rank 0 to every machine")


def model_digest(model_dir: str) -> str:
    """Blake3 over the configuration and the weights of a model, as files; of all cores of the machine.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    directory = Path(model_dir)
    # Of a hub id, transformers has found these in its cache, and its revision decides the rest.
    own = [directory / "config.json"] if directory.is_dir() else []
    paths = own + weight_files(model_dir)
    if not paths:
        raise FileNotFoundError(f"{model_dir} has no safetensors")
    for path in paths:
        hasher.update(f"{path.name}\n{path.stat().st_size}\n".encode())
        hasher.update_mmap(os.fspath(path))
    return f"blake3 {hasher.hexdigest()[:16]}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
