"""A rank of a learner other than rank 0: `python -m heterorl.learner.rank`, started by `local_ranks`.

Guarantees: it does what rank 0 says and nothing else, talks to no coordinator, and ends when rank 0 does. Signals that
stop a service reach all processes of a terminal or a unit; here they are ignored, because rank 0 ends in order.
"""

from __future__ import annotations

import argparse
import logging
import os
import queue
import signal
import sys
import threading
from pathlib import Path

from heterorl.common.errors import HeterorlError
from heterorl.common.process import logs


def main() -> None:
    """Follow rank 0 through one backend after another until its pipe closes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--rendezvous", type=Path, required=True)
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logs.configure_as_parent()
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    # Only now what takes seconds to load: rank 0 may end at any moment, and the thread sees it.
    from heterorl.learner.assembly import build_deepspeed, join_ranks
    from heterorl.learner.backends.zero.collectives import Collectives
    from heterorl.learner.config import LearnerConfig

    ranks: Collectives | None = None
    while True:
        config = LearnerConfig.model_validate_json(lines.get())
        if ranks is None:
            ranks = join_ranks(
                config, rank=arguments.rank, num_ranks=arguments.world_size, rendezvous=arguments.rendezvous
            )
        try:
            build_deepspeed(config, ranks).follow()
        except HeterorlError as error:
            # Rank 0 meets the same and says so; this one is then told what is next, or ended.
            logging.getLogger(__name__).warning("rank %d: %s", arguments.rank, error)


def _read(lines: queue.Queue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    # The main thread may be in an operation that nothing interrupts.
    logging.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
