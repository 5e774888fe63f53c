"""What a learner says of a run: read out of its configuration, parsed where another machine sends it."""

import pytest

from heterorl.common.errors import InvalidRequest, StaleEpoch
from heterorl.common.types.run import (
    changed_facts,
    changed_steps,
    facts_of,
    parse_facts,
    step_words,
    steps_wanted,
    with_changes,
)
from heterorl.learner.learner_config import LearnerConfig
from heterorl.learner.run.state_directory import describe_run, write_run_file
from tests.support.secure_run import SecureRun


def run_of(**keys):
    return {"heterorl_version": "9.9", "config": LearnerConfig(**keys).model_dump(mode="json")}


def test_facts_are_what_people_ask_for_and_are_taken_as_they_are():
    facts = facts_of(run_of(model_dir="m" * 400 + "\n", max_steps=12))

    assert facts["loss"] == "gepo"
    assert facts["model"] == "m" * 300
    assert facts["learner's heterorl"] == "9.9"
    assert "reward" not in facts
    assert facts_of({"config": {"task": {"environment": "tools.py"}}})["environment"] == "tools.py"
    assert parse_facts(facts) == facts
    assert steps_wanted(facts) == 12
    assert facts_of({}) == {}
    assert [step_words(step, 12) for step in (11, 12, 13)] == ["11 of 12", "12 of 12", "13 (max_steps is 12)"]
    assert step_words(13, 0) == "13"
    assert steps_wanted({"steps wanted": "-1"}) == steps_wanted({}) == 0
    # Another configuration is another digest.
    assert facts_of(run_of(max_steps=13))["configuration"] != facts["configuration"]


@pytest.mark.parametrize(
    "facts",
    [
        {f"a{number}": "" for number in range(65)},
        {"": "x"},
        {"Name": "x"},
        {"a" * 65: "x"},
        {"a": "x" * 301},
        {"a": "\x1b[2J"},
    ],
)
def test_what_is_too_much_is_refused(facts):
    with pytest.raises(InvalidRequest):
        parse_facts(facts)


async def test_operators_see_them_and_only_the_learner_says_them(tmp_path):
    async with SecureRun(tmp_path) as secure:
        epoch = secure.run.epoch
        await secure.learner.describe_run(epoch=epoch, facts={"model": "old", "task": "t"})
        await secure.learner.describe_run(epoch=epoch, facts={"model": "/m"})
        found = dict((await secure.operator.get_status()).facts)
        assert found == {"model": "/m", "changed after step 0": "model old -> /m, task t -> unset"}
        with pytest.raises(InvalidRequest):
            await secure.learner.describe_run(epoch=epoch, facts={"model": "\n"})
        with pytest.raises(StaleEpoch):
            await secure.learner.describe_run(epoch=epoch + 1, facts={})


def test_a_key_that_is_no_fact_is_a_change_all_the_same():
    before, after = (facts_of(run_of(metrics_port=port)) for port in (1, 2))

    assert "keys that are not among these facts" in changed_facts(before, after)
    assert changed_facts(before, before) == ""


def test_changes_are_bounded_and_the_newest_stay():
    facts = {}
    for step in range(50):
        facts = with_changes(facts, {"loss": "gepo"}, words="x" * 200, step=step)
        facts = with_changes(facts, {"loss": "gepo"}, words="y" * 200, step=step)

    assert changed_steps(facts) == tuple(range(30, 50))
    assert parse_facts(facts) == facts


def test_the_learners_log_names_every_key_that_its_start_changed(tmp_path, caplog):
    write_run_file(LearnerConfig(state_dir=tmp_path))
    assert "changed since the last start" not in caplog.text
    write_run_file(LearnerConfig(state_dir=tmp_path, group_size=4, backend={"lr": 0.5}))

    assert "changed since the last start: backend.lr 1e-06 -> 0.5" in caplog.text
    assert "changed since the last start: group_size 8 -> 4" in caplog.text
    assert caplog.text.count("changed since the last start") == 2


class Old:
    """A coordinator of an earlier release, and one that knows another learner."""

    def __init__(self, error):
        self.error = error

    async def retry(self, call):
        raise self.error


async def test_coordinator_that_does_not_take_them_is_no_reason_to_stop(caplog):
    config = LearnerConfig()
    await describe_run(None, config, epoch=1, backoff=Old(InvalidRequest("UNIMPLEMENTED")))
    assert "the run goes on" in caplog.text
    with pytest.raises(StaleEpoch):
        await describe_run(None, config, epoch=1, backoff=Old(StaleEpoch("another")))


@pytest.mark.parametrize(
    ("reward", "shown"),
    [
        ("https://judge:s3cr3t@rewards.example/score?token=abc", "https://***@rewards.example/score?***"),
        ("https://me:p@ss/word@rewards.example/score", "https://***@rewards.example/score"),
        ("https://rewards.example:8000/score", "https://rewards.example:8000/score"),
        ("mytask.rewards:score", "mytask.rewards:score"),
    ],
)
def test_a_secret_in_an_address_is_no_fact(reward, shown):
    assert facts_of({"config": {"task": {"reward": reward}}})["reward"] == shown
