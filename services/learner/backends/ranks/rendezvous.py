"""Rendezvous of the ranks of one learner at a store of torch.distributed, before a process group exists.

    round                   name of the newest round
    hello/R                 a random word of rank R's newest process
    welcome/R/WORD          rank 0 has read it, and names the round
    ROUND/release/R/WORD    rank R's release of heterorl
    ROUND/here/R/WORD       then: the name of rank R's machine
    ROUND/releases          every rank's release, by rank
    ROUND/whole             then: all machines, and the timeout of a silent rank
    ROUND/config/N          the N-th configuration that rank 0 sends; empty: the end
    ROUND/heard/R           rank R has read the end, or that releases differ
    ROUND/beat/R            see `heartbeats`

The store may hold keys of dead processes, since a launcher may restart ranks one by one. Rank 0 therefore reads all
words until the last rank is in the round, and a rank enters every round that it is welcomed to.

Guarantees: all ranks train by the configuration of rank 0, bit for bit, and read it with the same release of heterorl.
No rank waits for a rank 0 that has ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed import (  # type: ignore[attr-defined]
    FileStore,
    PrefixStore,
    Store,  # type: ignore[attr-defined]
    rendezvous,
)

import heterorl
from heterorl.common.errors import ConfigError, OperatorError
from heterorl.learner.backends.ranks.collectives import Collectives, RanksDiffer
from heterorl.learner.backends.ranks.rank_env import RankEnv

CONNECT = datetime.timedelta(minutes=5)
"""Time a rank waits for rank 0, and then for all others."""
POLL_S = 0.05
_NEWEST = "round"
_FAREWELL = datetime.timedelta(seconds=10)
_PREFIX = "heterorl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What all ranks of a round know."""

    name: str
    hosts: tuple[str, ...]
    """Machine names, by rank."""
    timeout_s: float
    """Time after which a silent rank counts as lost."""
    releases: tuple[str, ...]
    """Releases of heterorl, by rank; empty for an early release that does not state one."""


def open_round(store: Store, rank_env: RankEnv, *, timeout_s: float) -> Round:
    """Open a round as rank 0, and return when every rank is in it.

    Raises:
        RuntimeError: a rank is missing after five minutes, or the store is gone.
    """
    name = secrets.token_hex(8)
    store.set(_NEWEST, name)
    words: dict[int, str] = {}
    hosts = {0: socket.gethostname()}
    releases = {0: heterorl.__version__}
    deadline = time.monotonic() + CONNECT.total_seconds()
    while True:
        for rank in range(1, rank_env.world_size):
            word = read(store, f"hello/{rank}")
            if word is None:
                continue
            if words.get(rank) != word:
                # The one before may be of a process that has ended.
                words[rank] = word
                hosts.pop(rank, None)
                store.set(f"welcome/{rank}/{word}", name)
            host = read(store, f"{name}/here/{rank}/{word}")
            if host is not None:
                hosts[rank] = host
                releases[rank] = read(store, f"{name}/release/{rank}/{word}") or ""
        missing = set(range(rank_env.world_size)) - hosts.keys()
        if not missing:
            break
        if time.monotonic() > deadline:
            raise RuntimeError(f"nothing is heard of rank {min(missing)}")
        _pause()
    whole = Round(
        name=name,
        hosts=tuple(hosts[rank] for rank in sorted(hosts)),
        timeout_s=timeout_s,
        releases=tuple(releases[rank] for rank in sorted(hosts)),
    )
    store.set(f"{name}/releases", json.dumps(whole.releases))
    store.set(f"{name}/whole", json.dumps([whole.hosts, whole.timeout_s]))
    return whole


def enter_round(store: Store, rank_env: RankEnv) -> Round:
    """Enter the newest round as another rank, and return when all ranks are in it.

    Raises:
        RuntimeError: rank 0 does not answer within five minutes, or another rank is missing after five more.
    """
    word = secrets.token_hex(8)
    store.set(f"hello/{rank_env.rank}", word)
    name = ""
    deadline = time.monotonic() + CONNECT.total_seconds()
    while True:
        welcome = read(store, f"welcome/{rank_env.rank}/{word}")
        if welcome is not None and welcome != name:
            # Also when rank 0 was started again meanwhile.
            name = welcome
            store.set(f"{name}/release/{rank_env.rank}/{word}", heterorl.__version__)
            store.set(f"{name}/here/{rank_env.rank}/{word}", socket.gethostname())
            deadline = time.monotonic() + CONNECT.total_seconds()
        told = read(store, f"{name}/whole") if name else None
        if told is not None and is_newest(store, name):
            hosts, timeout_s = json.loads(told)
            stated = read(store, f"{name}/releases")
            # A rank 0 of an earlier release says none.
            releases = json.loads(stated) if stated else ["", *[heterorl.__version__] * (rank_env.world_size - 1)]
            return Round(name=name, hosts=tuple(hosts), timeout_s=timeout_s, releases=tuple(releases))
        if time.monotonic() > deadline:
            raise RuntimeError("rank 0 waits for another one" if name else "nothing is heard of rank 0")
        _pause()


