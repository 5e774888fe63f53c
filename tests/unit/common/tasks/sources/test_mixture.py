"""Mixtures: shares of a pass, prompts that know their source, scores of their own task."""

import dataclasses
import json
import logging
from collections import Counter
from types import MappingProxyType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from heterorl.common.errors import ConfigError
from heterorl.common.tasks.arithmetic import ArithmeticTask
from heterorl.common.tasks.rewards.sandbox.code_reward import CodeReward
from heterorl.common.tasks.rewards.weighted import NamedReward, WeightedTask
from heterorl.common.tasks.rewards.worker_pool import NearLimit
from heterorl.common.tasks.sources import mixture as mixture_module
from heterorl.common.tasks.sources.mixture import MixtureTask, Source, num_trained_on
from heterorl.common.tasks.task import Doubts
from heterorl.common.tasks.task_config import TaskConfig, build_task
from heterorl.common.types.rollout import QueuedGroup
from heterorl.learner.train.step_report import by_source
from tests.support.learner_world import make_group


def mixture(*sources, **changes):
    return TaskConfig(name="mixture", sources=sources, **changes)


SMALL = {"label": "small", "name": "arithmetic", "digits": 1, "weight": 3}
LONG = {"label": "long", "name": "progression", "digits": 1, "terms": 3}


def test_a_pass_has_every_prompt_and_the_sources_in_their_shares():
    config = mixture(SMALL, LONG)
    task = build_task(config)

    # 90 prompts each; shares 3 : 1, so that `long` has one position a prompt and `small` three
    labels = Counter(task.source_of(index) for index in range(task.num_prompts))
    assert labels == {"small": 270, "long": 90}
    texts = Counter((task.source_of(index), task.prompt(index).text) for index in range(task.num_prompts))
    assert {count for (label, _), count in texts.items() if label == "small"} == {3}
    assert {count for (label, _), count in texts.items() if label == "long"} == {1}
    assert len(texts) == 180


def test_each_prompt_is_scored_by_its_own_task():
    task = build_task(mixture(SMALL, LONG))
    for index in (0, task.num_prompts - 1):
        prompt = task.prompt(index)
        (part,) = task.score(prompt, prompt.answer)
        assert part.value == 1.0
        assert part.name == {"small": "correct", "long": "right_terms"}[task.source_of(index)]
    for index in range(task.num_evaluation_prompts):
        held_out = task.evaluation_prompt(index)
        (part,) = task.score(held_out, held_out.answer)
        assert part.value == 1.0
        assert part.name == {"small": "correct", "long": "right_terms"}[task.evaluation_source_of(index)]


def test_source_that_holds_out_billions_fits_into_memory(monkeypatch):
    monkeypatch.setattr(mixture_module, "MAX_HELD_OUT", 100)
    task = MixtureTask([Source(label=f"{n}", weight=1, task=ArithmeticTask(digits=n)) for n in (1, 7)])

    assert task.num_evaluation_prompts == 5 + 100
    assert len({task.evaluation_prompt(index).text for index in range(105)}) == 105


@pytest.mark.parametrize("digits", [7, 8, 9])
def test_a_source_without_end_mixes_with_equal_weights(digits):
    task = build_task(mixture({**SMALL, "weight": 1}, {"label": "large", "name": "arithmetic", "digits": digits}))

    assert task.num_prompts == 2 << 32
    assert [task.source_of(index) for index in (0, task.num_prompts - 1)] == ["small", "large"]


def test_the_first_held_out_prompts_have_the_shares():
    task = build_task(mixture(SMALL, LONG))

    names = Counter(task.score(task.evaluation_prompt(index), "")[0].name for index in range(4))

    assert names == {"correct": 3, "right_terms": 1}
    assert task.num_evaluation_prompts == 10


