"""One rank's membership: it meets the others, compares itself with them, joins the process group and leaves it.

Guarantees: a difference of one rank (code, packages, devices, bytes of the model) is refused on all ranks, under its
key, before anything is built. The rendezvous compares releases of heterorl earlier, since another release may not read
rank 0's configuration; here the code is compared, since two checkouts may be of one release.
"""

from __future__ import annotations

import json
import os
import platform
import threading
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import blake3
import torch

import heterorl
from heterorl.common.errors import ConfigError
from heterorl.learner.backends.ranks.collectives import Collectives, missing_device
from heterorl.learner.backends.ranks.heartbeats import Heartbeats, Watchdog, end_process
from heterorl.learner.backends.ranks.rank_env import RankEnv
from heterorl.learner.backends.ranks.rendezvous import CONNECT, RanksApart, Rendezvous
from heterorl.learner.backends.tensor_file import weight_files
from heterorl.learner.config import LearnerConfig
from heterorl.learner.train.backend_config import BackendConfig

MEETING_S = 2 * CONNECT.total_seconds()
"""A rank that has not met the others after this many seconds ends, also where the store does not answer."""


def check_alike(ranks: Collectives, *, model_dir: str, device: str, packages: Sequence[str]) -> None:
    """Check that every rank has its device and the same code, and every machine the same bytes of the model.

    A rank reads its pieces from its machine's directory: other bytes there would mix two models. On one machine the
    directory is not read for this. All ranks call.

    Raises:
        ConfigError: on all ranks; names the first rank that differs from rank 0.
    """
    releases = releases_of(packages)
    rank_env = ranks.rank_env
    digest = ""
    if rank_env.is_first_here and not ranks.are_on_one_machine:
        try:
            digest = model_digest(model_dir)
        except (OSError, ValueError) as error:
            digest = f"cannot be read: {error}"
    own = [releases, digest, missing_device(device, rank_env)]
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
    others = [rank for rank, row in enumerate(rows) if row[1] and row[1] != rows[0][1]]
    if others:
        problem = f"{model_dir} of rank {others[0]} is not that of rank 0: {rows[others[0]][1]}, not {rows[0][1]}"
        raise ConfigError("model_dir", problem, action="copy the directory of rank 0 to every machine")


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
    """Installed releases; imports nothing."""
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
    """Blake3 over names and content of the modules of `common` and `learner`, which a rank computes with."""
    hasher = blake3.blake3()
    for path in sorted(path for part in ("common", "learner") for path in (package / part).rglob("*.py")):
        content = path.read_bytes()
        hasher.update(f"{path.relative_to(package).as_posix()}\n{len(content)}\n".encode())
        hasher.update(content)
    return f"blake3 {hasher.hexdigest()[:16]}"


def model_digest(model_dir: str) -> str:
    """Blake3 over configuration and weights of a model, as files; uses all cores.

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


class RankGroup:
    """One rank's connection to the others."""

    def __init__(self, rank_env: RankEnv, *, timeout_s: float = 60.0) -> None:
        """Meet the others; start heartbeats where a launcher started the ranks.

        `timeout_s` is how long a rank may be silent; all ranks take rank 0's value.

        Raises:
            RanksApart: the others cannot be reached.
            ConfigError: on all ranks: one has another release of heterorl.
        """
        is_launched = rank_env.file is None
        problem = RanksApart(f"rank {rank_env.rank} has not met the others in {MEETING_S:g} s")
        deadline = threading.Timer(MEETING_S, end_process, [problem])
        deadline.daemon = True
        if is_launched:
            deadline.start()
        try:
            self.rendezvous = Rendezvous(rank_env, timeout_s=timeout_s)
        finally:
            deadline.cancel()
        self._ranks: Collectives | None = None
        self._heartbeats: Heartbeats | None = None
        if is_launched and rank_env.world_size > 1:
            timeout_s = self.rendezvous.timeout_s
            watchdog = Watchdog(1.25 * timeout_s)
            self._heartbeats = Heartbeats(
                self.rendezvous.connect(), self.rendezvous.rank_env, timeout_s=timeout_s, watchdog=watchdog
            )

    @property
    def ranks(self) -> Collectives:
        """The process group; exists after `join`."""
        assert self._ranks is not None, "it was joined"
        return self._ranks

    def join(self, config: LearnerConfig) -> Collectives:
        """The process group for rank 0's configuration; made at the first call.

        Raises:
            RanksApart: a rank did not come.
            ConfigError: a rank lacks its device, has other releases, or its machine has another model.
        """
        options, rank_env = config.backend, self.rendezvous.rank_env
        # All cores for every rank would be threads that wait for each other.
        torch.set_num_threads(options.threads or max(1, (os.cpu_count() or 1) // rank_env.local_world_size))
        device = "cuda" if options.device.startswith("cuda") else "cpu"
        if self._ranks is None:
            self._ranks = self.rendezvous.join(device=device)
        check_alike(self._ranks, model_dir=config.model_dir, device=device, packages=packages_of(options))
        return self._ranks

    def leave(self) -> None:
        """Leave in order, once all ranks are out of collective operations and rank 0 has sent the end."""
        if self._heartbeats is not None:
            self._heartbeats.close()
        if self._ranks is not None:
            self._ranks.leave()
        if self.rendezvous.rank_env.rank:
            self.rendezvous.note_end()
