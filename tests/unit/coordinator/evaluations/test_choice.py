"""Which evaluation a site is given a part of."""

import pytest

from heterorl.common.types.evaluation import EvaluationSet
from heterorl.coordinator.evaluations.choice import Asker, Job, choose

OWN, OTHER = "a" * 64, "b" * 64


def job(number, **changes):
    values = {"version": 5, "task_set": "math", "is_begun": False, "has_open": True, "idle_s": 0.0, **changes}
    return Job(id=number, **values)


def asker(*names, digest=OWN, **changes):
    sets = {name: EvaluationSet(name=name, task_digest=digest, num_prompts=9) for name in names or ("math",)}
    return Asker(**{"policy_version": 5, "sets": sets, "can_pull": False, **changes})


def chosen(*jobs, by=None, digests=None, wait_s=60.0, silence_s=1800.0):
    found, reason = choose(jobs, by or asker(), digests=digests or {}, wait_s=wait_s, silence_s=silence_s)
    assert reason
    return None if found is None else found.id


def test_the_sites_own_version_is_given_at_once_and_what_is_begun_first():
    assert chosen(job(1, version=4), job(2), job(3, is_begun=True)) == 3
    assert chosen(job(1, is_begun=True, has_open=False), job(2)) == 2


@pytest.mark.parametrize(
    ("can_pull", "idle_s", "expected"), [(True, 59.9, None), (True, 60.0, 1), (False, 600.0, None)]
)
def test_another_version_is_given_when_nobody_goes_on_with_it(can_pull, idle_s, expected):
    assert chosen(job(1, version=4, idle_s=idle_s), by=asker(can_pull=can_pull)) == expected


def test_of_other_versions_what_is_begun_is_ended_then_the_newest():
    by = asker(can_pull=True)

    assert chosen(job(1, version=2), job(2, version=4), by=by, wait_s=0.0) == 2
    assert chosen(job(1, version=2, is_begun=True), job(2, version=4), by=by, wait_s=0.0) == 1


@pytest.mark.parametrize(
    ("older", "new", "expected"),
    [
        ({}, {}, None),
        ({"idle_s": 59.0}, {}, 2),
        ({"silent_s": 1800.0}, {}, 2),
        ({"has_open": False}, {}, 2),
        ({"task_set": "code"}, {}, 2),
        ({}, {"is_begun": True}, 2),
    ],
)
def test_none_is_begun_while_an_older_one_of_its_set_stands_still(older, new, expected):
    jobs = [job(1, **{"version": 4, "is_begun": True, "idle_s": 60.0, **older}), job(2, **new)]

    assert chosen(*jobs, by=asker("math", "code")) == expected
    # Who can fetch it goes on with it, who cannot do it holds up nothing.
    assert chosen(*jobs, by=asker("math", "code", can_pull=True)) == (expected or 1)
    assert chosen(*jobs, by=asker("math", "code", refused=[1])) == 2


def test_a_site_is_given_what_it_has_the_data_of():
    assert chosen(job(1, task_set="code")) is None
    assert chosen(job(1, task_set="code"), job(2), by=asker("code", "math")) == 1


def test_a_site_with_other_data_is_given_nothing():
    assert chosen(job(1), by=asker(digest=OTHER), digests={"math": OWN}) is None
    assert chosen(job(1), by=asker(), digests={"math": OWN}) == 1


def test_what_a_site_cannot_do_is_not_asked_of_it_again():
    assert chosen(job(1), job(2), by=asker(refused=[1])) == 2


def test_nothing_to_do():
    assert chosen() is None