def test_what_a_source_does_not_set_it_takes_from_the_task():
    config = mixture({"label": "a"}, {"label": "b", "digits": 1, "system_prompt": "Be right."}, digits=2,
                     system_prompt="Add.")  # fmt: skip
    task = build_task(config)
    first, last = task.prompt(0), task.prompt(task.num_prompts - 1)

    assert len(first.text) == len("12+34=")
    assert first.messages[0].content == "Add."
    assert len(last.text) == len("1+3=")
    assert last.messages[0].content == "Be right."


def test_digest_depends_on_sources_and_weights_and_not_on_labels():
    base = build_task(mixture(SMALL, LONG)).digest

    assert build_task(mixture({**SMALL, "label": "other"}, LONG)).digest == base
    assert build_task(mixture({**SMALL, "weight": 2}, LONG)).digest != base
    assert build_task(mixture({**SMALL, "digits": 2}, LONG)).digest != base


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"name": "mixture"}, "needs sources"),
        ({"sources": [SMALL]}, "needs sources"),
        ({"name": "mixture", "sources": [SMALL, SMALL]}, "two have one label"),
        ({"name": "mixture", "sources": [{"label": "x", "name": "mixture"}]}, "a source cannot be a mixture"),
        ({"name": "mixture", "sources": [{**SMALL, "weight": 0}]}, "greater than 0"),
    ],
)
def test_a_mixture_that_is_none_is_refused(changes, problem):
    with pytest.raises(ValidationError, match=problem):
        TaskConfig(**changes)


def test_errors_name_the_source():
    with pytest.raises(ConfigError, match="task.sources, b: task.name: cannot read /no/file"):
        build_task(mixture(SMALL, {"label": "b", "name": "jsonl:/no/file"}))
    with pytest.raises(ConfigError, match="task.sources: weights so unlike"):
        build_task(mixture(SMALL, {**LONG, "weight": 1e-14}))


def questions(task):
    training = {task.prompt(index).text for index in range(task.num_prompts)}
    return training, {task.evaluation_prompt(index).text for index in range(task.num_evaluation_prompts)}


@pytest.fixture
def rows(tmp_path):
    """The same forty questions as lines of text, as a table, and as a table of messages after a system's."""
    texts = [f"what is {number}?" for number in range(40)]
    lines = [{"prompt": text, "answer": "1"} for text in texts]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    pq.write_table(pa.Table.from_pylist(lines), tmp_path / "table.parquet")
    turns = [[{"role": "system", "content": "Be."}, {"role": "user", "content": text}] for text in texts]
    pq.write_table(pa.Table.from_pylist([{"m": each, "answer": "1"} for each in turns]), tmp_path / "turns.parquet")
    data = {"cache_dir": str(tmp_path / "cache")}
    return {
        "lines": {"name": f"jsonl:{tmp_path}/lines.jsonl"},
        "table": {"name": f"parquet:{tmp_path}/table.parquet", "data": data},
        "turns": {"name": f"parquet:{tmp_path}/turns.parquet", "data": {**data, "messages": "m"}},
    }


@pytest.mark.parametrize("pair", [("lines", "table"), ("table", "turns"), ("turns", "lines"), ("lines", "lines")])
def test_what_one_source_holds_out_no_other_one_trains_on(rows, pair, caplog):
    first, second = ({"label": label, **rows[name]} for label, name in zip("ab", pair, strict=True))
    config = mixture({**first, "evaluation_size": 2}, {**second, "evaluation_size": 9, "system_prompt": "Think."})

    with caplog.at_level(logging.WARNING):
        task = build_task(config)

    training, held_out = questions(task)
    # Equal questions have equal digests, so a holds out what b does, or fewer; messages are digested with their roles.
    assert len(held_out) in range(9, 12)
    assert not training & held_out
    assert len(training | held_out) == 40
    assert "task.sources, a: " in caplog.text
    assert "are held out by another source" in caplog.text
    assert task.digest == build_task(config).digest


