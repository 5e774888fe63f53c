"""Delay models: the lag of a sampler behind the head, for experiments.

`transit`: a version becomes visible D after its publication, a group arrives D after its generation.
`refresh_interval` (the paper's): each time an interval D ends, the sampler takes the newest version; groups are not
held. D is a function of the sampler's seed, a stream and the number of the version, group or interval.

D counts seconds (divided by `time_scale`) or versions. In versions only weights are held: a group that waits for
versions would wait for itself. `sawtooth` and `uniform_lag` give the lag for each head.

Between `low` and `high` are 99.5 % of a lognormal, Weibull or exponential distribution (0.25 % below, 0.25 % above);
draws are cut. From 60 to 1920 s: lognormal mu 5.827212514, sigma 0.617330640; Weibull k 2.244991927, lambda 864.888494.

A delay is clip(T - default, low, high) with T from the distribution. The published runs of arXiv 2508.17850 have
60/1920/60 and 400/3600/400: medians 279 and 800 s, where `default = 0` gives 339 and 1200.
"""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from statistics import NormalDist
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from heterorl.common.process.config_file import Config

_TAIL = 0.0025
_Z = NormalDist().inv_cdf(1.0 - _TAIL)
_LOW_HAZARD = -math.log1p(-_TAIL)
_HIGH_HAZARD = -math.log(_TAIL)
"""-log(1 - p) at the two ends of the interval, for Weibull and exponential quantiles."""
MAX_SEEN = 100_000
"""Versions in transit at once: more than any delay holds at a version a second."""
MAX_MISSED = 4096
"""Versions that one outage hides and that still arrive, the newest ones."""
MIN_INTERVAL_S = 0.01
"""Shortest refresh interval, real seconds: an interval of 0 would expire without end."""


class TimedDelay(Config):
    """Keys of every delay except none."""

    semantics: Literal["transit", "refresh_interval"] = "transit"
    """Versions and groups arrive late (`transit`), or the newest version is taken at intervals (`refresh_interval`)."""
    unit: Literal["seconds", "versions"] = "seconds"
    """Unit of the delay, `seconds` or `versions`."""
    time_scale: float = Field(default=1.0, gt=0)
    """Seconds of delay in one real second; 30 shows 1800 s in a minute."""


class NoDelay(Config):
    """No added delay."""

    kind: Literal["none"] = "none"


class FixedDelay(TimedDelay):
    """A constant delay."""

    kind: Literal["fixed"] = "fixed"
    value: float = Field(ge=0)
    """The delay."""


class _DrawnDelay(TimedDelay):
    """Keys of every random delay."""

    default: float = Field(default=0.0, ge=0)
    """Delay of the real link: subtracted from each draw, before the limits low and high."""
    low: float = Field(ge=0)
    """Lower end."""
    high: float = Field(gt=0)
    """Upper end."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.low < self.high:
            raise ValueError(f"low: {self.low:g} must be below high = {self.high:g}")
        return self

    @abstractmethod
    def quantile(self, uniform: float) -> float:
        """The distribution's delay at quantile `uniform`, before the cut."""


class UniformDelay(_DrawnDelay):
    """Uniform between low and high."""

    kind: Literal["uniform"] = "uniform"

    def quantile(self, uniform: float) -> float:
        return self.low + (self.high - self.low) * uniform


class LognormalDelay(_DrawnDelay):
    """exp(N(mu, sigma)), with 99.5 % of it between low and high."""

    kind: Literal["lognormal"] = "lognormal"
    low: float = Field(gt=0)
    """Lower end."""

    @property
    def mu(self) -> float:
        return (math.log(self.low) + math.log(self.high)) / 2

    @property
    def sigma(self) -> float:
        return (math.log(self.high) - math.log(self.low)) / (2 * _Z)

    def quantile(self, uniform: float) -> float:
        return math.exp(self.mu + self.sigma * NormalDist().inv_cdf(uniform))


class WeibullDelay(_DrawnDelay):
    """Survival exp(-(t / scale)^shape), with 99.5 % of it between low and high."""

    kind: Literal["weibull"] = "weibull"
    low: float = Field(gt=0)
    """Lower end."""

    @property
    def shape(self) -> float:
        return math.log(_HIGH_HAZARD / _LOW_HAZARD) / math.log(self.high / self.low)

    @property
    def scale(self) -> float:
        return self.high / float(_HIGH_HAZARD ** (1.0 / self.shape))

    def quantile(self, uniform: float) -> float:
        return float(self.scale * (-math.log1p(-uniform)) ** (1.0 / self.shape))


class ExponentialDelay(_DrawnDelay):
    """start plus an exponential, with 99.5 % of it between low and high."""

    kind: Literal["exponential"] = "exponential"

    @property
    def scale(self) -> float:
        return (self.high - self.low) / (_HIGH_HAZARD - _LOW_HAZARD)

    @property
    def start(self) -> float:
        return max(0.0, self.low - self.scale * _LOW_HAZARD)

    def quantile(self, uniform: float) -> float:
        return self.start - self.scale * math.log1p(-uniform)


class _LagDelay(TimedDelay):
    """Versions behind the head; the policy in use never goes back."""

    semantics: Literal["transit"] = "transit"
    unit: Literal["versions"] = "versions"
    high: int = Field(ge=1)
    """Largest lag, versions."""

    @abstractmethod
    def lag_after(self, lag: int, *, seed: int, version: int) -> int:
        """The lag at `version`, given the lag at the version before."""


