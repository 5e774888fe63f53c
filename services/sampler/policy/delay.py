"""How far behind a sampler is made to be: delay models for experiments and for what a real link does not do itself.

Two meanings. `transit`: every version becomes visible D after its publication, every group arrives D after its
generation. `refresh_interval` (the paper's): when a drawn interval D has passed, the newest version is taken; groups
are not held. Intervals follow each other from the first version on, whether or not anybody asks when one ends. D is
drawn per version, per group or per interval, from the sampler's own seed and that number alone.

D counts seconds (divided by `time_scale`, so that 1800 s can be shown in a minute) or versions. In versions, only
weights are held: a group held for versions that only groups can produce would wait for itself. `sawtooth` and
`uniform_lag` say for each head how many versions the one in use is behind it.
"""

from __future__ import annotations

import math

from heterorl.sampler.policy.delay_models import (
    DelayConfig,
    DrawnDelay,
    LagDelay,
    NoDelay,
    draw,
    upper_end,
)

MAX_SEEN = 100_000
"""Versions on their way at once, as far as they are told; more than any delay holds at a version a second."""
MIN_INTERVAL_S = 0.01
"""Shortest refresh interval, real seconds: an interval of nothing would expire without end."""


def max_delay_versions(config: DelayConfig) -> int:
    """The largest version lag that the delay itself causes; 0 where it counts seconds."""
    if isinstance(config, NoDelay) or config.unit == "seconds":
        return 0
    return math.ceil(upper_end(config))


def max_delay_s(config: DelayConfig) -> float:
    """Longest that the delay keeps a version and its groups from the coordinator, there and back, real seconds."""
    if isinstance(config, NoDelay) or config.unit == "versions":
        return 0.0
    num_ways = 2 if config.semantics == "transit" else 1
    return num_ways * upper_end(config) / config.time_scale


def group_delay_s(config: DelayConfig, *, seed: int, sequence: int) -> float:
    """How long a group is held before it is pushed, real seconds."""
    if isinstance(config, NoDelay | LagDelay) or config.semantics != "transit" or config.unit != "seconds":
        return 0.0
    return draw(config, seed=seed, stream="group", index=sequence) / config.time_scale


def max_group_delay_s(config: DelayConfig) -> float:
    """The longest that any group is held, real seconds."""
    if isinstance(config, NoDelay) or config.semantics != "transit" or config.unit != "seconds":
        return 0.0
    return upper_end(config) / config.time_scale


def version_lags(config: DelayConfig, *, seed: int, count: int) -> list[int]:
    """How many versions a sampler is behind at heads 0, 1, ... count - 1, each of which it hears of; a pure function.

    Args:
        config: a delay in versions, or none.
        seed: the sampler's.
        count: heads.

    Raises:
        ValueError: the delay counts seconds, so the lag depends on when versions are made.
    """
    if not isinstance(config, NoDelay) and config.unit == "seconds":
        raise ValueError("a delay in seconds has no lag in versions of its own")
    visibility, current, lags = Visibility(config, seed=seed), -1, []
    for head in range(count):
        visibility.see(head, 0.0)
        current, _ = visibility.target(0.0, current=current)
        lags.append(head - current)
    return lags


class Visibility:
    """Which version a sampler may use at an instant; fed with the heads it hears of."""

    def __init__(self, config: DelayConfig, *, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._head = -1
        self._seen: dict[int, float] = {}
        self._refreshes = 0
        self._last_refresh: tuple[int, float] | None = None
        self._lag = (0, 0)
        """A head that was asked about and the lag there."""

    def see(self, version: int, now: float) -> None:
        """Note that `version` is the head since `now` (monotonic seconds)."""
        if version > self._head:
            self._head = version
            if not isinstance(self._config, NoDelay) and self._config.unit == "seconds":
                self._seen[version] = now
                if len(self._seen) > MAX_SEEN:
                    del self._seen[next(iter(self._seen))]

    def target(self, now: float, *, current: int) -> tuple[int, float | None]:
        """The version to use and the instant at which the answer may change by time alone (None: only by a new head).

        The first version is taken at once: a sampler that joins starts from what it can get.
        """
        config = self._config
        if self._head < 0 or isinstance(config, NoDelay):
            return self._head, None
        if isinstance(config, LagDelay):
            return max(current, self._head - self._lag_at(config, self._head)), None
        if config.semantics == "refresh_interval":
            return self._refreshed(config, now, current)
        if config.unit == "versions":
            return self._transit_versions(config, current), None
        return self._transit_seconds(config, now, current)

    def _lag_at(self, config: LagDelay, head: int) -> int:
        version, lag = self._lag
        for later in range(version + 1, head + 1):
            lag = config.lag_after(lag, seed=self._seed, version=later)
        self._lag = (head, lag)
        return lag

    def _transit_versions(self, config: DrawnDelay, current: int) -> int:
        reach = max_delay_versions(config)
        for version in range(self._head, max(current, self._head - reach, 0), -1):
            if self._head - version >= draw(config, seed=self._seed, stream="version", index=version):
                return version
        return max(current, self._head - reach, 0)

    def _transit_seconds(self, config: DrawnDelay, now: float, current: int) -> tuple[int, float | None]:
        if current < 0:
            return self._head, None
        arrivals = {
            version: seen + draw(config, seed=self._seed, stream="version", index=version) / config.time_scale
            for version, seen in self._seen.items()
            if version > current
        }
        self._seen = {version: self._seen[version] for version in arrivals}
        arrived = [version for version, at in arrivals.items() if at <= now]
        waiting = [at for at in arrivals.values() if at > now]
        return max(arrived, default=current), min(waiting, default=None)

    def _refreshed(self, config: DrawnDelay, now: float, current: int) -> tuple[int, float | None]:
        if current < 0 or self._last_refresh is None:
            self._last_refresh = (self._head, now)
            return self._head, None
        if config.unit == "seconds":
            return self._refreshed_seconds(config, *self._last_refresh, now)
        version, _ = self._last_refresh
        if self._head >= version + max(1.0, self._interval(config)):
            self._refreshes += 1
            self._last_refresh = (self._head, now)
        return self._last_refresh[0], None

    def _refreshed_seconds(self, config: DrawnDelay, version: int, at: float, now: float) -> tuple[int, float | None]:
        while (due := at + max(self._interval(config) / config.time_scale, MIN_INTERVAL_S)) <= now:
            # What was the newest when the interval ended, not what is the newest now.
            version = max((other for other, seen in self._seen.items() if seen <= due), default=version)
            at = due
            self._refreshes += 1
            self._seen = {other: seen for other, seen in self._seen.items() if other > version}
        self._last_refresh = (version, at)
        return version, due if self._head > version else None

    def _interval(self, config: DrawnDelay) -> float:
        return draw(config, seed=self._seed, stream="interval", index=self._refreshes)
