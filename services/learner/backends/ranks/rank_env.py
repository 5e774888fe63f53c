"""A rank's number and address, from torchrun's environment variables.

    RANK, WORLD_SIZE                number of this rank, and of all ranks on all machines
    LOCAL_RANK, LOCAL_WORLD_SIZE    the same on this machine; LOCAL_RANK is the number of its GPU. Without
                                    LOCAL_WORLD_SIZE the rendezvous counts ranks whose machine has the same name
    MASTER_ADDR, MASTER_PORT        the store at which the ranks meet

Slurm, Kubernetes and Ray set the same names.

torchrun's agent cannot end its processes when it is killed itself: they would keep their GPUs and train on.
`end_with_agent` has the kernel do it, on Linux; elsewhere the service that started the agent ends the ranks.
"""

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
    """Number and address of one rank.

    Example: RankEnv(rank=5, local_rank=1, world_size=8, local_world_size=4, host="10.0.0.1", port=29500)
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    """0 where the launcher does not set it and the ranks have not met."""
    host: str = ""
    port: int = 0
    file: Path | None = None
    """Rendezvous of ranks that share a machine, in place of host and port; in a directory of the learner's own."""


def local_rank_env(rank: int, *, num_ranks: int, file: Path) -> RankEnv:
    """The environment of a rank that the learner itself started."""
    return RankEnv(rank=rank, local_rank=rank, world_size=num_ranks, local_world_size=num_ranks, file=file)


def rank_env_of(environment: Mapping[str, str]) -> RankEnv | None:
    """A launcher's environment; None where no launcher started this process.

    Raises ConfigError: a variable is missing, not a number, or contradicts another.
    """
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    rank, world_size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    local_rank = _number(environment, "LOCAL_RANK")
    # Not every launcher sets it.
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
        rank=rank, local_rank=local_rank, world_size=world_size, local_world_size=local_world_size, host=host, port=port
    )


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        problem = f"{text!r} is not a number" if text else "is not set, RANK and WORLD_SIZE are"
        raise ConfigError(name, problem, action=_ACTION)
    return int(text)


def end_with_agent(environment: Mapping[str, str]) -> bool:
    """Have the kernel end this process with its parent.

    Returns whether it will. Only under torchrun: any other parent may be a shell that is meant to end first.
    """
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in environment:
        return False
    # The parent is the thread that started this process, and torchrun's is its main thread.
    options = (_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    return int(ctypes.CDLL(None).prctl(*map(ctypes.c_ulong, options))) == 0
