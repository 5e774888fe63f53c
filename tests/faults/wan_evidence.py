"""What a real Prometheus says about an outage: numbers by the dashboards' own queries, and pictures."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from deploy.grafana import preview
from deploy.grafana.panels import BOARDS, Dashboard, Panel, Query
from deploy.grafana.preview import filled
from tests.support.prometheus import Prometheus

WINDOW = "30s"


def _panel(title: str, board: str) -> Panel:
    return next(
        panel for each in BOARDS if each.uid == f"heterorl-{board}" for panel in each.panels if panel.title == title
    )


OUTAGE_BOARD = Dashboard(
    uid="heterorl-wan",
    title="Two sites, 150 ms and 1 % loss apart; shaded: nothing gets through",
    panels=(
        _panel("Groups per minute", "sites"),
        _panel("Silence", "sites"),
        _panel("Versions behind the head", "sites"),
        _panel("Policy age at the lease", "latency"),
        _panel("Staleness when trained", "latency"),
        _panel("Round trip by site", "latency"),
        _panel("Outbox", "sites"),
        Panel(title="Answers to Prometheus", unit="none", minimum=0, maximum=1,
              queries=(Query(expr='up{service="sampler"}', legend="{{site}}"),
                       Query(expr='up{service!="sampler"}', legend="{{service}}"))),
        Panel(title="Alerts that fire, by number of processes", unit="none", minimum=0,
              queries=(Query(expr='count by (alertname) (ALERTS{alertstate="firing"})', legend="{{alertname}}"),)),
    ),
)  # fmt: skip
"""The dashboards' panels that show an outage, in one picture."""


def collect(server: Prometheus, times: dict[str, float], sites: list[str]) -> dict[str, Any]:
    """Numbers between `times["begin"]` and `times["end"]`; keys of `times` are instants in seconds since the epoch."""
    sites_up = 'up{service="sampler"}'
    # A scrape bears the time of its begin: the last one in the outage may end well after it, the first began before.
    middle = (times["cut"] + 6.0, times["heal"] - 6.0)
    ages = _values(server, _of("Policy age at the lease", "quantile(0.95"), (times["cut"], times["end"]), sites)
    behind = _values(server, _of("Versions behind the head"), (times["begin"], times["end"]), sites)
    silence = _of("Silence")
    alerts = _range(server, 'ALERTS{alertstate="firing"}', (times["begin"], times["end"]))
    last = (times["end"] - 6.0, times["end"])
    return {
        "prometheus": {
            "up_in_outage": max(_values(server, sites_up, middle, sites), default=-1),
            "up_at_end": min(_last(server, sites_up, last, sites), default=-1),
            "silence_s_max": round(max(_values(server, silence, (times["cut"], times["end"]), sites)), 1),
            "silence_s_end": round(max(_last(server, silence, last, sites)), 1),
            "policy_age_p95_s_before": round(
                max(_values(server, _of("Policy age at the lease", "quantile(0.95"), (times["begin"], times["cut"]), sites),
                    default=0.0), 1),
            "policy_age_p95_s_max": round(max(ages, default=0.0), 1),
            "versions_behind_max": max(behind),
            "alerts_fired": sorted({row["metric"]["alertname"] for row in alerts}),
            "alerts_at_end": sorted(
                {row["metric"]["alertname"] for row in server.query('ALERTS{alertstate="firing"}')}
            ),
        }
    }  # fmt: skip


def draw(address: str, times: dict[str, float], directory: Path) -> None:
    """Write every dashboard over the run, and one picture of the outage, as PNG."""
    directory.mkdir(parents=True, exist_ok=True)
    minutes = (times["end"] - times["begin"] + 10) / 60
    server = f"http://{address}"
    for board in (*BOARDS, OUTAGE_BOARD):
        preview.save(
            board, directory=directory, server=server, end=times["end"], minutes=minutes, window=WINDOW,
            marked=(times["cut"], times["heal"]),
        )  # fmt: skip


def _of(title: str, part: str = "") -> str:
    """The expression of a dashboard's panel."""
    for board in BOARDS:
        for panel in board.panels:
            for query in panel.queries:
                if panel.title == title and part in query.expr:
                    return filled(query, WINDOW)
    raise LookupError(title)


def _range(server: Prometheus, expression: str, span: tuple[float, float]) -> list[Any]:
    rows: list[Any] = server.get(
        "query_range", query=expression, start=f"{span[0]}", end=f"{span[1]}", step="1"
    )["result"]  # fmt: skip
    return rows


def _values(server: Prometheus, expression: str, span: tuple[float, float], sites: list[str]) -> list[float]:
    rows = [row for row in _range(server, expression, span) if row["metric"].get("site") in sites]
    return [float(value) for row in rows for _, value in row["values"] if math.isfinite(float(value))]


def _last(server: Prometheus, expression: str, span: tuple[float, float], sites: list[str]) -> list[float]:
    rows = [row for row in _range(server, expression, span) if row["metric"].get("site") in sites]
    return [float(row["values"][-1][1]) for row in rows]