class SawtoothDelay(_LagDelay):
    """A lag of the version modulo high + 1, equal at all samplers."""

    # The lag of a queue that takes the newest version first and then the oldest ones: 0 to 57, on average 26.5, in the
    # "max delay 64" log of arXiv 2508.17850.
    kind: Literal["sawtooth"] = "sawtooth"

    def lag_after(self, lag: int, *, seed: int, version: int) -> int:  # noqa: ARG002 - of every lag alike
        return version % (self.high + 1)


class UniformLagDelay(_LagDelay):
    """Each lag from 0 to high equally often; versions never go back."""

    kind: Literal["uniform_lag"] = "uniform_lag"

    def lag_after(self, lag: int, *, seed: int, version: int) -> int:
        # From a lag l < high to l + 1 with probability (l + 1) / (l + 2), else to a lag drawn evenly from 0 ... l. The
        # stationary distribution is uniform: the walk rises to j at the rate j / (j + 1), and falls to it at
        # 1 / (high + 1) plus the sum of 1 / ((l + 1) (l + 2)) over l = j ... high - 1, which is 1 / (j + 1).
        share = _uniform(seed, "lag", version)
        if lag < self.high:
            share *= lag + 2
            if share >= 1.0:
                return lag + 1
        return min(int(share * (lag + 1)), lag)


DrawnDelay = FixedDelay | UniformDelay | LognormalDelay | WeibullDelay | ExponentialDelay
LagDelay = SawtoothDelay | UniformLagDelay
DelayConfig = Annotated[NoDelay | DrawnDelay | LagDelay, Field(discriminator="kind")]


def draw(config: DrawnDelay, *, seed: int, stream: str, index: int) -> float:
    """Delay number `index` of a stream, in the config's unit; pure."""
    if isinstance(config, FixedDelay):
        return config.value
    value = config.quantile(_uniform(seed, stream, index))
    return min(max(value - config.default, config.low), config.high)


def _uniform(seed: int, stream: str, index: int) -> float:
    """A number strictly between 0 and 1."""
    digest = hashlib.blake2b(f"{seed}/{stream}/{index}".encode(), digest_size=8).digest()
    uniform = (int.from_bytes(digest, "little") + 0.5) / 2**64
    # The integer of all ones rounds to 1, where the quantile is infinite.
    return min(uniform, 1.0 - 2.0**-53)


def upper_end(config: DelayConfig) -> float:
    """Largest delay, in the config's unit; 0 for none."""
    if isinstance(config, NoDelay):
        return 0.0
    return config.value if isinstance(config, FixedDelay) else config.high


def max_delay_versions(config: DelayConfig) -> int:
    """Largest lag of the delay, versions; 0 if it counts seconds."""
    if isinstance(config, NoDelay) or config.unit == "seconds":
        return 0
    return math.ceil(upper_end(config))


def max_delay_s(config: DelayConfig) -> float:
    """Longest delay of a version and its groups together, real seconds."""
    if isinstance(config, NoDelay) or config.unit == "versions":
        return 0.0
    num_ways = 2 if config.semantics == "transit" else 1
    return num_ways * upper_end(config) / config.time_scale


def group_delay_s(config: DelayConfig, *, seed: int, sequence: int) -> float:
    """Seconds that a group is held before it is pushed."""
    if isinstance(config, NoDelay | LagDelay) or config.semantics != "transit" or config.unit != "seconds":
        return 0.0
    return draw(config, seed=seed, stream="group", index=sequence) / config.time_scale


def max_group_delay_s(config: DelayConfig) -> float:
    """Longest time that any group is held, real seconds."""
    if isinstance(config, NoDelay) or config.semantics != "transit" or config.unit != "seconds":
        return 0.0
    return upper_end(config) / config.time_scale


class Visibility:
    """The version that a sampler may use at an instant."""

    def __init__(self, config: DelayConfig, *, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._head, self._head_at = -1, 0.0
        self._seen: dict[int, float] = {}
        self._refreshes = 0
        self._last_refresh: tuple[int, float] | None = None
        self._lag = (0, 0)
        """The last head that was asked for, and its lag."""

    def see(self, version: int, now: float) -> None:
        """Note that `version` is the head since `now` (monotonic seconds)."""
        if version > self._head:
            before, since = self._head, min(self._head_at, now)
            self._head, self._head_at = version, now
            if isinstance(self._config, NoDelay) or self._config.unit != "seconds":
                return
            if before < 0 or self._config.semantics != "transit":
                before, since = version - 1, now
            # In an outage versions came that were not seen: they arrive in turn, as if published evenly.
            for missed in range(max(before + 1, version - MAX_MISSED), version + 1):
                self._seen[missed] = since + (now - since) * (missed - before) / (version - before)
                if len(self._seen) > MAX_SEEN:
                    del self._seen[next(iter(self._seen))]

    def target(self, now: float, *, current: int) -> tuple[int, float | None]:
        """The version to use, and when time can change it.

        The instant is None if only a new head can. The first version is taken at once: a sampler that joins starts with
        what it gets.
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
            # The newest version when the interval ended, not the newest now.
            version = max((other for other, seen in self._seen.items() if seen <= due), default=version)
            at = due
            self._refreshes += 1
            self._seen = {other: seen for other, seen in self._seen.items() if other > version}
        self._last_refresh = (version, at)
        return version, due if self._head > version else None

    def _interval(self, config: DrawnDelay) -> float:
        return draw(config, seed=self._seed, stream="interval", index=self._refreshes)
