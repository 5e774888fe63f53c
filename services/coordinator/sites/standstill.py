"""Says once that the run stands still, and once that it goes on; see heterorl.common.types.standstill."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from heterorl.common.types.standstill import describe

_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class Standstill:
    """What was said last; in memory, so that a coordinator that starts anew says it again."""

    is_told: bool = False

    def note(self, sites: tuple[str, ...]) -> None:
        """Tell a change; `sites` are those that keep the run, none when it goes on."""
        if bool(sites) != self.is_told:
            self.is_told = bool(sites)
            if sites:
                _LOG.error("%s", describe(sites))
            else:
                _LOG.warning("the run goes on: a site that answers is not in quarantine, or none answers, or it ends")
