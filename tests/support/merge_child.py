"""A coordinator that is killed in the middle of a composition.

python -m tests.support.merge_child DIRECTORY CHUNKS
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from heterorl.common.process.clock import SystemClock
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.payloads import delta_merger


async def main(directory: Path, num_chunks: int) -> None:
    real, left = delta_merger.compose, [num_chunks]

    def dying(*positional: Any, **named: Any) -> Any:
        def step() -> None:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1

        return real(*positional, **{**named, "on_chunk": step})

    delta_merger.compose = dying
    core = await Coordinator.open(CoordinatorConfig(data_dir=directory / "data"), SystemClock())
    await core.merger.run()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
