"""Membership of one rank: meet, compare, join, leave.

The ranks meet at a store of torch.distributed.

    round                   name of the newest round
    hello/R                 a random word of rank R's newest process
    welcome/R/WORD          rank 0 has read it, and names the round
    ROUND/here/R/WORD       rank R's machine, and its release of heterorl
    ROUND/whole             all machines and releases, by rank, and the timeout of a silent rank
    ROUND/config/N          the N-th configuration that rank 0 sends; empty: the end
    ROUND/heard/R           rank R has read the end, or that releases differ
    ROUND/beat/R            see `heartbeats`

The store may hold keys of dead processes, since a launcher may restart ranks one by one. Rank 0 therefore reads all
words until the last rank is in the round, and a rank enters every round that it is welcomed to.

Guarantees: a difference of one rank (code, custom loss, packages, devices, bytes of the model) is refused on all ranks,
under its key, before anything is built. The rendezvous compares releases of heterorl earlier, since another release may
not read rank 0's configuration; here the code is compared, since two checkouts may be of one release.
"""

import contextlib
import dataclasses
import datetime
import inspect
import json
import os
import platform
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import blake3
import torch
from torch.distributed import (  # type: ignore[attr-defined]
    FileStore,
    PrefixStore,
    Store,  # type: ignore[attr-defined]
    rendezvous,
)

import heterorl
from heterorl.common.errors import ConfigError, OperatorError
from heterorl.learner.backends.ranks.collectives import Collectives, RanksDiffer, missing_device
from heterorl.learner.backends.ranks.heartbeats import BeatFiles, Heartbeats, Watchdog, end_process
from heterorl.learner.backends.ranks.rank_env import RankEnv
from heterorl.learner.backends.tensor_file import weight_files
from heterorl.learner.learner_config import LearnerConfig
from heterorl.learner.loss.custom import KEY as LOSS_KEY
from heterorl.learner.loss.custom import load_loss
from heterorl.learner.loss.loss_config import CustomLossConfig, LossConfig
from heterorl.learner.train.backend_config import BackendConfig

CONNECT = datetime.timedelta(minutes=5)
"""Time a rank waits for rank 0, and then for all others."""
POLL_S = 0.05
_NEWEST = "round"
_FAREWELL = datetime.timedelta(seconds=10)
_PREFIX = "heterorl"
MEETING_S = 2 * CONNECT.total_seconds()
"""A rank that has not met the others after this many seconds ends, also where the store does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The facts that all ranks of a round know."""

    name: str
    hosts: tuple[str, ...]
    """Machine names, by rank."""
    timeout_s: float
    """Time after which a silent rank counts as lost."""
    releases: tuple[str, ...]
    """Releases of heterorl, by rank."""


def open_round(store: Store, rank_env: RankEnv, *, timeout_s: float) -> Round:
    """Open a round as rank 0, and wait for every rank.

    Raises RuntimeError: a rank is missing after five minutes, or the store is gone.
    """
    name = secrets.token_hex(8)
    store.set(_NEWEST, name)
    words: dict[int, str] = {}
    here = {0: (socket.gethostname(), heterorl.__version__)}
    deadline = time.monotonic() + CONNECT.total_seconds()
    while True:
        for rank in range(1, rank_env.world_size):
            word = read(store, f"hello/{rank}")
            if word is None:
                continue
            if words.get(rank) != word:
                # The word before may be of a dead process.
                words[rank] = word
                here.pop(rank, None)
                store.set(f"welcome/{rank}/{word}", name)
            stated = read(store, f"{name}/here/{rank}/{word}")
            if stated is not None:
                host, release = json.loads(stated)
                here[rank] = host, release
        missing = set(range(rank_env.world_size)) - here.keys()
        if not missing:
            break
        if time.monotonic() > deadline:
            raise RuntimeError(f"nothing is heard of rank {min(missing)}")
        _pause()
    hosts, releases = zip(*(here[rank] for rank in sorted(here)), strict=True)
    store.set(f"{name}/whole", json.dumps([hosts, releases, timeout_s]))
    return Round(name=name, hosts=hosts, timeout_s=timeout_s, releases=releases)


def enter_round(store: Store, rank_env: RankEnv) -> Round:
    """Enter the newest round as another rank, and wait for all.

    Raises RuntimeError: rank 0 does not answer within five minutes, or another rank is missing after five more.
    """
    word = secrets.token_hex(8)
    store.set(f"hello/{rank_env.rank}", word)
    name = ""
    deadline = time.monotonic() + CONNECT.total_seconds()
    while True:
        welcome = read(store, f"welcome/{rank_env.rank}/{word}")
        if welcome is not None and welcome != name:
            # Also after a restart of rank 0.
            name = welcome
            here = json.dumps([socket.gethostname(), heterorl.__version__])
            store.set(f"{name}/here/{rank_env.rank}/{word}", here)
            deadline = time.monotonic() + CONNECT.total_seconds()
        told = read(store, f"{name}/whole") if name else None
        if told is not None and is_newest(store, name):
            hosts, releases, timeout_s = json.loads(told)
            return Round(name=name, hosts=tuple(hosts), timeout_s=timeout_s, releases=tuple(releases))
        if time.monotonic() > deadline:
            raise RuntimeError("rank 0 waits for another one" if name else "nothing is heard of rank 0")
        _pause()


