"""Prompts, held-out prompts and verifiable scores."""

import json

import pytest

from services.common.errors import ConfigError, RewardError
from services.common.tasks.arithmetic import ArithmeticTask
from services.common.tasks.math_verify import MathVerifier
from services.common.tasks.registry import TaskConfig, build_task


def reward_of_length(prompt, completion, answer):
    return {"length": len(completion) / 10, "right": float(answer in completion)}


def broken_reward(prompt, completion, answer):
    return float("nan") if completion == "nan" else 1 / 0


def test_arithmetic_shows_every_pair_once_and_holds_some_out():
    task = ArithmeticTask(digits=2)
    training = [task.prompt(index) for index in range(task.num_prompts)]
    held_out = [task.evaluation_prompt(index) for index in range(task.num_evaluation_prompts)]

    texts = [prompt.text for prompt in training + held_out]
    assert len(set(texts)) == len(texts) == 100 * 100 // 19 * 19
    # held-out numbers end in every digit, so that they measure the same skill
    assert {prompt.text[-2] for prompt in held_out} == set("0123456789")
    for prompt in training[:50]:
        left, right = prompt.text.rstrip("=").split("+")
        assert int(prompt.answer[::-1]) == int(left) + int(right)
    assert task.score(training[0], training[0].answer)[0].value == 1.0
    assert task.score(training[0], training[0].answer + "1")[0].value == 0.0


def test_task_digest_depends_on_its_options():
    digests = {build_task(TaskConfig(digits=digits)).digest for digits in (1, 2, 3)}

    assert len(digests) == 3


def test_own_reward_is_a_plain_function_by_dotted_path():
    path = f"{__name__}:reward_of_length"
    task = build_task(TaskConfig(digits=1, reward=path))
    prompt = task.prompt(0)

    parts = {part.name: part.value for part in task.score(prompt, prompt.answer)}

    assert parts == {"length": 0.2, "right": 1.0}
    assert task.digest != build_task(TaskConfig(digits=1)).digest
    assert task.evaluation_prompt(0).text
    failing = build_task(TaskConfig(digits=1, reward=f"{__name__}:broken_reward"))
    for completion in ("x", "nan"):
        with pytest.raises(RewardError):
            failing.score(prompt, completion)


@pytest.mark.parametrize("path", ["nothing", "no.such.module:f", f"{__name__}:missing", f"{__name__}:__name__"])
def test_wrong_reward_path_names_its_key(path):
    with pytest.raises(ConfigError, match="task.reward"):
        build_task(TaskConfig(reward=path))


@pytest.mark.parametrize(
    "name", ["unknown", "arithmetic:3", "jsonl:", "reasoning_gym:no_such_dataset", "jsonl:/no/file"]
)
def test_wrong_task_name_names_its_key(name):
    with pytest.raises(ConfigError, match="task.name"):
        build_task(TaskConfig(name=name))


def test_reasoning_gym_datasets_work_by_name():
    task = build_task(TaskConfig(name="reasoning_gym:basic_arithmetic", size=20, evaluation_size=5))
    prompt, held_out = task.prompt(3), task.evaluation_prompt(3)

    assert (task.num_prompts, task.num_evaluation_prompts) == (20, 5)
    assert task.score(prompt, prompt.answer)[0].value == 1.0
    assert task.score(held_out, held_out.answer)[0].value == 1.0
    assert task.score(prompt, "nonsense")[0].value < 1.0
    assert prompt.text != held_out.text


def lines(tmp_path, *rows):
    path = tmp_path / "task.jsonl"
    path.write_bytes(b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows))
    return path


def test_jsonl_holds_the_end_out_and_matches_exactly(tmp_path):
    path = lines(tmp_path, *({"prompt": f"p{i}", "answer": i} for i in range(6)), b"")
    task = build_task(TaskConfig(name=f"jsonl:{path}", evaluation_size=2))

    assert (task.num_prompts, task.num_evaluation_prompts) == (4, 2)
    assert task.evaluation_prompt(0).text == "p4"
    assert task.score(task.prompt(1), " 1 ")[0].value == 1.0
    assert task.score(task.prompt(1), "2")[0].value == 0.0


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "a", "answer": "b"}], "at least 2"),
        ([{"prompt": "a"}, {}], "line 1"),
        ([{"prompt": "a", "answer": "b"}, b"not json"], "line 2"),
        ([{"prompt": 3, "answer": "b"}], "line 1"),
        ([b"x" * (2 << 20)], "longer than"),
    ],
)
def test_bad_jsonl_names_file_and_line(tmp_path, rows, message):
    with pytest.raises(ConfigError, match=message):
        build_task(TaskConfig(name=f"jsonl:{lines(tmp_path, *rows)}"))


@pytest.mark.timeout(120)
def test_math_verify_compares_mathematics_and_survives_what_hangs_it(tmp_path):
    # T13: a verifier that hangs is killed, and its error is not a zero reward.
    path = lines(tmp_path, *({"prompt": "half?", "answer": "$\\frac{1}{2}$"} for _ in range(2)))
    task = build_task(TaskConfig(name=f"jsonl:{path}", match="math_verify", verify_timeout_s=20))
    assert task.score(task.prompt(0), "it is $0.5$")[0].value == 1.0
    assert task.score(task.prompt(0), "it is $0.4$")[0].value == 0.0

    verifier = MathVerifier(timeout_s=2.0)
    with pytest.raises(RewardError):
        verifier.verify(answer="$2$", completion="$9^{9^{9^{9^9}}}$ is $\\boxed{9^{9^{9^{9^9}}}}$")
    assert verifier.verify(answer="$2$", completion="$2$") is True
    with pytest.raises(RewardError, match="cannot be parsed"):
        verifier.verify(answer="", completion="$2$")
    verifier.close()
    task._verifier.close()