def test_held_out_prompts_that_a_run_trains_on_are_counted(rows):
    def task(name, size, **more):
        return build_task(TaskConfig(**rows[name], evaluation_size=size, **more))

    run = task("table", 5, system_prompt="Think.")
    training, _ = questions(run)
    for name in rows:
        _, held_out = questions(evaluated := task(name, 15))
        assert num_trained_on(run, evaluated) == len(training & held_out) > 0
    assert num_trained_on(run, run) == num_trained_on(run, ArithmeticTask(digits=1)) == 0
    config = mixture({"label": "a", **rows["lines"], "evaluation_size": 5}, LONG)
    assert num_trained_on(build_task(config), task("lines", 15)) == 10


def test_a_source_that_others_hold_out_whole_is_refused(rows, tmp_path):
    (tmp_path / "few.jsonl").write_text('{"prompt": "what is 50?", "answer": "1"}')
    (tmp_path / "other.jsonl").write_text('{"prompt": "what is 60?", "answer": "1"}')
    one = {"label": "a", "name": f"jsonl:{tmp_path}/few.jsonl", "evaluation_path": str(tmp_path / "other.jsonl")}
    two = {"label": "b", **rows["lines"], "evaluation_path": str(tmp_path / "few.jsonl")}
    with pytest.raises(ConfigError, match="task.sources, a: other sources hold out every prompt of it"):
        build_task(mixture(one, two))


def test_generated_sources_that_hold_out_other_numbers_are_refused():
    with pytest.raises(ConfigError, match="holds out other numbers of 1 digits than small") as caught:
        build_task(mixture(SMALL, {**LONG, "seed": 3}))
    assert caught.value.key == "task.sources, long.seed"
    assert build_task(mixture(SMALL, {**LONG, "seed": 3, "digits": 2})).num_prompts
    training, held_out = questions(build_task(mixture(SMALL, LONG)))
    assert not training & held_out


def test_numbers_by_source_are_of_the_groups_of_a_step():
    def queued(source, *rewards):
        group = make_group(0)
        rollouts = tuple(dataclasses.replace(group.rollouts[0], reward=reward) for reward in rewards)
        group = dataclasses.replace(group, rollouts=rollouts)
        return QueuedGroup(group=group, policy_age_s=0.0, queue_age_s=0.0, source=source)

    found = by_source([queued("a", 1.0, 0.0), queued("b", 0.0, 0.0), queued("a", 1.0, 1.0)])

    assert [(source.label, source.num_groups, source.reward_mean) for source in found] == [
        ("a", 2, 0.75),
        ("b", 1, 0.0),
    ]
    assert by_source([queued("", 1.0, 0.0)]) == ()


def test_a_source_with_a_reward_of_another_service_is_refused():
    class Judged:
        num_prompts, num_evaluation_prompts, digest = 4, 2, "d"
        remote = MappingProxyType({"judge": object()})

    with pytest.raises(ConfigError, match="source small has judge") as caught:
        MixtureTask([Source(label="small", weight=1.0, task=Judged())])
    assert caught.value.key == "task.sources"


def test_what_may_have_another_value_elsewhere_is_that_of_the_prompts_own_source():
    code = object.__new__(CodeReward)
    code.num_workers, code.digest, code._near = 1, "d", NearLimit()
    tested = WeightedTask(ArithmeticTask(digits=1), [NamedReward(name="tests", weight=1.0, source=code)])
    sources = (("a", ArithmeticTask(digits=1)), ("b", tested))
    task = MixtureTask([Source(label=label, weight=1.0, task=each) for label, each in sources])
    plain, coded = task.prompt(0), task.prompt(task.num_prompts - 1)
    code._near.add(coded.inner.index, "x")

    assert task.doubts(coded, "x") == Doubts(near=("tests",), by_code=("tests",))
    assert task.doubts(coded, "y") == Doubts(by_code=("tests",))
    assert task.doubts(plain, "x") == Doubts()
