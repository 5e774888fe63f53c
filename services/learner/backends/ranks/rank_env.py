"""Where a process stands among the ranks of one learner, by the environment variables that torchrun sets.

    RANK, WORLD_SIZE                this one of so many, over all machines
    LOCAL_RANK, LOCAL_WORLD_SIZE    this one of so many on its machine; the number of its GPU. Without the second, the
                                    ranks count at their meeting whose machine has the same name
    MASTER_ADDR, MASTER_PORT        the store at which the ranks meet

Slurm, Kubernetes and Ray start programs with the same names. What else torch reads stays torch's: GLOO_SOCKET_IFNAME,
NCCL_SOCKET_IFNAME, TORCHELASTIC_USE_AGENT_STORE.

The agent of torchrun that is killed cannot end its processes: those of another machine than 0 would train on, and
nobody could stop them or start them again; a new agent would find its GPUs taken. `end_with_agent` has the kernel do
it, whatever the rank is inside of and even while it is stopped; the other ranks see its connections close. On Linux;
elsewhere what started the agent ends the rank.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from heterorl.common.errors import ConfigError

_ACTION = "start the learner by torchrun, or unset RANK and WORLD_SIZE and use --nproc"
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnv:
    """One rank's.

    Example: RankEnv(rank=5, local_rank=1, world_size=8, local_world_size=4, host="10.0.0.1", port=29500)
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    """0 where no launcher said it and the ranks have not met."""
    host: str = ""
    port: int = 0
    file: Path | None = None
    """Where the ranks of one machine meet instead of at a port; in a directory that is the learner's alone."""

    @property
    def is_first_here(self) -> bool:
        """Whether this rank speaks for its machine."""
        return self.local_rank == 0


def local_rank_env(rank: int, *, num_ranks: int, file: Path) -> RankEnv:
    """The place of a rank that the learner itself started, beside the others of one machine."""
    return RankEnv(rank=rank, local_rank=rank, world_size=num_ranks, local_world_size=num_ranks, file=file)


def rank_env_of(environment: Mapping[str, str]) -> RankEnv | None:
    """The place that a launcher gave this process; None where none did.

    Raises:
        ConfigError: a variable is missing, is no number, or contradicts another.
    """
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    rank, world_size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    local_rank = _number(environment, "LOCAL_RANK")
    # Not every launcher says how many there are here.
    local_world_size = _number(environment, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environment else 0
    port = _number(environment, "MASTER_PORT")
    for name, value, end in (
        ("RANK", rank, world_size),
        ("LOCAL_RANK", local_rank, local_world_size or world_size),
        ("LOCAL_WORLD_SIZE", local_world_size, world_size + 1),
        ("MASTER_PORT", port, 1 << 16),
    ):
        if not value < end:
            raise ConfigError(name, f"{value} is not below {end}", action=_ACTION)
    host = environment.get("MASTER_ADDR", "")
    if not host:
        raise ConfigError("MASTER_ADDR", "is not set, RANK and WORLD_SIZE are", action=_ACTION)
    return RankEnv(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        host=host,
        port=port,
    )


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        problem = f"{text!r} is not a number" if text else "is not set, RANK and WORLD_SIZE are"
        raise ConfigError(name, problem, action=_ACTION)
    return int(text)


def end_with_agent(environment: Mapping[str, str]) -> bool:
    """Have the kernel end this process when its parent ends; returns whether it will.

    Where torchrun did not start it nothing is asked for: the parent may be a shell that is meant to end first.
    """
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in environment:
        return False
    # The parent is the thread that started this process, and torchrun's is its main thread.
    options = (_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    return int(ctypes.CDLL(None).prctl(*map(ctypes.c_ulong, options))) == 0
