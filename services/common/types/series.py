"""Numbers of a process as one moment found them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """All numbers of one name; `labels` has each one's labels as they stand between the braces of the text format.

    Example:
        Series(name="heterorl_sampler_groups_total", labels=('outcome="pushed"',), values=(3.0,))
    """

    name: str
    labels: tuple[str, ...]
    values: tuple[float, ...]