def _pause() -> None:
    """Wait between two reads: the store cannot wait for a key to change."""
    time.sleep(POLL_S)  # noqa: TID251


def is_newest(store: Store, name: str) -> bool:
    """Whether rank 0 has opened no later round."""
    return read(store, _NEWEST) == name


def read(store: Store, key: str) -> str | None:
    """The value of a key; None where it is not set, for which `get` would wait."""
    return bytes(store.get(key)).decode() if store.check([key]) else None


class RanksApart(OperatorError):
    """The ranks did not find each other."""

    action = "see that MASTER_ADDR and MASTER_PORT can be reached from every machine, and that all of them were started"


class Rendezvous:
    """One rank's connection to the store."""

    def __init__(self, rank_env: RankEnv, *, timeout_s: float = 60.0) -> None:
        """Connect, and enter a round. `timeout_s` is rank 0's limit for a silent rank; the others take it over.

        Raises:
            RanksApart: the store or another rank was not there in time.
            ConfigError: on all ranks: one has another release of heterorl.
        """
        self._rank_env = rank_env
        self._num_said = 0
        try:
            self._root = self._open()
            if rank_env.rank == 0:
                met = open_round(self._root, rank_env, timeout_s=timeout_s)
            else:
                met = enter_round(self._root, rank_env)
        except (RuntimeError, OSError) as error:
            raise RanksApart(f"rank {rank_env.rank} does not meet the others: {error}") from error
        self._round = met.name
        self._store = PrefixStore(met.name, self._root)
        self.timeout_s = met.timeout_s
        """Time after which a silent rank counts as lost; the same on all ranks."""
        self.rank_env = rank_env
        if not rank_env.local_world_size:
            here = met.hosts.count(met.hosts[rank_env.rank])
            self.rank_env = dataclasses.replace(rank_env, local_world_size=here)
        self._check_releases(met.releases)

    def _check_releases(self, releases: Sequence[str]) -> None:
        differing = [rank for rank, release in enumerate(releases) if release != releases[0]]
        if not differing:
            return
        if self.rank_env.rank:
            with contextlib.suppress(RuntimeError):
                self.note_end()
        else:
            # The store may end with this process, and the others are to have read in it what is wrong.
            self._await_heard()
        first, other = (releases[rank] or "an unstated release" for rank in (0, differing[0]))
        problem = f"heterorl {first} at rank 0, {other} at rank {differing[0]}"
        raise ConfigError("backend.kind", problem, action="install the same release on every machine")

    def connect(self) -> Store:
        """Another connection: a store serves one caller at a time, and a caller may wait for long."""
        return PrefixStore(self._round, self._open())

    def _open(self) -> Store:
        rank_env = self._rank_env
        if rank_env.file is not None:
            store: Store = FileStore(str(rank_env.file), rank_env.world_size)
        else:
            # The launcher's own rule of who makes the store. One process may make it twice: they are then one.
            stores = rendezvous(
                f"tcp://{_bracketed(rank_env.host)}:{rank_env.port}",
                rank=rank_env.rank,
                world_size=rank_env.world_size,
                timeout=CONNECT,
            )
            store = next(stores)[0]
        return PrefixStore(_PREFIX, store)

    def say(self, config: str) -> None:
        """Send a configuration to the other ranks."""
        self._store.set(f"config/{self._num_said}", config)
        self._num_said += 1

    def hear(self, *, within_s: float | None = None) -> str:
        """The next configuration of rank 0; empty at the end.

        `within_s` limits the wait after an error that rank 0 should have met too.

        Raises:
            RanksApart: the store is gone, or rank 0 was restarted and opened another round.
            RanksDiffer: the time is over.
        """
        ends = None if within_s is None else time.monotonic() + within_s
        try:
            while (said := read(self._store, f"config/{self._num_said}")) is None:
                if not is_newest(self._root, self._round):
                    raise RanksApart(f"rank {self.rank_env.rank} is left behind: rank 0 was started again", action="")
                if ends is not None and time.monotonic() > ends:
                    raise RanksDiffer(
                        f"rank 0 has not ended by the error of rank {self.rank_env.rank} in {within_s:g} s"
                    )
                _pause()
        except (RuntimeError, OSError) as error:
            raise RanksApart(f"the store of the ranks is gone: {(str(error).splitlines() or ['?'])[0]}") from error
        self._num_said += 1
        return said

    def end(self) -> None:
        """Send the end, and wait a little for the others, as the store may end with this process."""
        self.say("")
        self._await_heard()

    def _await_heard(self) -> None:
        others = [f"heard/{rank}" for rank in range(1, self.rank_env.world_size)]
        # What is late sees the store gone.
        with contextlib.suppress(RuntimeError):
            self._store.wait(others, _FAREWELL)

    def note_end(self) -> None:
        """Tell rank 0 that this rank has read the end."""
        self._store.set(f"heard/{self.rank_env.rank}", "")

    def join(self, *, device: str) -> Collectives:
        """Make the process group; every rank calls it once."""
        try:
            return Collectives(rank_env=self.rank_env, store=self._store, device=device)
        except RuntimeError as error:
            raise RanksApart(f"rank {self.rank_env.rank} cannot join the others: {error}") from error


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
