"""Child processes of a learner that trains on several devices.

    rank 0      the learner itself; only it talks to the coordinator
    rank n      `heterorl.learner.rank_process`; it ends when its standard input closes, which any end of rank 0 does

On several machines a launcher starts the ranks; see `rank_env` and `heartbeats`.

Guarantees: no rank outlives another for long. A rank that ends too early ends the learner with exit code 1, because the
others may wait for it inside an uninterruptible operation; one that hangs does so by its heartbeats. A start resumes
from the checkpoint.
"""

import atexit
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from heterorl.common.errors import OperatorError
from heterorl.common.process.threads import how_it_ended, own_command
from heterorl.learner.backends.ranks.heartbeats import end_process
from heterorl.learner.backends.ranks.rank_env import local_rank_env

GRACE_S = 10.0
BLAME_S = 1.0
"""Time an error waits for the end of a rank that may be its cause."""


class RankFailed(OperatorError):
    """A rank ended too early; the others cannot go on without it."""

    action = "see its log above; start the learner again: it resumes from the newest checkpoint"

    def __init__(self, rank: int, code: int) -> None:
        super().__init__(f"rank {rank} {how_it_ended(code)}; all ranks are stopped")


class LocalRanks:
    """Ranks 1 to n - 1 as child processes."""

    def __init__(self, num_ranks: int, *, on_failure: Callable[[RankFailed], None] = end_process) -> None:
        """Start the children; they wait at the rendezvous for a configuration.

        `on_failure` is called in a thread when a child ends before `close`.
        """
        self.num_ranks = num_ranks
        self._directory = Path(tempfile.mkdtemp(prefix="heterorl-ranks-"))
        self.rank_env = local_rank_env(0, num_ranks=num_ranks, file=self._directory / "rendezvous")
        self._on_failure = on_failure
        self._is_closing = False
        self._has_ended = threading.Event()
        self._watchers: list[threading.Thread] = []
        self._children = [self._start(rank) for rank in range(1, num_ranks)]
        atexit.register(self._blame)

    def close(self) -> None:
        """End the children, which must be out of all collective operations."""
        self._is_closing = True
        atexit.unregister(self._blame)
        for child in self._children:
            assert child.stdin is not None, "it was made with a pipe"
            child.stdin.close()
        for child in self._children:
            try:
                child.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        command = own_command(
            "heterorl.learner.rank_process",
            "--rank", str(rank), "--world-size", str(self.num_ranks), "--rendezvous", str(self.rank_env.file),
        )  # fmt: skip
        child = subprocess.Popen(command, stdin=subprocess.PIPE)
        watcher = threading.Thread(target=self._watch_child, args=(rank, child), daemon=True, name=f"rank-{rank}")
        watcher.start()
        self._watchers.append(watcher)
        return child

    def _blame(self) -> None:
        """Let a rank's end be reported before its echo in this process."""
        if self._children:
            self._has_ended.wait(BLAME_S)
        for watcher, child in zip(self._watchers, self._children, strict=True):
            if child.poll() is not None:
                watcher.join(BLAME_S)
        self._is_closing = True

    def _watch_child(self, rank: int, child: subprocess.Popen[bytes]) -> None:
        code = child.wait()
        self._has_ended.set()
        if not self._is_closing:
            self._on_failure(RankFailed(rank, code))
