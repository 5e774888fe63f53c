"""A round of a learner's ranks: who of them lives now, told by keys of a store that may hold what dead ones wrote.

    round                   the newest round's name
    hello/R                 rank R's newest process is there, by a word that it made up
    welcome/R/WORD          rank 0 has seen it, and names the round
    ROUND/release/R/WORD    rank R has seen that, and names its release of heterorl
    ROUND/here/R/WORD       after it: rank R names its machine
    ROUND/releases          every rank's release, by rank
    ROUND/whole             after it: all newest processes are here: their machines, and how long a rank may be silent

A launcher may start the ranks again one by one. Rank 0 looks at all words until the last rank is here, so a process
that was started again takes the place of the one before; a rank goes into every round that it is welcomed to.
"""

from __future__ import annotations

import datetime
import json
import secrets
import socket
import time
from dataclasses import dataclass

from torch.distributed import Store  # type: ignore[attr-defined]

import heterorl
from heterorl.learner.backends.ranks.place import Place

CONNECT = datetime.timedelta(minutes=5)
"""How long a rank waits to be seen by rank 0, and then for all others to be there."""
POLL_S = 0.05
_NEWEST = "round"


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What all ranks of a round know."""

    name: str
    hosts: tuple[str, ...]
    """Name of each rank's machine, by rank."""
    timeout_s: float
    """How long a rank may be silent."""
    releases: tuple[str, ...]
    """Each rank's of heterorl, by rank; empty of one that does not say it, as earlier ones do not."""


def open_round(store: Store, place: Place, *, timeout_s: float) -> Round:
    """Rank 0's side: begin one, and return when every rank is in it.

    Raises:
        RuntimeError: one is not there within five minutes, or the store is gone.
    """
    name = secrets.token_hex(8)
    store.set(_NEWEST, name)
    words: dict[int, str] = {}
    hosts = {0: socket.gethostname()}
    releases = {0: heterorl.__version__}
    deadline = time.monotonic() + CONNECT.total_seconds()
    while True:
        for rank in range(1, place.world_size):
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
        missing = set(range(place.world_size)) - hosts.keys()
        if not missing:
            break
        if time.monotonic() > deadline:
            raise RuntimeError(f"nothing is heard of rank {min(missing)}")
        time.sleep(POLL_S)  # noqa: TID251 - a store cannot wait for a key that changes
    whole = Round(
        name=name,
        hosts=tuple(hosts[rank] for rank in sorted(hosts)),
        timeout_s=timeout_s,
        releases=tuple(releases[rank] for rank in sorted(hosts)),
    )
    store.set(f"{name}/releases", json.dumps(whole.releases))
    store.set(f"{name}/whole", json.dumps([whole.hosts, whole.timeout_s]))
    return whole


def enter_round(store: Store, place: Place) -> Round:
    """The side of another rank: return when all are in the round that this one was welcomed to last.

    Raises:
        RuntimeError: rank 0 has not seen this one within five minutes, or another one did not come within five more.
    """
    word = secrets.token_hex(8)
    store.set(f"hello/{place.rank}", word)
    name = ""
    deadline = time.monotonic() + CONNECT.total_seconds()
    while True:
        welcome = read(store, f"welcome/{place.rank}/{word}")
        if welcome is not None and welcome != name:
            # Also when rank 0 was started again meanwhile.
            name = welcome
            store.set(f"{name}/release/{place.rank}/{word}", heterorl.__version__)
            store.set(f"{name}/here/{place.rank}/{word}", socket.gethostname())
            deadline = time.monotonic() + CONNECT.total_seconds()
        told = read(store, f"{name}/whole") if name else None
        if told is not None and is_newest(store, name):
            hosts, timeout_s = json.loads(told)
            stated = read(store, f"{name}/releases")
            # A rank 0 of an earlier release says none.
            releases = json.loads(stated) if stated else ["", *[heterorl.__version__] * (place.world_size - 1)]
            return Round(name=name, hosts=tuple(hosts), timeout_s=timeout_s, releases=tuple(releases))
        if time.monotonic() > deadline:
            raise RuntimeError("rank 0 waits for another one" if name else "nothing is heard of rank 0")
        time.sleep(POLL_S)  # noqa: TID251 - a store cannot wait for a key that changes


def is_newest(store: Store, name: str) -> bool:
    """Whether rank 0 has begun no other round."""
    return read(store, _NEWEST) == name


def read(store: Store, key: str) -> str | None:
    """What a key has; None where nobody has set it, which `get` would wait for."""
    return bytes(store.get(key)).decode() if store.check([key]) else None