def _pause() -> None:
    """Wait between two reads: the store cannot wait for a change."""
    time.sleep(POLL_S)  # noqa: TID251


def is_newest(store: Store, name: str) -> bool:
    """Whether rank 0 has opened no later round."""
    return read(store, _NEWEST) == name


def read(store: Store, key: str) -> str | None:
    """The value of a key; None if unset, where `get` would wait."""
    return bytes(store.get(key)).decode() if store.check([key]) else None


class RanksApart(OperatorError):
    """The ranks did not find each other."""

    action = "see that MASTER_ADDR and MASTER_PORT can be reached from every machine, and that all of them were started"


class Rendezvous:
    """One rank's connection to the store."""

    def __init__(self, rank_env: RankEnv, *, timeout_s: float = 60.0) -> None:
        """Connect, and enter a round.
        `timeout_s` is rank 0's limit for a silent rank; the others take it over.

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
            # The store may end with this process; the others must have read the releases.
            self._await_heard()
        problem = f"heterorl {releases[0]} at rank 0, {releases[differing[0]]} at rank {differing[0]}"
        raise ConfigError("backend.kind", problem, action="install the same release on every machine")

    def connect(self) -> Store | BeatFiles:
        """Another connection, for heartbeats: a store serves one caller at a time."""
        if self._rank_env.file is not None:
            return BeatFiles(self._rank_env.file.parent)
        return PrefixStore(self._round, self._open())

    def _open(self) -> Store:
        rank_env = self._rank_env
        if rank_env.file is not None:
            store: Store = FileStore(str(rank_env.file), rank_env.world_size)
        else:
            # The launcher's rule decides who makes the store. Two of one process are one store.
            host = f"[{rank_env.host}]" if ":" in rank_env.host else rank_env.host
            stores = rendezvous(
                f"tcp://{host}:{rank_env.port}", rank=rank_env.rank, world_size=rank_env.world_size, timeout=CONNECT
            )
            store = next(stores)[0]
        return PrefixStore(_PREFIX, store)

    def say(self, config: str) -> None:
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
        """Send the end, and wait a little for the others.
        The store may end with this process."""
        self.say("")
        self._await_heard()

    def _await_heard(self) -> None:
        others = [f"heard/{rank}" for rank in range(1, self.rank_env.world_size)]
        # A late rank finds the store gone.
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


def check_alike(ranks: Collectives, *, model_dir: str, device: str, packages: Sequence[str], loss: LossConfig) -> None:
    """Check that ranks have their devices, the same code, loss and model.

    A rank reads its pieces from its machine's directory: other bytes there would mix two models. On one machine the
    directory is not read for this. All ranks call.

    Raises ConfigError: on all ranks; names the first rank that differs from rank 0.
    """
    releases = releases_of(packages)
    rank_env = ranks.rank_env
    digest = ""
    # The first rank of each machine reports for it.
    if rank_env.local_rank == 0 and not ranks.are_on_one_machine:
        try:
            digest = model_digest(model_dir)
        except (OSError, ValueError) as error:
            digest = f"cannot be read: {error}"
    own = [releases, digest, missing_device(device, rank_env), loss_digest(loss)]
    rows = [json.loads(row) for row in ranks.all_gather_bytes(json.dumps(own).encode())]
    for row in rows:
        if row[2]:
            raise ConfigError("backend.device", row[2], action="start as many processes of a machine as it has GPUs")
    for rank, (others, *_) in enumerate(rows):
        differing = [name for name, release in rows[0][0].items() if others.get(name) != release]
        if differing:
            first = rows[0][0]
            problem = "; ".join(
                f"{name} {first[name]} at rank 0, {others.get(name, 'none')} at rank {rank}" for name in differing
            )
            raise ConfigError("backend.kind", problem, action="install the same code on every machine")
    for place, key, what in ((1, "model_dir", model_dir), (3, LOSS_KEY, "its file")):
        others = [rank for rank, row in enumerate(rows) if row[place] and row[place] != rows[0][place]]
        if others:
            first, other = rows[0][place], rows[others[0]][place]
            problem = f"{what} of rank {others[0]} differs from rank 0's: {other}, not {first}"
            raise ConfigError(key, problem, action=f"copy {what} from rank 0 to every machine")


def packages_of(config: BackendConfig) -> list[str]:
    """Distributions that a backend computes with, apart from torch."""
    found = ["transformers"]
    if config.kind == "deepspeed":
        found.append("deepspeed")
    if config.liger:
        found.append("liger-kernel")
    if config.attn_implementation == "flash_attention_2":
        found.append("flash-attn")
    return found


def releases_of(packages: Sequence[str]) -> dict[str, str]:
    """Installed releases, found without an import of the packages."""
    found = {
        "code of heterorl": code_digest(Path(heterorl.__file__).parent),
        "torch": str(torch.__version__),
        "python": ".".join(platform.python_version_tuple()[:2]),
    }
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def code_digest(package: Path) -> str:
    """Blake3 over names and content of modules that a rank computes with."""
    hasher = blake3.blake3()
    for path in sorted(path for part in ("common", "learner") for path in (package / part).rglob("*.py")):
        content = path.read_bytes()
        hasher.update(f"{path.relative_to(package).as_posix()}\n{len(content)}\n".encode())
        hasher.update(content)
    return f"blake3 {hasher.hexdigest()[:16]}"


def model_digest(model_dir: str) -> str:
    """Blake3 over a model's configuration and weights, as files.
    Uses all cores.

    Raises OSError, ValueError: it cannot be read.
    """
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    directory = Path(model_dir)
    # Files of a hub id are in transformers' cache; its revision decides the rest.
    own = [directory / "config.json"] if directory.is_dir() else []
    paths = own + weight_files(model_dir)
    if not paths:
        raise FileNotFoundError(f"{model_dir} has no safetensors")
    for path in paths:
        hasher.update(f"{path.name}\n{path.stat().st_size}\n".encode())
        hasher.update_mmap(os.fspath(path))
    return f"blake3 {hasher.hexdigest()[:16]}"


def loss_digest(loss: LossConfig) -> str:
    """Blake3 of a custom loss's file; empty for other kinds."""
    if not isinstance(loss, CustomLossConfig):
        return ""
    try:
        path = inspect.getsourcefile(inspect.unwrap(load_loss(loss).function))
        return f"blake3 {blake3.blake3(Path(path or '').read_bytes()).hexdigest()[:16]}"
    except (ConfigError, OSError, TypeError) as error:
        return f"cannot be read: {error}"


