"""Metrics, dashboards, alerts and runbook say the same: names, labels and links, checked without a server."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from deploy.grafana import generate
from deploy.grafana.panels import BOARDS
from heterorl.common.process import metrics
from heterorl.common.process.pushed_metrics import LIMITS
from heterorl.common.types.policy import PayloadKind
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.sites.node_metrics import NODES_PAGE

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
RULES = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"]]
TESTS = yaml.safe_load((ROOT / "tests" / "contract" / "alerts.yml").read_text())
TARGET_LABELS = {"run", "service", "site", "job", "instance"}
SUFFIXES = {"histogram": ("_bucket", "_count", "_sum"), "counter": ("_total",), "gauge": ("",)}
NOT_SHOWN = {
    "heterorl_learner_version": "the coordinator's head is shown; this one helps when both disagree",
    "heterorl_sampler_policy_version": "the coordinator shows it per site",
    "heterorl_sampler_outbox_set_aside": "said in the log with the file; the coordinator shows the empty groups as invalid",
}
EXPRESSIONS = [(f"{board.uid}/{panel.title}", query.expr) for board in BOARDS for panel in board.panels
               for query in panel.queries] + [(rule["alert"], rule["expr"]) for rule in ALERTS]  # fmt: skip


def _samples():
    """Sample name -> (family, labels), of everything that is declared."""
    declared = {}
    for metric in vars(metrics).values():
        if hasattr(metric, "_labelnames"):
            for suffix in SUFFIXES[metric._type]:
                declared[f"{metric._name}{suffix}"] = (metric._name, set(metric._labelnames))
    return declared


SAMPLES = _samples()


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS)
def test_expression_uses_metrics_and_labels_that_exist(where, expression):
    names = re.findall(r"\bheterorl_\w+", expression)
    labels = set(re.findall(r'(\w+)(?:=~|!~|!=|=)"', expression))

    assert [name for name in names if name not in SAMPLES] == []
    for name, braces in re.findall(r"\b(heterorl_\w+)\{([^}]*)\}", expression):
        selected = set(re.findall(r"(\w+)(?:=~|!~|!=|=)\"", braces))
        assert selected <= SAMPLES[name][1] | TARGET_LABELS | {"le"}, where
    assert labels or names or "up" in expression


def _metrics_of(text):
    return set(re.findall(r"\bheterorl_(?:[a-z]+_)+[a-z]+(?:_\*)?", text))


def test_metrics_that_a_page_names_exist():
    pages = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *(ROOT / "docs").glob("*.md")]
    named = set().union(*(_metrics_of(path.read_text(encoding="utf-8")) for path in pages)) - {"heterorl_research"}

    assert len(named) >= 4
    assert [name for name in named if not any(each.startswith(name.rstrip("*")) for each in SAMPLES)] == []


@pytest.mark.parametrize(
    ("board", "panel", "query"),
    [(board, panel, query) for board in BOARDS for panel in board.panels for query in panel.queries],
    ids=lambda value: getattr(value, "uid", getattr(value, "title", "")),
)
def test_panel_keeps_runs_apart(board, panel, query):
    del board, panel
    # Runs of one Prometheus are all shown at first: none may be added to another, or measured against its head.
    assert query.legend.startswith("{{run}}")
    for operator, labels in re.findall(r"\b(sum|max|min|avg|count)\b(?: by \(([^)]*)\))?", query.expr):
        assert "run" in labels.split(", "), operator
    for labels in re.findall(r"\b(?:on|ignoring|without) \(([^)]*)\)", query.expr):
        assert "run" in labels.split(", ")
    assert "scalar(" not in query.expr


def test_every_metric_is_on_a_dashboard_or_in_an_alert_or_says_why_not():
    used = {SAMPLES[name][0] for _, text in EXPRESSIONS for name in re.findall(r"\bheterorl_\w+", text)}

    assert {family for family, _ in SAMPLES.values()} - used == set(NOT_SHOWN)


def test_bytes_that_sites_pull_are_shown_of_every_kind():
    texts = [text for _, text in EXPRESSIONS if "heterorl_bytes_total{" in text and 'direction="in"' in text]
    (kinds,) = re.findall(r'kind=~"([a-z|]+)"', " ".join(texts))

    assert set(kinds.split("|")) == {kind.value for kind in PayloadKind}


def test_dashboards_are_what_the_table_makes():
    files = {path.name: path.read_text() for path in (DEPLOY / "grafana" / "dashboards").glob("*.json")}

    assert files == {generate.file_of(board): generate.render(board) for board in BOARDS}, (
        "run python -m deploy.grafana.generate"
    )


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_dashboard_has_the_shape_that_grafana_reads(board):
    made = json.loads(generate.render(board))
    places = [panel["gridPos"] for panel in made["panels"]]
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    variables = [variable["name"] for variable in made["templating"]["list"]]

    assert made["schemaVersion"] >= 39
    assert made["uid"] == board.uid
    assert variables == ["datasource", "run", "site"][: 3 if board.has_sites else 2]
    assert len({panel["id"] for panel in made["panels"]}) == len(made["panels"])
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    for panel in made["panels"]:
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            # Rates over the scrape's own interval; nothing of the table's own placeholder is left.
            assert "$window" not in target["expr"]
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= {*variables, "__rate_interval"}


def test_dashboard_titles_and_uids_are_unique():
    assert len({board.uid for board in BOARDS}) == len({board.title for board in BOARDS}) == len(BOARDS) == 5
    for board in BOARDS:
        assert len({panel.title for panel in board.panels}) == len(board.panels)


def test_every_alert_has_a_runbook_entry_and_links_it():
    text = (DEPLOY / "runbook.md").read_text()
    entries = re.findall(r"^## (\w+)$", text, re.MULTILINE)
    parts = re.split(r"^## \w+$", text, flags=re.MULTILINE)[1:]

    assert entries == [rule["alert"] for rule in ALERTS]
    for rule in ALERTS:
        assert rule["annotations"]["runbook_url"] == f"runbook.md#{rule['alert'].lower()}"
        assert rule["annotations"]["summary"].isascii()
        assert rule["labels"]["severity"] in {"warning", "critical"}
    for name, part in zip(entries, parts, strict=True):
        assert all(f"**{word}.**" in part for word in ("Meaning", "First look", "Action")), name


def test_runbook_names_panels_and_settings_that_exist():
    text = (DEPLOY / "runbook.md").read_text().replace("\n", " ")
    titles = {panel.title for board in BOARDS for panel in board.panels}
    named = set(re.findall(r"\*([A-Z][^*]+)\*(?!\*)", re.sub(r"\*\*[^*]+\*\*", "", text)))
    settings = " ".join(path.read_text() for path in (ROOT / "services").rglob("*.py"))
    keys = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", text)) - {"data_dir", "stale_epoch", "store_full"} - SAMPLES.keys()
    keys = {key for key in keys if not key.startswith("pg_")} - {"synchronous_standby_names", "wait_event"}
    reasons = {"stale_at_ingest", "unknown_version", "wrong_digest", "quota_exceeded", "code_mismatch"}

    assert named
    assert {name for name in named if not any(title.startswith(name) for title in titles)} <= {
        "at the end of generation"
    }
    assert [key for key in sorted(keys - reasons - {"metrics_host"}) if f"    {key}:" not in settings] == []


def test_every_alert_is_seen_firing_and_silent_in_the_rule_tests():
    fired, silent = set(), set()
    for case in TESTS["tests"]:
        for check in case["alert_rule_test"]:
            (fired if check.get("exp_alerts") else silent).add(check["alertname"])

    assert fired == silent == {rule["alert"] for rule in ALERTS}


def test_alert_of_the_policy_age_is_exact_at_the_default_bound():
    # A quantile is interpolated within a step: ages below the limit must not share one with ages above it.
    (rule,) = (rule for rule in ALERTS if rule["alert"] == "HeterorlSupersededNearBound")
    share = float(re.search(r"> on \(run\) group_left ([\d.]+) \*", rule["expr"])[1])

    limit = share * CoordinatorConfig().max_superseded_s
    assert limit in metrics.SUPERSEDED_SECONDS._kwargs["buckets"]


@pytest.mark.process
@pytest.mark.timeout(180)
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: make programs")
@pytest.mark.parametrize(
    "command",
    [
        ("check", "config", "deploy/prometheus/prometheus.yml"),
        ("check", "rules", "--lint=all", "--lint-fatal", "deploy/prometheus/rules.yml"),
        ("test", "rules", "tests/contract/alerts.yml"),
    ],
    ids=["config", "rules", "tests"],
)
def test_promtool_accepts(command):
    result = subprocess.run(["promtool", *command], cwd=ROOT, capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.process
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: make programs")
def test_every_process_is_counted_once_whoever_shows_its_metrics(tmp_path):
    (panel,) = (panel for board in BOARDS for panel in board.panels if panel.title == "Processes up")
    coordinator = 'run="r",service="coordinator",instance="c:9101"'
    series = {
        f'up{{job="heterorl",{coordinator}}}': 1, f'up{{job="heterorl-nodes",{coordinator}}}': 1,
        'up{job="heterorl",run="r",service="relay",instance="x:9104"}': 0,
        **{
            f'process_start_time_seconds{{job="heterorl-nodes",run="r",service="sampler",instance="{name}"}}': 1e9
            for name in ("a", "b")
        },
    }  # fmt: skip
    wanted = {"coordinator": 1, "relay": 0, "sampler": 2}
    case = {
        "input_series": [{"series": name, "values": f"{value:.0f}x5"} for name, value in series.items()],
        "promql_expr_test": [
            {
                "expr": panel.queries[0].expr.replace("$run", ".*"),
                "eval_time": "5m",
                "exp_samples": [
                    {"labels": f'{{run="r",service="{name}"}}', "value": value} for name, value in wanted.items()
                ],
            }
        ],
    }
    (tmp_path / "case.yml").write_text(yaml.safe_dump({"tests": [case]}))

    result = subprocess.run(
        ["promtool", "test", "rules", str(tmp_path / "case.yml")], capture_output=True, text=True, check=False
    )

    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.process
@pytest.mark.skipif(shutil.which("amtool") is None, reason="amtool is not installed: make programs")
def test_amtool_accepts_the_routes():
    result = subprocess.run(
        ["amtool", "check-config", "deploy/prometheus/alertmanager.yml"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert result.returncode == 0, result.stdout + result.stderr


def test_alertmanager_names_alerts_that_exist():
    text = (DEPLOY / "prometheus" / "alertmanager.yml").read_text()

    assert set(re.findall(r"Heterorl\w+", text)) <= {rule["alert"] for rule in ALERTS}


def test_targets_are_coordinators_with_the_labels_that_rules_and_dashboards_need():
    for name in ("compose.yml", "systemd.example"):
        text = (DEPLOY / "prometheus" / "targets" / name).read_text()
        (entry,) = yaml.safe_load(text)

        # The nodes' metrics have the run's own name, and rules join by it.
        assert f"Put your run_id in place of {entry['labels']['run']}:" in text
        assert entry["labels"].keys() == {"run", "service"}
        assert entry["labels"]["service"] == "coordinator"
    of_nodes = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"][1]
    assert (of_nodes["metrics_path"], of_nodes["honor_labels"]) == (NODES_PAGE, True)


def test_page_of_as_many_nodes_as_are_shown_and_a_few_learners_is_within_the_sample_limit():
    of_nodes = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"][1]
    most, each = CoordinatorConfig().metrics_nodes, {service: limit.lines for service, limit in LIMITS.items()}
    said = " ".join((DEPLOY.parent / "docs" / "operate.md").read_text().split())

    assert each["sampler"] == each["relay"] == 4096
    assert of_nodes["sample_limit"] >= (most - 3) * each["sampler"] + 3 * each["learner"]
    # So much and not much more: who raises one has to raise the other.
    assert of_nodes["sample_limit"] < 1.5 * most * each["sampler"]
    assert f"If you raise `metrics_nodes` ({most}), raise `sample_limit` in `prometheus.yml` too." in said
