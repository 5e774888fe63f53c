"""How far behind a sampler is made to be: delay models for experiments and for what a real link does not do itself.

Two meanings. `transit`: every version becomes visible D after its publication, every group arrives D after its
generation. `refresh_interval` (the paper's): when a drawn interval D has passed, the newest version is taken; groups
are not held. Intervals follow each other from the first version on, whether or not anybody asks when one ends. D is
drawn per version, per group or per interval: a function of the sampler's own seed, a stream and that number alone.

D counts seconds (divided by `time_scale`, so that 1800 s can be shown in a minute) or versions. In versions, only
weights are held: a group held for versions that only groups can produce would wait for itself. `sawtooth` and
`uniform_lag` say for each head how many versions the one in use is behind it.

Uniform, lognormal, Weibull and exponential delays are given by `low` and `high`, which hold 99.5 % of the distribution
(0.25 % lie below, 0.25 % above; draws are cut to the interval), or by their parameters, which say where the interval
is. From 60 to 1920 s: lognormal mu 5.827212514, sigma 0.617330640; Weibull k 2.244991927, lambda 864.888494.

A delay is clip(T - default, low, high) with T of the distribution. The published runs of arXiv 2508.17850 have
60/1920/60 and 400/3600/400: medians 279 and 800 s, where `default = 0` gives 339 and 1200.
"""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from statistics import NormalDist
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from heterorl.common.process.config import Config

_TAIL = 0.0025
_Z = NormalDist().inv_cdf(1.0 - _TAIL)
_LOW_HAZARD = -math.log1p(-_TAIL)
_HIGH_HAZARD = -math.log(_TAIL)
"""-log(1 - p) at the two ends, by which Weibull and exponential quantiles are written."""
MAX_SEEN = 100_000
"""Versions on their way at once, as far as they are told; more than any delay holds at a version a second."""
MIN_INTERVAL_S = 0.01
"""Shortest refresh interval, real seconds: an interval of nothing would expire without end."""


class TimedDelay(Config):
    """What every delay but none has."""

    semantics: Literal["transit", "refresh_interval"] = "transit"
    """`transit`: versions and groups arrive late; `refresh_interval`: the newest version is taken every so often."""
    unit: Literal["seconds", "versions"] = "seconds"
    """What the delay counts."""
    time_scale: float = Field(default=1.0, gt=0)
    """Seconds of delay shown as one second; 30 shows 1800 s in a minute."""


class NoDelay(Config):
    """The link's own delay and no other."""

    kind: Literal["none"] = "none"


class FixedDelay(TimedDelay):
    """Always the same delay."""

    kind: Literal["fixed"] = "fixed"
    value: float = Field(ge=0)
    """Delay, in the unit."""


class _DrawnDelay(TimedDelay):
    """What every delay has that is drawn at random."""

    default: float = Field(default=0.0, ge=0)
    """What is taken off every draw before it is cut to low and high, in the unit: what the link takes anyway."""