class RankGroup:
    """One rank's connection to the others."""

    def __init__(self, rank_env: RankEnv, *, timeout_s: float = 60.0) -> None:
        """Meet the others; start heartbeats.

        `timeout_s` is how long a rank may be silent; all ranks take rank 0's value.

        Raises:
            RanksApart: the others cannot be reached.
            ConfigError: on all ranks: one has another release of heterorl.
        """
        problem = RanksApart(f"rank {rank_env.rank} has not met the others in {MEETING_S:g} s")
        deadline = threading.Timer(MEETING_S, end_process, [problem])
        deadline.daemon = True
        deadline.start()
        try:
            self.rendezvous = Rendezvous(rank_env, timeout_s=timeout_s)
        finally:
            deadline.cancel()
        self._ranks: Collectives | None = None
        self._heartbeats: Heartbeats | None = None
        if rank_env.world_size > 1:
            timeout_s = self.rendezvous.timeout_s
            watchdog = Watchdog(1.25 * timeout_s)
            self._heartbeats = Heartbeats(
                self.rendezvous.connect(), self.rendezvous.rank_env, timeout_s=timeout_s, watchdog=watchdog
            )

    @property
    def ranks(self) -> Collectives:
        assert self._ranks is not None, "it was joined"
        return self._ranks

    def join(self, config: LearnerConfig) -> Collectives:
        """The process group for rank 0's configuration; made at the first call.

        Raises:
            RanksApart: a rank did not come.
            ConfigError: a rank lacks its device, has other releases, or its machine has another model.
        """
        options, rank_env = config.backend, self.rendezvous.rank_env
        # All cores for every rank would oversubscribe them.
        torch.set_num_threads(options.threads or max(1, (os.cpu_count() or 1) // rank_env.local_world_size))
        device = "cuda" if options.device.startswith("cuda") else "cpu"
        if self._ranks is None:
            self._ranks = self.rendezvous.join(device=device)
        check_alike(
            self._ranks, model_dir=config.model_dir, device=device, packages=packages_of(options), loss=config.loss
        )
        return self._ranks

    def leave(self) -> None:
        """Leave in order, once no rank is in a collective operation.
        Rank 0 has sent the end before."""
        if self._heartbeats is not None:
            self._heartbeats.close()
        if self._ranks is not None:
            self._ranks.leave()
        if self.rendezvous.rank_env.rank:
            self.rendezvous.note_end()
