"""What the ranks of one learner say to each other: bytes and plain tensors over gloo, no pickle.

A rank that fails alone inside collective operations can tell nobody. What needs no other rank is therefore made before
them, and a word of each rank stands between (`make_together`).

Guarantees: waiting for a command may take for ever, anything else may not; a rank that dies ends the waits of the
others with an error, because its sockets close. Everything here runs on the CPU: gathering weights takes no memory of
an accelerator.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from heterorl.common.errors import HeterorlError, OperatorError
from heterorl.common.model.model_directory import first_line
from heterorl.learner.backends.ranks.rank_env import RankEnv

ResultT = TypeVar("ResultT")

_FOREVER = datetime.timedelta(days=365)
OPERATION_TIMEOUT = datetime.timedelta(minutes=30)
"""Of one collective operation inside a step."""


class Collectives:
    """The process group of one learner's ranks; all of them call the same methods in the same order."""

    def __init__(self, *, rank_env: RankEnv, store: Store, device: str) -> None:
        """Join the others."""
        self.rank_env = rank_env
        self.rank, self.world_size = rank_env.rank, rank_env.world_size
        if rank_env.file is not None:
            # What DeepSpeed reads, and what a launcher would have set. Nothing listens at that port: the group below
            # exists before DeepSpeed asks. No port is opened but those of gloo on loopback.
            os.environ.update(
                RANK=str(rank_env.rank),
                LOCAL_RANK=str(rank_env.local_rank),
                WORLD_SIZE=str(rank_env.world_size),
                LOCAL_WORLD_SIZE=str(rank_env.local_world_size),
            )
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
            os.environ.setdefault("MASTER_PORT", "1")
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        if device != "cpu" and rank_env.local_rank < torch.cuda.device_count():
            # NCCL takes the device that is current where it is told none. One that is missing is told of later.
            torch.cuda.set_device(rank_env.local_rank)
        dist.init_process_group(
            backend, store=store, rank=rank_env.rank, world_size=rank_env.world_size, timeout=OPERATION_TIMEOUT
        )
        self._control = dist.new_group(backend="gloo", timeout=_FOREVER)
        self.aside = Aside(dist.new_group(backend="gloo", timeout=_FOREVER))
        """For one thread of each rank that does not take part in what the others do."""

    @property
    def are_on_one_machine(self) -> bool:
        """Whether all ranks share one machine's memory of files."""
        return self.rank_env.local_world_size == self.world_size

    def broadcast_bytes(self, data: bytes = b"") -> bytes:
        """Rank 0's bytes, on every rank."""
        size = torch.tensor([len(data)])
        dist.broadcast(size, src=0, group=self._control)
        buffer = torch.empty(int(size), dtype=torch.uint8)
        if self.rank == 0 and data:
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if buffer.numel():
            dist.broadcast(buffer, src=0, group=self._control)
        return buffer.numpy().tobytes()

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, by rank, on every rank."""
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self._control)
        longest = max(int(size) for size in sizes)
        own = torch.zeros(max(1, longest), dtype=torch.uint8)
        if data:
            own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        everyone = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(everyone, own, group=self._control)
        return [part.numpy()[: int(size)].tobytes() for part, size in zip(everyone, sizes, strict=True)]

    def broadcast(self, values: torch.Tensor) -> None:
        """Overwrite `values`, on the CPU, with those of rank 0."""
        dist.broadcast(values, src=0, group=self._control)

    def send(self, values: torch.Tensor, *, rank: int = 0) -> None:
        """Send to a rank, which receives from this one."""
        dist.send(values, dst=rank, group=self._control)

    def receive(self, values: torch.Tensor, *, rank: int) -> None:
        """Fill `values` with what `rank` sends to this one."""
        dist.recv(values, src=rank, group=self._control)

    def exchange(self, sent: torch.Tensor, sent_sizes: list[int], received_sizes: list[int]) -> torch.Tensor:
        """Bytes to each rank, by rank, and those that each sends to this one, by rank."""
        received = torch.empty(sum(received_sizes), dtype=torch.uint8)
        dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=self._control)
        return received

    def all_agree(self, is_fine: bool) -> bool:
        """Whether it is fine on every rank."""
        verdict = torch.tensor([int(is_fine)])
        dist.all_reduce(verdict, op=dist.ReduceOp.MIN, group=self._control)
        return bool(verdict)

    def leave(self) -> None:
        """End the group."""
        dist.destroy_process_group()


class Aside:
    """A way from rank to rank on which nobody waits but the two."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def send(self, values: torch.Tensor, *, rank: int) -> None:
        """Send values on the CPU to a rank, which receives them from this one."""
        dist.send(values, dst=rank, group=self._group)

    def receive(self, values: torch.Tensor, *, rank: int) -> None:
        """Fill `values` with what `rank` sends to this one."""
        dist.recv(values, src=rank, group=self._group)

    def send_bytes(self, data: bytes, *, rank: int) -> None:
        """Send at least one byte to a rank, which calls `receive_bytes`."""
        self.send(torch.tensor([len(data)]), rank=rank)
        self.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), rank=rank)

    def receive_bytes(self, *, rank: int) -> bytes:
        """What `rank` sends to this one by `send_bytes`."""
        size = torch.empty(1, dtype=torch.int64)
        self.receive(size, rank=rank)
        data = torch.empty(int(size), dtype=torch.uint8)
        self.receive(data, rank=rank)
        return data.numpy().tobytes()


class RanksDiffer(OperatorError):
    """A rank met an error that rank 0 did not."""

    action = "see its log above; the learner starts again from the newest checkpoint"
    exit_code = 1


class MetByAll(HeterorlError):
    """What rank 0 has met or heard of too, as have all: it tells its caller, and this rank waits for what is next."""


def make_together(make: Callable[[], ResultT], ranks: Collectives) -> ResultT:
    """What this rank makes by itself, when all have made theirs; all ranks call.

    Raises:
        Exception: on rank 0: its own error; there is one on all, where ranks make the same.
        RanksDiffer: on rank 0: of another rank alone.
        MetByAll: on the others, of any rank's error.
    """
    problem: Exception | None = None
    try:
        made = make()
    except Exception as error:  # noqa: BLE001 - raised below, when all know of it
        problem = error
    if ranks.all_agree(problem is None):
        return made
    words = ranks.all_gather_bytes(b"" if problem is None else first_line(problem).encode())
    number, word = next((number, word.decode()) for number, word in enumerate(words) if word)
    if ranks.rank:
        raise MetByAll(f"rank {number}: {word}") from problem
    raise problem or RanksDiffer(f"rank {number} has met what rank 0 has not: {word}")


def rank_device(kind: str, rank_env: RankEnv) -> torch.device:
    """`cpu`, or `cuda:LOCAL_RANK`."""
    return torch.device("cpu" if kind == "cpu" else f"cuda:{rank_env.local_rank}")


def missing_device(kind: str, rank_env: RankEnv) -> str:
    """What is wrong with it; empty where nothing is."""
    if kind == "cpu" or rank_env.local_rank < torch.cuda.device_count():
        return ""
    return (
        f"rank {rank_env.rank} has no {rank_device(kind, rank_env)}: its machine shows {torch.cuda.device_count()} GPUs"
    )
