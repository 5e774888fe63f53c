"""Evidence of an outage from a real Prometheus: numbers by the dashboards' queries, and pictures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from campaigns import wan_picture
from deploy.grafana import preview
from deploy.grafana.panels import BOARDS, Query
from deploy.grafana.preview import filled
from tests.support.prometheus import Prometheus

WINDOW = "30s"


ACCEPTED = '60 * sum by (site) (rate(heterorl_coordinator_pushed_groups_total{status="accepted"}[$window]))'


def collect(server: Prometheus, times: dict[str, float], sites: list[str]) -> dict[str, Any]:
    """Numbers between `times["begin"]` and `times["end"]`; `times` are in seconds since the epoch."""
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


def draw(server: Prometheus, times: dict[str, float], directory: Path) -> None:
    """Write every dashboard of the run as PNG, and one picture of the outage with its numbers."""
    directory.mkdir(parents=True, exist_ok=True)
    minutes = (times["end"] - times["begin"] + 10) / 60
    for board in BOARDS:
        preview.save(
            board, directory=directory, server=f"http://{server.address}", end=times["end"], minutes=minutes,
            window=WINDOW, marked=(times["cut"], times["heal"]),
        )  # fmt: skip
    span = (times["begin"], times["end"])
    rows = {
        "groups": _range(server, filled(Query(expr=ACCEPTED, legend=""), WINDOW), span),
        "silence": _range(server, _of("Silence"), span),
        "behind": _range(server, _of("Versions behind the head"), span),
    }
    found = wan_picture.since(times, rows)
    (directory / "outage.json").write_text(json.dumps(found) + "\n", encoding="ascii")
    wan_picture.draw(found, directory / "wan.png")


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
