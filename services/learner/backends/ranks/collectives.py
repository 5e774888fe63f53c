"""Collective operations of one learner's ranks over gloo.

A rank that fails by itself inside a collective operation cannot tell the others. Work that needs no other rank is
therefore done before it, and all ranks exchange a result in between (`make_together`).

Guarantees: a dead rank ends the waits of the others with an error, because its sockets close. Everything here runs on
the CPU, so gathering weights takes no memory of an accelerator.

Waits have no limit. If a rank hangs, heartbeats end all processes.
"""

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
"""Limit of one collective operation of the engine, inside a step."""


class Messages:
    """Messages between two ranks of a group; values are on the CPU."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def send(self, values: torch.Tensor, *, rank: int = 0) -> None:
        dist.send(values, dst=rank, group=self._group)

    def receive(self, values: torch.Tensor, *, rank: int) -> None:
        dist.recv(values, src=rank, group=self._group)

    def send_bytes(self, data: bytes, *, rank: int) -> None:
        """Send at least one byte to a rank, which calls `receive_bytes`."""
        self.send(torch.tensor([len(data)]), rank=rank)
        self.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), rank=rank)

    def receive_bytes(self, *, rank: int) -> bytes:
        size = torch.empty(1, dtype=torch.int64)
        self.receive(size, rank=rank)
        data = torch.empty(int(size), dtype=torch.uint8)
        self.receive(data, rank=rank)
        return data.numpy().tobytes()


class Collectives(Messages):
    """The process group of one learner's ranks.
    All of them call the same methods in the same order."""

    def __init__(self, *, rank_env: RankEnv, store: Store, device: str) -> None:
        self.rank_env = rank_env
        self.rank, self.world_size = rank_env.rank, rank_env.world_size
        if rank_env.file is not None:
            # DeepSpeed reads what a launcher would set. That port stays closed: the group below
            # exists before DeepSpeed asks. Only gloo opens ports, on loopback.
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
            # NCCL takes the current device. `check_alike` reports a missing one.
            torch.cuda.set_device(rank_env.local_rank)
        dist.init_process_group(
            backend, store=store, rank=rank_env.rank, world_size=rank_env.world_size, timeout=OPERATION_TIMEOUT
        )
        super().__init__(dist.new_group(backend="gloo", timeout=_FOREVER))
        self.aside = Messages(dist.new_group(backend="gloo", timeout=_FOREVER))
        """For one thread of each rank, apart from the operations of the others."""

    @property
    def are_on_one_machine(self) -> bool:
        return self.rank_env.local_world_size == self.world_size

    def broadcast_bytes(self, data: bytes = b"") -> bytes:
        """Rank 0's bytes, on every rank."""
        size = torch.tensor([len(data)])
        dist.broadcast(size, src=0, group=self._group)
        buffer = torch.empty(int(size), dtype=torch.uint8)
        if self.rank == 0 and data:
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if buffer.numel():
            dist.broadcast(buffer, src=0, group=self._group)
        return buffer.numpy().tobytes()

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, by rank, on every rank."""
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self._group)
        longest = max(int(size) for size in sizes)
        own = torch.zeros(max(1, longest), dtype=torch.uint8)
        if data:
            own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        everyone = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(everyone, own, group=self._group)
        return [part.numpy()[: int(size)].tobytes() for part, size in zip(everyone, sizes, strict=True)]

    def broadcast(self, values: torch.Tensor) -> None:
        """Overwrite `values`, on the CPU, with rank 0's."""
        dist.broadcast(values, src=0, group=self._group)

    def exchange(self, sent: torch.Tensor, sent_sizes: list[int], received_sizes: list[int]) -> torch.Tensor:
        """Exchange bytes with each rank, in the order of ranks."""
        received = torch.empty(sum(received_sizes), dtype=torch.uint8)
        dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=self._group)
        return received

    def all_agree(self, is_fine: bool) -> bool:
        """Whether `is_fine` is true on every rank."""
        verdict = torch.tensor([int(is_fine)])
        dist.all_reduce(verdict, op=dist.ReduceOp.MIN, group=self._group)
        return bool(verdict)

    def leave(self) -> None:
        dist.destroy_process_group()


class RanksDiffer(OperatorError):
    """A rank met an error that rank 0 did not."""

    action = "see its log above; the learner starts again from the newest checkpoint"
    exit_code = 1


class MetByAll(HeterorlError):
    """An error that all ranks know of.
    Rank 0 raises it to its caller, and this rank waits for the next command."""


def make_together(make: Callable[[], ResultT], ranks: Collectives) -> ResultT:
    """The result of `make` on this rank, once all ranks have succeeded.

    Raises:
        Exception: on rank 0: its own error.
        RanksDiffer: on rank 0: the error of another rank only.
        MetByAll: on the others, for any rank's error.
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
    """An error text where this rank's device is missing; else empty."""
    if kind == "cpu" or rank_env.local_rank < torch.cuda.device_count():
        return ""
    return (
        f"rank {rank_env.rank} has no {rank_device(kind, rank_env)}: its machine shows {torch.cuda.device_count()} GPUs"
    )
