"""Pushed metrics at the coordinator: the newest of each node, for a while, of so many nodes."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from heterorl.common.errors import InvalidRequest
from heterorl.common.types.series import Series
from heterorl.coordinator.sites.reported import KEPT_S, Reported
from tests.support.clock import ManualClock


def counted(value, labels=""):
    return [Series(name="heterorl_tokens_total", labels=(labels,), values=(value,))]


def shown(reported):
    families = text_string_to_metric_families(reported.page().decode())
    return {tuple(sample.labels.items()): sample.value for family in families for sample in family.samples}


A = (("run", "r"), ("service", "sampler"), ("instance", "a"), ("site", "a"))
L = (("run", "r"), ("service", "learner"), ("instance", "a"))


def test_newest_push_of_each_node_is_shown_until_it_is_old():
    clock = ManualClock()
    reported = Reported(run_id="r", most_nodes=8, clock=clock)
    assert reported.page() == b""
    assert reported.put("sampler", "a", counted(1.0))
    assert reported.put("learner", "a", counted(2.0))
    clock.advance(KEPT_S / 2)
    assert reported.put("sampler", "a", counted(3.0))
    assert shown(reported) == {A: 3.0, L: 2.0}

    clock.advance(KEPT_S / 2 + 1.0)
    assert shown(reported) == {A: 3.0}


def test_nodes_beyond_the_room_wait_until_another_is_gone():
    clock = ManualClock()
    reported = Reported(run_id="r", most_nodes=1, clock=clock)
    assert reported.put("sampler", "a", counted(1.0))
    assert not reported.put("sampler", "b", counted(1.0))
    assert reported.put("sampler", "a", counted(2.0)), "who is known stays"

    clock.advance(KEPT_S + 1.0)
    assert reported.put("sampler", "b", counted(4.0))
    assert list(shown(reported).values()) == [4.0]


def test_refused_push_leaves_the_earlier_one():
    reported = Reported(run_id="r", most_nodes=8, clock=ManualClock())
    reported.put("sampler", "a", counted(1.0))
    with pytest.raises(InvalidRequest):
        reported.put("sampler", "a", counted(2.0, 'site="b"'))
    assert shown(reported) == {A: 1.0}
