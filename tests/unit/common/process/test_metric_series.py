"""What a node pushes stands on the page as if it were scraped, and nothing else can."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from heterorl.common.errors import InvalidRequest
from heterorl.common.process import metrics
from heterorl.common.process import pushed_metrics as series_room
from heterorl.common.process.pushed_metrics import LIMITS, Limit, lines_of, page, rendered, series_of
from heterorl.common.types.common import Series

OF_A = {"run": "r", "service": "sampler", "instance": "site-a", "site": "site-a"}
TOKENS, RPCS = "heterorl_tokens_total", "heterorl_rpc_seconds_count"
MOST = LIMITS["sampler"]


def call(method):
    return f'code="OK",method="{method}",side="client"'


def one(name=TOKENS, labels=("",), values=(1.0,)):
    return [Series(name=name, labels=labels, values=values)]


def samples(text):
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_page_has_all_numbers_of_a_service_and_says_whose_they_are(monkeypatch, tmp_path):
    # Every test of this process has left its labels in the registry, more than an honest node has.
    monkeypatch.setattr(series_room, "LIMITS", {"sampler": Limit(num_bytes=1 << 30, lines=1 << 30, rendered=1 << 30)})
    metrics.RPC_SECONDS.labels("client", "GetStatus", 'odd "\\\n').observe(0.2)
    # NaN, as after a test whose directory is gone.
    metrics.watch_disk(tmp_path / "gone")
    # Asked once: a free disk is another number a moment later.
    collected = list(metrics.registry_of("sampler").collect())
    registry = SimpleNamespace(collect=lambda: collected)
    expected = {
        (sample.name, frozenset({**sample.labels, **OF_A}.items())): sample.value
        for metric in collected
        for sample in metric.samples
        if not sample.name.endswith("_created") and not metric.name.startswith("process_")
    }

    text = page([rendered(series_of(registry), service="sampler", added=OF_A)]).decode()

    found = samples(text)
    own = {key: value for key, value in found.items() if not key[0].startswith("process_")}
    assert own == pytest.approx(expected, rel=0, abs=0, nan_ok=True)
    assert any(name == "process_start_time_seconds" for name, _ in found)
    assert any('odd "\\\n' in dict(labels).values() for _, labels in found)


def test_numbers_of_one_metric_stand_together_under_their_type():
    first = rendered(one(), service="sampler", added=OF_A)
    second = rendered(one(values=(math.inf,)), service="sampler", added={**OF_A, "site": "site-b"})

    assert page([first, second, {}]).decode().splitlines() == [
        "# TYPE heterorl_tokens_total counter",
        'heterorl_tokens_total{run="r",service="sampler",instance="site-a",site="site-a"} 1.0',
        'heterorl_tokens_total{run="r",service="sampler",instance="site-a",site="site-b"} +Inf',
    ]


def test_series_of_a_registry_leaves_out_when_counters_were_made():
    registry = CollectorRegistry()
    Counter("one_total", "x", ["a"], registry=registry).labels("v").inc(2)
    Gauge("two", "x", registry=registry).set(3)
    Histogram("three", "x", registry=registry, buckets=(1,)).observe(0.5)

    assert series_of(registry) == [
        *one("one_total", ('a="v"',), (2.0,)),
        *one("two", ("",), (3.0,)),
        *one("three_bucket", ('le="1.0"', 'le="+Inf"'), (1.0, 1.0)),
        *one("three_count", ("",), (1.0,)),
        *one("three_sum", ("",), (0.5,)),
    ]


@pytest.mark.parametrize("name", ["up", "heterorl_coordinator_ledger_balanced", "heterorl_learner_ess_ratio", "a{b} 1"])
def test_names_that_are_not_the_services_own_are_left_out(name):
    assert rendered(one(name), service="sampler", added=OF_A) == {}


@pytest.mark.parametrize(
    "labels",
    [
        'site="other"', 'code="OK",instance="other"', 'run="other"', 'job="other"', 'service="learner"',
        # What Prometheus refuses a whole page for.
        'code="OK",code="OK",method="m",side="s"', '__name__="up"', 'code="\0",method="m",side="s"',
        'a="b"} 1\nup{c="d"', 'a="b"\nup 1\n', 'a="b', 'a="\\x"', 'a=""b"', "a", ",", 'a="b",', '0="b"', 'a="b" ',
    ],
)  # fmt: skip
def test_labels_that_say_more_than_a_nodes_own_are_refused(labels):
    with pytest.raises(InvalidRequest, match="no node's own"):
        rendered(one(RPCS, (labels,)), service="sampler", added=OF_A)


@pytest.mark.parametrize(
    "labels",
    ["", 'code="OK",method="m"', 'code="OK",method="m",more="x",side="s"', 'side="s",method="m",code="OK"', 'le="1.0"'],
)
def test_numbers_under_other_labels_than_their_metric_has_are_left_out(labels):
    pushed = [*one(RPCS, (call("a"), labels), (1.0, 2.0)), *one()]

    assert rendered(pushed, service="sampler", added=OF_A).keys() == {TOKENS}


def test_buckets_have_their_bound_among_the_labels():
    labels = 'code="OK",le="+Inf",method="m",side="client"'

    found = rendered(one("heterorl_rpc_seconds_bucket", (labels,)), service="sampler", added=OF_A)
    assert list(lines_of(found)) == [
        f'heterorl_rpc_seconds_bucket{{run="r",service="sampler",instance="site-a",site="site-a",{labels}}}'
    ]


def test_learner_may_speak_of_sites():
    lags = one("heterorl_learner_staleness_versions_sum", ('site="site-b"',))
    of_learner = {"run": "r", "service": "learner", "instance": "l1"}

    assert rendered(lags, service="learner", added=of_learner) == {
        lags[0].name: f'{lags[0].name}{{run="r",service="learner",instance="l1",site="site-b"}} 1.0\n'
    }


@pytest.mark.parametrize(
    ("series", "problem"),
    [
        (one() + one(), "a name stands in two entries"),
        (one(labels=("", "")), "2 labels for 1 numbers"),
        (one(RPCS, ('a="b"', 'a="b"'), (1.0, 2.0)), "two numbers under the same labels"),
        (one(RPCS, (call("x" * MOST.num_bytes),)), "bytes"),
        (one(RPCS, (), (0.0,) * (MOST.lines + 1)), "more than 4096 numbers"),
    ],
)
def test_what_is_no_measurement_is_refused(series, problem):
    with pytest.raises(InvalidRequest, match=problem):
        rendered(series, service="sampler", added=OF_A)


def test_what_a_push_adds_to_the_page_is_bounded(monkeypatch):
    pushed = one(RPCS, tuple(call(n) for n in range(100)), (1.0,) * 100)
    size = len(rendered(pushed, service="sampler", added=OF_A)[RPCS])

    # As bytes on the page count, and not as they came.
    limits = {"sampler": dataclasses.replace(MOST, rendered=size - 1)}
    monkeypatch.setattr("heterorl.common.process.pushed_metrics.LIMITS", limits)
    with pytest.raises(InvalidRequest, match="on the page"):
        rendered(pushed, service="sampler", added=OF_A)
