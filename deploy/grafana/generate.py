"""Makes the dashboards from the table of panels.

python -m deploy.grafana.generate writes deploy/grafana/dashboards/*.json; a test compares them with the table.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deploy.grafana.panels import BOARDS, Dashboard, Panel

DIRECTORY = Path(__file__).parent / "dashboards"
SCHEMA_VERSION = 41
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24
STAT_HEIGHT, GRAPH_HEIGHT = 4, 8
GRAPHS_PER_ROW = 3
WINDOW = "$__rate_interval"


def file_of(board: Dashboard) -> str:
    """File name of a dashboard."""
    return f"{board.uid.removeprefix('heterorl-')}.json"


def render(board: Dashboard) -> str:
    """A dashboard as Grafana's JSON, ending with a newline."""
    return json.dumps(_dashboard(board), indent=1) + "\n"


def _dashboard(board: Dashboard) -> dict[str, Any]:
    variables = [_datasource(), _variable("run", "label_values(heterorl_coordinator_head_version, run)")]
    if board.has_sites:
        query = 'label_values(heterorl_coordinator_site_policy_version{run=~"$run"}, site)'
        variables.append(_variable("site", query))
    return {
        "uid": board.uid,
        "title": board.title,
        "tags": ["heterorl"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "utc",
        "annotations": {"list": [_alert_annotation()]},
        "links": [
            {
                "type": "dashboards",
                "title": "heterorl",
                "tags": ["heterorl"],
                "asDropdown": False,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "templating": {"list": variables},
        "panels": place(board),
    }


def place(board: Dashboard) -> list[dict[str, Any]]:
    """Grafana's panels with their places: stats in a first row, graphs below, three abreast."""
    stats = [panel for panel in board.panels if panel.kind == "stat"]
    graphs = [panel for panel in board.panels if panel.kind != "stat"]
    placed: list[dict[str, Any]] = []
    for position, panel in enumerate(stats):
        width = COLUMNS // len(stats)
        placed.append(_panel(panel, len(placed) + 1, x=position * width, y=0, width=width, height=STAT_HEIGHT))
    top = STAT_HEIGHT if stats else 0
    width = COLUMNS // GRAPHS_PER_ROW
    for position, panel in enumerate(graphs):
        row, column = divmod(position, GRAPHS_PER_ROW)
        y = top + row * GRAPH_HEIGHT
        placed.append(_panel(panel, len(placed) + 1, x=column * width, y=y, width=width, height=GRAPH_HEIGHT))
    return placed


def _panel(panel: Panel, number: int, *, x: int, y: int, width: int, height: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "custom": {}}
    if panel.minimum is not None:
        defaults["min"] = panel.minimum
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    if panel.kind == "timeseries":
        scale = {"type": "log", "log": 10} if panel.is_log else {"type": "linear"}
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 0,
            "showPoints": "auto",
            "spanNulls": False,
            "scaleDistribution": scale,
        }
        options: dict[str, Any] = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    else:
        options = {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "none",
            "graphMode": "none",
            "textMode": "auto",
        }
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.note,
        "datasource": DATASOURCE,
        "gridPos": {"h": height, "w": width, "x": x, "y": y},
        "fieldConfig": {"defaults": defaults, "overrides": _bound_style(panel)},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + position),
                "datasource": DATASOURCE,
                "expr": query.expr.replace("$window", WINDOW),
                "legendFormat": query.legend,
                "range": panel.kind != "stat",
                "instant": panel.kind == "stat",
                "editorMode": "code",
            }
            for position, query in enumerate(panel.queries)
        ],
    }


def _bound_style(panel: Panel) -> list[dict[str, Any]]:
    """A configured bound is a dashed red line."""
    if not any(query.legend.endswith(" bound") for query in panel.queries):
        return []
    return [
        {
            "matcher": {"id": "byRegexp", "options": "/ bound$/"},
            "properties": [
                {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [10, 10]}},
                {"id": "color", "value": {"mode": "fixed", "fixedColor": "red"}},
            ],
        }
    ]


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "label": "Data source", "query": "prometheus", "hide": 0}


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "label": name.capitalize(),
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": f"variable-{name}"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "hide": 0,
    }


def _alert_annotation() -> dict[str, Any]:
    return {
        "name": "Alerts",
        "datasource": DATASOURCE,
        "enable": True,
        "iconColor": "red",
        "expr": 'ALERTS{alertstate="firing",run=~"$run"}',
        "titleFormat": "{{alertname}}",
        "textFormat": "{{service}} {{site}}",
        "step": "60s",
    }


def main() -> None:
    """Write every dashboard."""
    DIRECTORY.mkdir(exist_ok=True)
    for board in BOARDS:
        (DIRECTORY / file_of(board)).write_text(render(board), encoding="ascii")


if __name__ == "__main__":
    main()
