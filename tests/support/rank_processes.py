"""Processes that do `rank_jobs`: a learner's ranks, of one machine or under agents of torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from heterorl.learner.learner_config import LearnerConfig
from tests.support.ports import free_port


class Ranks:
    """The processes, from the test's side."""

    def __init__(
        self,
        num_ranks: int,
        *,
        num_nodes: int = 1,
        compiler: str = "",
        first_on_path: Path | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """Start them.

        Args:
            num_ranks: on all nodes together.
            num_nodes: with more than one, as many agents of torchrun start them, at loopback.
            compiler: what rank 0 compiles by, if not by torch's own.
            first_on_path: may have a `sitecustomize` for all of these processes.
            timeout_s: how long a rank may be silent.
        """
        self.num_ranks = num_ranks
        self._asked = 0
        path = os.pathsep.join([*([str(first_on_path)] if first_on_path else []), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path}
        own = ["-m", "tests.support.rank_jobs", str(num_ranks), str(timeout_s), *filter(None, [compiler])]
        commands = [[sys.executable, *own]]
        if num_nodes > 1:
            port = free_port()
            environment |= {"GLOO_SOCKET_IFNAME": "lo"}
            commands = [
                [*torchrun(node, num_nodes, port=port, num_processes=num_ranks // num_nodes), *own]
                for node in range(num_nodes)
            ]
        self.process, *self._others = [
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=None if number else subprocess.PIPE, text=True, env=environment
            )
            for number, command in enumerate(commands)
        ]

    def ask(self, config: LearnerConfig, operations: list[list[Any]]) -> Any:
        assert self.process.stdin
        assert self.process.stdout
        self._asked += 1
        self.process.stdin.write(json.dumps([self._asked, config.model_dump(mode="json"), operations]) + "\n")
        self.process.stdin.flush()
        while line := self.process.stdout.readline():
            # A test that was ended left its answer unread.
            if line.startswith(own := f"ANSWER {self._asked} "):
                return json.loads(line.removeprefix(own))
        raise AssertionError(f"the ranks ended with code {self.process.wait()}")

    def close(self) -> int:
        assert self.process.stdin
        assert self.process.stdout
        everyone = [self.process, *self._others]
        self.process.stdin.close()
        try:
            return max(abs(process.wait()) for process in everyone)
        finally:
            for process in everyone:
                process.kill()
                process.wait()
            for process in self._others:
                assert process.stdin
                process.stdin.close()
            self.process.stdout.close()


def torchrun(node: int, num_nodes: int, *, port: int, num_processes: int) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", str(num_nodes), "--node-rank", str(node),
        "--nproc-per-node", str(num_processes), "--master-addr", "127.0.0.1", "--master-port", str(port),
        "--monitor-interval", "0.2",
    ]  # fmt: skip
