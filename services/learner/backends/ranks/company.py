"""One rank's company: it meets the others, joins them once, and watches them until all leave in order."""

from __future__ import annotations

import os

import torch

from heterorl.learner.backends.ranks.collectives import Collectives
from heterorl.learner.backends.ranks.meeting import Meeting, check_alike
from heterorl.learner.backends.ranks.place import Place
from heterorl.learner.backends.ranks.watch import Watch
from heterorl.learner.config import LearnerConfig
from heterorl.learner.watchdog import Watchdog


class Company:
    """The ranks as one of them has them."""

    def __init__(self, place: Place) -> None:
        """Meet.

        Raises:
            RanksApart: the others cannot be reached.
        """
        self.meeting = Meeting(place)
        self._ranks: Collectives | None = None
        self._watch: Watch | None = None

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
            if place.file is None and place.world_size > 1 and options.kind != "torch":
                # Those of one machine watch each other's processes.
                timeout_s = options.rank_timeout_s
                watchdog = Watchdog(1.25 * timeout_s)
                self._watch = Watch(self.meeting.connect(), place, timeout_s=timeout_s, watchdog=watchdog)
        check_alike(self._ranks, model_dir=config.model_dir, device=device)
        return self._ranks

    def leave(self) -> None:
        """End in order; all ranks are out of all collective operations, and rank 0 has said or heard the end."""
        if self._watch is not None:
            self._watch.close()
        if self._ranks is not None:
            self._ranks.leave()
        if self.meeting.place.rank:
            self.meeting.note_end()
