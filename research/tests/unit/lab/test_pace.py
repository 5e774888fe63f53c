"""How the lab serves a delay: bounds, work in flight, and the gate before a site's work."""

import pytest

from heterorl.common.types.rollout import WorkGrant
from heterorl_research.lab import pace
from heterorl_research.lab.cell import list_cells
from heterorl_research.lab.config import ExperimentConfig


def cell_of(delay, **regime):
    return list_cells(ExperimentConfig(delays=(delay,), seeds=(3,), regime={"max_steps": 6, **regime}))[0]


REFRESHED = {"kind": "lognormal", "semantics": "refresh_interval", "low": 60, "high": 1920, "default": 60}
SAWTOOTH = {"kind": "sawtooth", "high": 3}
UNIFORM = {"kind": "uniform_lag", "high": 3}


@pytest.mark.parametrize(
    ("delay", "reach", "in_flight", "is_gated"),
    [
        ({"kind": "none"}, 0, 1, False),
        ({"kind": "fixed", "unit": "versions", "value": 64}, 64, 1, False),
        (SAWTOOTH, 3, 1, True),
        (UNIFORM, 3, 1, True),
        ({"kind": "uniform", "unit": "versions", "low": 1, "high": 9}, 9, 1, True),
        (REFRESHED, 69, 2, False),
        ({"kind": "fixed", "value": 280.0}, 20, 22, False),
    ],
)
def test_bounds_follow_from_the_delay(delay, reach, in_flight, is_gated):
    cell = cell_of(delay)

    assert (pace.reach_versions(cell), pace.versions_in_flight(cell), pace.needs_gate(cell)) == (
        reach, in_flight, is_gated,
    )  # fmt: skip


def test_a_queue_is_built_where_it_is_asked_for():
    queue = {"sampler_speed": 2.0, "versions_in_flight": 30, "groups_per_step": 4, "num_samplers": 2}

    assert pace.group_s(cell_of(REFRESHED, groups_per_step=4, num_samplers=2)) == 0.5
    assert (pace.group_s(cell_of(REFRESHED, **queue)), pace.versions_in_flight(cell_of(REFRESHED, **queue))) == (
        0.25,
        30,
    )
    # Delays in versions are exact whatever the samplers could do.
    assert (pace.group_s(cell_of(SAWTOOTH, **queue)), pace.versions_in_flight(cell_of(SAWTOOTH, **queue))) == (0.4, 1)


def test_lags_are_those_of_the_sampler_of_a_cell():
    assert pace.lags(cell_of(SAWTOOTH)) == [0, 1, 2, 3, 0, 1, 2]
    assert pace.lags(cell_of({"kind": "none"})) == [0] * 7
    assert pace.lags(cell_of(UNIFORM, max_steps=60), 0) != pace.lags(cell_of(UNIFORM, max_steps=60), 1)
    with pytest.raises(ValueError, match="seconds"):
        pace.lags(cell_of(REFRESHED))


def test_a_version_has_room_for_its_steps():
    assert pace.groups_per_version(cell_of(SAWTOOTH, groups_per_step=5)) == 5
    assert pace.groups_per_version(cell_of(SAWTOOTH, groups_per_step=5, steps_per_version=3)) == 15


class Asked:
    """A coordinator that notes who asked."""

    def __init__(self):
        self.policies = []

    async def lease_work(self, *, policy_version, site):
        self.policies.append((site, policy_version))
        return WorkGrant(assignments=(), reason="asked", retry_after_s=1.0)

    def stated(self):
        return "of the coordinator"


async def test_the_gate_passes_the_policy_that_is_due_and_no_other():
    inner = Asked()

    async def head():
        return 7

    gate = pace.PolicyGate(inner, lags=[0, 1, 0, 1, 2, 3, 4, 2], head=head).api()
    early, late, right = [await gate.lease_work(policy_version=version, site="eu") for version in (4, 6, 5)]

    assert inner.policies == [("eu", 5)]
    assert early.assignments == late.assignments == ()
    assert early.reason == "waits for version 5"
    assert (early.retry_after_s, right.reason) == (pace.ASK_AGAIN_S, "asked")
    assert gate.stated() == "of the coordinator"
