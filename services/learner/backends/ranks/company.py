"""One rank's company: it meets the others, watches them from then on, joins them once, and leaves with all in order."""

from __future__ import annotations

import os
import threading

import torch

from heterorl.learner.backends.ranks.alike import check_alike, packages_of
from heterorl.learner.backends.ranks.collectives import Collectives
from heterorl.learner.backends.ranks.meeting import Meeting, RanksApart
from heterorl.learner.backends.ranks.place import Place
from heterorl.learner.backends.ranks.rounds import CONNECT
from heterorl.learner.backends.ranks.watch import Watch, end_process
from heterorl.learner.config import LearnerConfig
from heterorl.learner.watchdog import Watchdog

MEETING_S = 2 * CONNECT.total_seconds()
"""A process that has not met the others after so many seconds ends, also where the store does not answer."""


class Company:
    """The ranks as one of them has them."""

    def __init__(self, place: Place, *, timeout_s: float = 60.0) -> None:
        """Meet; those of several machines are watched from here on, those of one watch each other's processes.

        Args:
            place: this rank's.
            timeout_s: how long a rank may be silent; all take what rank 0 says.

        Raises:
            RanksApart: the others cannot be reached.
            ConfigError: on all ranks: one has another release of heterorl.
        """
        is_launched = place.file is None
        problem = RanksApart(f"rank {place.rank} has not met the others in {MEETING_S:g} s")
        deadline = threading.Timer(MEETING_S, end_process, [problem])
        deadline.daemon = True
        if is_launched:
            deadline.start()
        try:
            self.meeting = Meeting(place, timeout_s=timeout_s)
        finally:
            deadline.cancel()
        self._ranks: Collectives | None = None
        self._watch: Watch | None = None
        if is_launched and place.world_size > 1:
            timeout_s = self.meeting.timeout_s
            watchdog = Watchdog(1.25 * timeout_s)
            self._watch = Watch(self.meeting.connect(), self.meeting.place, timeout_s=timeout_s, watchdog=watchdog)

    @property
    def ranks(self) -> Collectives:
        """The process group; there is one after `join`."""
        assert self._ranks is not None, "it was joined"
        return self._ranks

    def join(self, config: LearnerConfig) -> Collectives:
        """The process group for a configuration, which is that of rank 0; made at the first call.

        Raises:
            RanksApart: a rank did not come.
            ConfigError: a rank has no such device, other releases, or its machine another model.
        """
        options, place = config.backend, self.meeting.place
        # All cores for every rank would be threads that wait for each other.
        torch.set_num_threads(options.threads or max(1, (os.cpu_count() or 1) // place.local_world_size))
        device = "cuda" if options.device.startswith("cuda") else "cpu"
        if self._ranks is None:
            self._ranks = self.meeting.join(device=device)
        check_alike(self._ranks, model_dir=config.model_dir, device=device, packages=packages_of(options))
        return self._ranks

    def leave(self) -> None:
        """End in order; all ranks are out of all collective operations, and rank 0 has said or heard the end."""
        if self._watch is not None:
            self._watch.close()
        if self._ranks is not None:
            self._ranks.leave()
        if self.meeting.place.rank:
            self.meeting.note_end()
