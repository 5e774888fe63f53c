"""Amounts with units, as people write and read them."""

from __future__ import annotations

import re

from heterorl.common.errors import ConfigError

_BITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def bits_per_s(text: str) -> float:
    """A link such as `1Gbit` or `300 Mbit/s`.

    Raises:
        ConfigError: it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)bit(?:/s)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ConfigError("--link", f"{text!r} is no speed", action="write it such as 1Gbit or 300Mbit")
    return float(match[1]) * _BITS[match[2].lower()]


def seconds(text: str) -> float:
    """A time such as `100ms` or `0.1s`.

    Raises:
        ConfigError: it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s)", text.strip())
    if match is None:
        raise ConfigError("--rtt", f"{text!r} is no time", action="write it such as 100ms")
    return float(match[1]) / (1000.0 if match[2] == "ms" else 1.0)


def size_words(num_bytes: float) -> str:
    """Bytes in three digits, such as `96.1 GB`."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if num_bytes >= unit:
            return f"{_digits(num_bytes / unit)} {name}"
    return f"{_digits(num_bytes / 1e3)} kB"


def rate_words(bits_per_s: float) -> str:
    """A line in three digits, such as `40.0 Mbit/s`."""
    for unit, name in ((1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if bits_per_s >= unit:
            return f"{_digits(bits_per_s / unit)} {name}"
    return f"{_digits(bits_per_s / 1e3)} kbit/s"


def time_words(duration_s: float) -> str:
    """Seconds in three digits, such as `12.3 s`; minutes from 600 s on."""
    if duration_s >= 600.0:
        return f"{_digits(duration_s / 60.0)} min"
    return f"{_digits(duration_s)} s" if duration_s >= 1.0 else f"{_digits(1000.0 * duration_s)} ms"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100.0 else f"{value:.1f}" if value >= 10.0 else f"{value:.2f}"
