"""Where the ranks of one learner meet: a store of torch.distributed, before there is a group and beside it.

    ROUND/config/N    what rank 0 says is to be trained, in the N-th place; empty: the end
    ROUND/heard/R     rank R has heard of the end, or of ranks with other releases
    ROUND/beat/R      see `watch`

Who is in a round, `rounds` decides. Guarantees: all ranks train by the configuration of rank 0, bit for bit; the others
need no file of it, and read it by the release of heterorl that wrote it. No rank waits for what a rank 0 that has ended
would have said.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import time
from collections.abc import Sequence

from torch.distributed import FileStore, PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from heterorl.common.errors import ConfigError, OperatorError
from heterorl.learner.backends.ranks.collectives import Collectives, RanksDiffer
from heterorl.learner.backends.ranks.place import Place
from heterorl.learner.backends.ranks.rounds import CONNECT, POLL_S, enter_round, is_newest, open_round, read

_FAREWELL = datetime.timedelta(seconds=10)
_PREFIX = "heterorl"


class RanksApart(OperatorError):
    """The ranks did not find each other."""

    action = "see that MASTER_ADDR and MASTER_PORT can be reached from every machine, and that all of them were started"


class Meeting:
    """One rank's way to the store, and over it to the others."""

    def __init__(self, place: Place, *, timeout_s: float = 60.0) -> None:
        """Connect; with a port, to the launcher's store or to one that rank 0 makes.

        Args:
            place: this rank's.
            timeout_s: how long a rank may be silent, as rank 0 says it.

        Raises:
            RanksApart: the store or another rank was not there in time.
            ConfigError: on all ranks: one has another release of heterorl, which may not read rank 0's configuration.
        """
        self._place = place
        self._num_said = 0
        try:
            self._root = self._open()
            if place.rank == 0:
                met = open_round(self._root, place, timeout_s=timeout_s)
            else:
                met = enter_round(self._root, place)
        except (RuntimeError, OSError) as error:
            raise RanksApart(f"rank {place.rank} does not meet the others: {error}") from error
        self._round = met.name
        self._store = PrefixStore(met.name, self._root)
        self.timeout_s = met.timeout_s
        """How long a rank may be silent; the same on all."""
        self.place = place
        if not place.local_world_size:
            here = met.hosts.count(met.hosts[place.rank])
            self.place = dataclasses.replace(place, local_world_size=here)
        self._check_releases(met.releases)

    def _check_releases(self, releases: Sequence[str]) -> None:
        differing = [rank for rank, release in enumerate(releases) if release != releases[0]]
        if not differing:
            return
        if self.place.rank:
            with contextlib.suppress(RuntimeError):
                self.note_end()
        else:
            # The store may end with this process, and the others are to have read in it what is wrong.
            self._await_heard()
        first, other = (releases[rank] or "an unstated release" for rank in (0, differing[0]))
        problem = f"heterorl {first} at rank 0, {other} at rank {differing[0]}"
        raise ConfigError("backend.kind", problem, action="install the same release on every machine")

    def connect(self) -> Store:
        """One more connection: a store serves one caller at a time, and one may wait for long."""
        return PrefixStore(self._round, self._open())

    def _open(self) -> Store:
        place = self._place
        if place.file is not None:
            store: Store = FileStore(str(place.file), place.world_size)
        else:
            # The launcher's own rule of who makes the store. One process may make it twice: they are then one.
            stores = rendezvous(
                f"tcp://{_bracketed(place.host)}:{place.port}",
                rank=place.rank,
                world_size=place.world_size,
                timeout=CONNECT,
            )
            store = next(stores)[0]
        return PrefixStore(_PREFIX, store)

    def say(self, config: str) -> None:
        """Tell the other ranks what to train."""
        self._store.set(f"config/{self._num_said}", config)
        self._num_said += 1

    def hear(self, *, within_s: float | None = None) -> str:
        """What rank 0 says is to be trained; empty when nothing is any more.

        Args:
            within_s: how long it may take, after an error that rank 0 should have met too.

        Raises:
            RanksApart: the store is gone, or rank 0 was started again and is in another round.
            RanksDiffer: the time is over.
        """
        ends = None if within_s is None else time.monotonic() + within_s
        try:
            while (said := read(self._store, f"config/{self._num_said}")) is None:
                if not is_newest(self._root, self._round):
                    raise RanksApart(f"rank {self.place.rank} is left behind: rank 0 was started again", action="")
                if ends is not None and time.monotonic() > ends:
                    raise RanksDiffer(f"rank 0 has not ended by the error of rank {self.place.rank} in {within_s:g} s")
                time.sleep(POLL_S)  # noqa: TID251 - a store cannot wait for a key that changes
        except (RuntimeError, OSError) as error:
            raise RanksApart(f"the store of the ranks is gone: {(str(error).splitlines() or ['?'])[0]}") from error
        self._num_said += 1
        return said

    def end(self) -> None:
        """Tell the others that all is done, and wait a little for them, as the store may end with this process."""
        self.say("")
        self._await_heard()

    def _await_heard(self) -> None:
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


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
