"""Distributions of delay as configuration, and a draw that is a function of seed, stream and number alone.

Uniform, lognormal, Weibull and exponential delays are given by `low` and `high`, which hold 99.5 % of the distribution
(0.25 % lie below, 0.25 % above; draws are cut to the interval), or by their parameters, which say where the interval
is. From 60 to 1920 s: lognormal mu 5.827212514, sigma 0.617330640; Weibull k 2.244991927, lambda 864.888494.

A delay is clip(T - default, low, high) with T of the distribution. The published runs of arXiv 2508.17850 have
60/1920/60 and 400/3600/400: medians 279 and 800 s, where `default = 0` gives 339 and 1200.

A saw-tooth and a uniform lag say how many versions a sampler is behind at each version, not when one arrives.
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
