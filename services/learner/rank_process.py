"""The process of a rank other than rank 0.

`ranks.local_ranks` or torchrun starts it.

Guarantees: it obeys rank 0, reads no configuration of its own, talks to no coordinator, and ends when rank 0 does. An
error that rank 0 does not meet ends it after `rank_timeout_s`, and then the others. It ignores signals that stop a
service, which reach all processes of a terminal or unit: rank 0 ends it in order.
"""

import argparse
import logging
import os
import signal
import sys
import threading
from pathlib import Path

from heterorl.common.errors import HeterorlError
from heterorl.common.process import logs
from heterorl.common.rpc.transport_options import keep_freed_frames
from heterorl.learner.backends.ranks.rank_env import RankEnv, local_rank_env

_LOG = logging.getLogger(__name__)
EXIT_CODE = 1
"""Exit code of a rank that has lost the others; a launcher starts all of them again."""


def main() -> None:
    """Follow the learner that started this process, until its pipe closes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--rendezvous", type=Path, required=True)
    arguments = parser.parse_args()
    # Before the slow imports: rank 0 may end at any moment, and the thread sees it.
    threading.Thread(target=_end_with_input, daemon=True).start()
    logs.configure_as_parent()
    rank_env = local_rank_env(arguments.rank, num_ranks=arguments.world_size, file=arguments.rendezvous)
    sys.exit(follow(rank_env))


def follow(rank_env: RankEnv) -> int:
    """Follow rank 0 through one backend after another; returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # As rank 0 does: otherwise a rank keeps 1.5 times the memory of freed blocks.
    keep_freed_frames()
    from heterorl.learner.backends.ranks.rank_group import RankGroup
    from heterorl.learner.learner_config import LearnerConfig
    from heterorl.learner.learner_parts import build_divided

    rank_group = RankGroup(rank_env)
    patience_s: float | None = None
    try:
        while text := rank_group.rendezvous.hear(within_s=patience_s):
            config = LearnerConfig.of_text(text)
            patience_s = None
            try:
                build_divided(config, rank_group.join(config)).follow()
            except HeterorlError as error:
                _LOG.warning("rank %d waits for rank 0, which has the same error: %s", rank_env.rank, error)
                # Rank 0 meets the same, and ends or sends a configuration; otherwise it waits for this rank.
                patience_s = rank_group.rendezvous.timeout_s
    except Exception as error:  # noqa: BLE001 - the others must not wait for this rank
        # Mostly of torch: a rank is gone, and its connection.
        own = None if isinstance(error, HeterorlError | RuntimeError) else error
        _LOG.error("rank %d ends: %s", rank_env.rank, (str(error).splitlines() or [repr(error)])[0], exc_info=own)
        logging.shutdown()
        # The process group can no longer be left in order.
        os._exit(EXIT_CODE)
    rank_group.leave()
    return 0


def _end_with_input() -> None:
    while sys.stdin.readline():
        pass
    # The main thread may be in an operation that cannot be interrupted.
    logging.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