class _IntervalDelay(_DrawnDelay):
    """A distribution between two ends; see the module docstring."""

    parameters: ClassVar[tuple[str, str]]

    low: float = Field(ge=0)
    """Lower end of the interval, in the unit."""
    high: float = Field(gt=0)
    """Upper end of the interval, in the unit."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, table: Any) -> Any:
        """Compute the parameters from the interval, or the interval from the parameters."""
        if not isinstance(table, dict):
            return table
        names = cls.parameters
        has_interval = {"low", "high"} <= table.keys()
        has_parameters = set(names) <= table.keys()
        given = {key for key in ("low", "high", *names) if key in table}
        if not has_interval and not has_parameters:
            found = ", ".join(sorted(given)) or "none of them"
            raise ValueError(f"give low and high, or {names[0]} and {names[1]}; found {found}")
        if not all(isinstance(table[key], (int, float)) and not isinstance(table[key], bool) for key in given):
            return table  # the fields say what is wrong
        try:
            derived = cls._from_interval(table["low"], table["high"]) if has_interval else None
            if derived is None:
                low, high = cls._to_interval(*(table[name] for name in names))
                return {**table, "low": low, "high": high}
        except (ValueError, ZeroDivisionError, OverflowError) as error:
            raise ValueError("low must be above 0 and below high") from error
        for name, value in zip(names, derived, strict=True):
            if name in table and not math.isclose(table[name], value, rel_tol=1e-6):
                raise ValueError(f"{name} = {table[name]} contradicts low and high, which give {value:.6g}")
        return {**table, **dict(zip(names, derived, strict=True))}

    @model_validator(mode="after")
    def _ordered(self) -> _IntervalDelay:
        if not self.low < self.high:
            raise ValueError("low must be below high")
        return self

    @classmethod
    @abstractmethod
    def _from_interval(cls, low: float, high: float) -> tuple[float, ...]: ...

    @classmethod
    @abstractmethod
    def _to_interval(cls, first: float, second: float) -> tuple[float, float]: ...

    @abstractmethod
    def quantile(self, uniform: float) -> float:
        """The delay below which a share `uniform` of the distribution lies, before it is cut."""


class UniformDelay(_DrawnDelay):
    """Equally likely everywhere from low to high, which are its ends."""

    kind: Literal["uniform"] = "uniform"
    low: float = Field(ge=0)
    """Shortest delay, in the unit."""
    high: float = Field(gt=0)
    """Longest delay, in the unit."""

    @model_validator(mode="after")
    def _ordered(self) -> UniformDelay:
        if not self.low < self.high:
            raise ValueError("low must be below high")
        return self

    def quantile(self, uniform: float) -> float:
        """Linear."""
        return self.low + (self.high - self.low) * uniform


class LognormalDelay(_IntervalDelay):
    """exp(N(mu, sigma))."""

    kind: Literal["lognormal"] = "lognormal"
    parameters = ("mu", "sigma")
    mu: float
    """Mean of the logarithm."""
    sigma: float = Field(gt=0)
    """Standard deviation of the logarithm."""

    @classmethod
    def _from_interval(cls, low: float, high: float) -> tuple[float, ...]:
        return (math.log(low) + math.log(high)) / 2, (math.log(high) - math.log(low)) / (2 * _Z)

    @classmethod
    def _to_interval(cls, first: float, second: float) -> tuple[float, float]:
        return math.exp(first - _Z * second), math.exp(first + _Z * second)

    def quantile(self, uniform: float) -> float:
        """exp(mu + sigma z)."""
        return math.exp(self.mu + self.sigma * NormalDist().inv_cdf(uniform))


class WeibullDelay(_IntervalDelay):
    """Survival exp(-(t / scale)^shape)."""

    kind: Literal["weibull"] = "weibull"
    parameters = ("shape", "scale")
    shape: float = Field(gt=0)
    """Shape k; below 1 the tail is heavier than an exponential one."""
    scale: float = Field(gt=0)
    """lambda, in the unit."""

    @classmethod
    def _from_interval(cls, low: float, high: float) -> tuple[float, ...]:
        shape = math.log(_HIGH_HAZARD / _LOW_HAZARD) / math.log(high / low)
        return shape, high / _HIGH_HAZARD ** (1.0 / shape)

    @classmethod
    def _to_interval(cls, first: float, second: float) -> tuple[float, float]:
        return second * _LOW_HAZARD ** (1.0 / first), second * _HIGH_HAZARD ** (1.0 / first)

    def quantile(self, uniform: float) -> float:
        """scale (-log(1 - u))^(1 / shape)."""
        return float(self.scale * (-math.log1p(-uniform)) ** (1.0 / self.shape))


class ExponentialDelay(_IntervalDelay):
    """start plus an exponential of mean `scale`."""

    kind: Literal["exponential"] = "exponential"
    parameters = ("start", "scale")
    start: float = Field(ge=0)
    """Shortest delay, in the unit."""
    scale: float = Field(gt=0)
    """Mean beyond the start, in the unit."""

    @classmethod
    def _from_interval(cls, low: float, high: float) -> tuple[float, ...]:
        scale = (high - low) / (_HIGH_HAZARD - _LOW_HAZARD)
        return max(0.0, low - scale * _LOW_HAZARD), scale

    @classmethod
    def _to_interval(cls, first: float, second: float) -> tuple[float, float]:
        return first + second * _LOW_HAZARD, first + second * _HIGH_HAZARD

    def quantile(self, uniform: float) -> float:
        """start - scale log(1 - u)."""
        return self.start - self.scale * math.log1p(-uniform)


class _LagDelay(TimedDelay):
    """How many versions the newest one that may be used is behind; it never goes back to an older version."""

    semantics: Literal["transit"] = "transit"
    """The lag says which version is to be had; groups are not held."""
    unit: Literal["versions"] = "versions"
    """What the lag counts."""
    high: int = Field(ge=1)
    """Largest lag, versions."""

    @abstractmethod
    def lag_after(self, lag: int, *, seed: int, version: int) -> int:
        """The lag at a version, where that at the version before it is `lag`."""


class SawtoothDelay(_LagDelay):
    """0, 1, 2, ... high, 0, 1, ...: the lag at version v is v modulo high + 1, on average high / 2.

    A queue that takes the newest version first and then the oldest ones makes such a lag: 0 to 57, on average 26.5, in
    the log of arXiv 2508.17850 that is called "max delay 64". All samplers are in step, as in that log.
    """

    kind: Literal["sawtooth"] = "sawtooth"

    def lag_after(self, lag: int, *, seed: int, version: int) -> int:  # noqa: ARG002 - of every lag alike
        """One more, or none."""
        return version % (self.high + 1)


class UniformLagDelay(_LagDelay):
    """Every lag from 0 to high equally often, and the policy never an older one than before.

    From a lag l below `high` to l + 1 with probability (l + 1) / (l + 2), else, and always from `high`, to a lag drawn
    evenly from 0 ... l. Uniform is the stationary distribution: j is risen to at the rate j / (j + 1), and fallen to at
    1 / (high + 1) plus the sum of 1 / ((l + 1) (l + 2)) over l = j ... high - 1, which is 1 / (j + 1).
    """

    kind: Literal["uniform_lag"] = "uniform_lag"

    def lag_after(self, lag: int, *, seed: int, version: int) -> int:
        """One step of the walk."""
        share = _uniform(seed, "lag", version)
        if lag < self.high:
            share *= lag + 2
            if share >= 1.0:
                return lag + 1
        return min(int(share * (lag + 1)), lag)


RandomDelay = UniformDelay | LognormalDelay | WeibullDelay | ExponentialDelay
DrawnDelay = FixedDelay | RandomDelay
LagDelay = SawtoothDelay | UniformLagDelay
DelayConfig = Annotated[
    NoDelay
    | FixedDelay
    | UniformDelay
    | LognormalDelay
    | WeibullDelay
    | ExponentialDelay
    | SawtoothDelay
    | UniformLagDelay,
    Field(discriminator="kind"),
]


def draw(config: DrawnDelay, *, seed: int, stream: str, index: int) -> float:
    """The delay number `index` of a stream, in the config's unit; a function of its arguments alone."""
    if isinstance(config, FixedDelay):
        return config.value
    value = config.quantile(_uniform(seed, stream, index))
    return min(max(value - config.default, config.low), config.high)


def _uniform(seed: int, stream: str, index: int) -> float:
    """Evenly between 0 and 1, without either."""
    digest = hashlib.blake2b(f"{seed}/{stream}/{index}".encode(), digest_size=8).digest()
    uniform = (int.from_bytes(digest, "little") + 0.5) / 2**64
    # The integer of all ones rounds to 1, where the quantile is infinite.
    return min(uniform, 1.0 - 2.0**-53)


def upper_end(config: DelayConfig) -> float:
    """The largest delay, in the config's unit; 0 for none."""
    if isinstance(config, NoDelay):
        return 0.0
    return config.value if isinstance(config, FixedDelay) else config.high


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
    """How many versions a sampler is behind at heads 0, 1, ... count - 1, each of which it hears of. Pure.

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
