"""Prompts, held-out prompts and verifiable scores."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from importlib.metadata import version

import pytest

from heterorl.common.errors import ConfigError, RewardError
from heterorl.common.tasks.arithmetic import ArithmeticTask
from heterorl.common.tasks.rewards import answer_match
from heterorl.common.tasks.rewards.answer_match import MAX_MEMORY_BYTES, MathVerifier
from heterorl.common.tasks.rewards.worker_pool import SCRIPT
from heterorl.common.tasks.task_config import TaskConfig, build_task


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
    assert task.score(training[0], f"<think>Carry</think>{training[0].answer}")[0].value == 1.0
    assert task.score(training[0], training[0].answer + "1")[0].value == 0.0


def test_arithmetic_seed_permutes_all_pairs_and_seed_zero_is_the_default():
    plain, other = ArithmeticTask(digits=1), ArithmeticTask(digits=1, seed=3)

    def texts(task):
        training = [task.prompt(index).text for index in range(task.num_prompts)]
        return training, [task.evaluation_prompt(index).text for index in range(task.num_evaluation_prompts)]

    # 100 pairs; 100 // 19 * 19 = 95 of them are used: 90 in training, 5 held out
    training, held_out = texts(other)
    assert (len(training), len(held_out)) == (90, 5)
    assert len({*training, *held_out}) == 95
    assert texts(plain) != texts(other)
    assert texts(plain) == texts(ArithmeticTask(digits=1, seed=0))
    assert plain.digest == ArithmeticTask(digits=1, seed=0).digest != other.digest
    assert build_task(TaskConfig(digits=1, seed=3)).digest == other.digest


def test_task_digest_depends_on_its_options():
    digests = {build_task(TaskConfig(digits=digits)).digest for digits in (1, 2, 3)}

    assert len(digests) == 3


@pytest.mark.parametrize(
    "name", ["unknown", "arithmetic:3", "jsonl:", "reasoning_gym:no_such_dataset", "jsonl:/no/file"]
)
def test_wrong_task_name_names_its_key(name):
    with pytest.raises(ConfigError, match="task.name"):
        build_task(TaskConfig(name=name))


@pytest.mark.process
def test_reasoning_gym_datasets_work_by_name():
    task = build_task(
        TaskConfig(name="reasoning_gym:basic_arithmetic", size=20, evaluation_size=5, reward_timeout_s=20)
    )
    prompt, held_out = task.prompt(3), task.evaluation_prompt(3)

    assert (task.num_prompts, task.num_evaluation_prompts) == (20, 5)
    try:
        assert task.score(prompt, prompt.answer)[0].value == 1.0
        assert task.score(held_out, held_out.answer)[0].value == 1.0
        assert task.score(prompt, "nonsense")[0].value < 1.0
    finally:
        task.close()
    assert prompt.text != held_out.text


# Coins have few different texts and additions of small numbers repeat: seeds alone keep neither apart.
@pytest.mark.parametrize("name", ["coin_flip", "chain_sum"])
def test_reasoning_gym_never_trains_on_a_held_out_prompt(name):
    task = build_task(TaskConfig(name=f"reasoning_gym:{name}", size=600, evaluation_size=100))

    training = {task.prompt(index).text for index in range(task.num_prompts)}
    held_out = {task.evaluation_prompt(index).text for index in range(task.num_evaluation_prompts)}

    assert training
    assert held_out
    assert not training & held_out


@pytest.mark.process
def test_reasoning_gym_does_not_score_a_prompt_of_another_task():
    task = build_task(TaskConfig(name="reasoning_gym:chain_sum", size=20, evaluation_size=5, reward_timeout_s=20))
    other = build_task(TaskConfig(name="reasoning_gym:chain_sum", size=20, evaluation_size=5, seed=9))

    assert task.digest != other.digest
    try:
        with pytest.raises(RewardError, match="not of this data set"):
            task.score(other.prompt(0), "1")
    finally:
        task.close()


def lines(tmp_path, *rows, name="task.jsonl"):
    path = tmp_path / name
    path.write_bytes(b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows))
    return path


def prompts_of(task):
    training = [task.prompt(index).text for index in range(task.num_prompts)]
    return training, [task.evaluation_prompt(index).text for index in range(task.num_evaluation_prompts)]


def test_jsonl_holds_some_out_and_matches_exactly(tmp_path):
    path = lines(tmp_path, *({"prompt": f"p{i}", "answer": i} for i in range(6)), b"")
    task = build_task(TaskConfig(name=f"jsonl:{path}", evaluation_size=2))

    training, held_out = prompts_of(task)
    assert (len(training), len(held_out)) == (4, 2)
    assert {*training, *held_out} == {f"p{i}" for i in range(6)}
    right = task.prompt(1).answer
    assert task.score(task.prompt(1), f" {right} ")[0].value == 1.0
    assert task.score(task.prompt(1), right + "0")[0].value == 0.0


def test_fewer_held_out_prompts_than_asked_for_are_said(tmp_path, caplog):
    path = lines(tmp_path, *({"prompt": f"p{i}", "answer": i} for i in range(12)))

    with caplog.at_level("INFO"):
        assert build_task(TaskConfig(name=f"jsonl:{path}", evaluation_size=6)).num_evaluation_prompts == 6
        (counted,) = caplog.messages
        assert build_task(TaskConfig(name=f"jsonl:{path}", evaluation_size=12)).num_evaluation_prompts == 6

    assert counted.startswith("task.name: 6 prompts and 6 held out, digest ")
    told = "task.evaluation_size is 12, but 6 of 12 different prompts are held out, at most half"
    assert caplog.messages == [counted, told, counted]


def test_held_out_rows_that_repeat_are_counted_as_different_prompts(tmp_path, caplog):
    path = lines(tmp_path, *({"prompt": f"p{i % 4}", "answer": i % 4} for i in range(12)))

    with caplog.at_level("INFO"):
        task = build_task(TaskConfig(name=f"jsonl:{path}", evaluation_size=2))

    assert task.held_out_words == "6 held out (2 different)"
    assert caplog.messages[0].startswith("task.name: 6 prompts and 6 held out (2 different), digest ")


def test_a_relative_path_that_is_missing_is_told_with_its_whole_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="relative to the working directory: " + str(tmp_path / "q.jsonl")):
        build_task(TaskConfig(name="jsonl:q.jsonl"))
    with pytest.raises(ConfigError, match=r"for CSV name its directory: hf:/data\[train\] reads"):
        build_task(TaskConfig(name="csv:q.csv"))


@pytest.mark.parametrize(
    ("data", "kept"),
    [
        ({"where": {"level": 3}}, [3]),
        ({"where": {"level": [1, 2], "kind": "sum"}}, [1]),
        ({"at_least": {"level": 3}}, [3, 4]),
        ({"at_least": {"level": 2}, "at_most": {"level": 3}}, [2, 3]),
        ({"where": {"done": True}}, [4]),
    ],
)
def test_jsonl_keeps_the_rows_that_the_columns_say(tmp_path, data, kept):
    rows = [
        {"prompt": f"q{n}", "answer": "1", "level": n, "kind": "sum" if n % 2 else "product", "done": n == 4 or n}
        for n in (1, 2, 3, 4)
    ]
    rows.append({"prompt": "q5", "answer": "1", "level": None, "kind": "none", "done": None})
    name = f"jsonl:{lines(tmp_path, *rows)}"
    held_out = {"evaluation_path": str(lines(tmp_path, {**rows[0], **rows[kept[0] - 1], "prompt": "other"}, name="b"))}

    task = build_task(TaskConfig(name=name, data=data, **held_out))

    assert sorted(task.prompt(index).text for index in range(task.num_prompts)) == [f"q{n}" for n in kept]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"where": {"levle": 3}}, r"task\.data\.where\.levle: .*line 1: has no levle; its columns are: .*level"),
        ({"at_least": {"kind": 3}}, r"task\.data\.at_least\.kind: .*line 1: kind is 'sum'"),
        ({"where": {"level": 9}}, "no prompt is left of 2 rows"),
        ({"where": {"none": 9}}, r"task\.data\.where\.none: none is null in each row"),
        ({"where": {"level": 1}, "at_most": {"none": 9}}, r"task\.data\.at_most\.none: none is null in each row"),
        ({"evaluation_split": "test"}, r"task\.data\.evaluation_split: files have no splits"),
    ],
)
def test_jsonl_names_a_filter_that_keeps_nothing_or_has_no_column(tmp_path, data, problem):
    rows = [{"prompt": f"q{n}", "answer": "1", "level": n, "kind": "sum", "none": None} for n in (1, 2)]

    with pytest.raises(ConfigError, match=problem):
        build_task(TaskConfig(name=f"jsonl:{lines(tmp_path, *rows)}", data=data))


def test_jsonl_refuses_half_a_surrogate_pair_only_in_rows_that_filters_keep(tmp_path):
    rows = [{"prompt": f"q{n}", "answer": "1", "language": "en"} for n in (1, 2, 3)]
    path = lines(tmp_path, *rows, b'{"prompt": "\\ud800", "answer": "1", "language": "\\udc00"}')

    task = build_task(TaskConfig(name=f"jsonl:{path}", data={"where": {"language": "en"}}, evaluation_size=1))
    assert task.num_prompts + task.num_evaluation_prompts == 3
    with pytest.raises(ConfigError, match="line 4: half a surrogate pair"):
        build_task(TaskConfig(name=f"jsonl:{path}"))


def test_jsonl_gives_a_reward_lists_and_objects_as_json(tmp_path):
    answers = [{"tests": ["f", "assert f(2) == 4"]}, ["f"], 3]
    path = lines(tmp_path, *({"prompt": str(number), "answer": answer} for number, answer in enumerate(answers)))
    task = build_task(TaskConfig(name=f"jsonl:{path}", evaluation_size=1))

    given = {prompt.text: prompt.answer for prompt in [task.prompt(0), task.prompt(1), task.evaluation_prompt(0)]}
    assert given == {"0": '{"tests": ["f", "assert f(2) == 4"]}', "1": '["f"]', "2": "3"}


def test_jsonl_keeps_repeated_prompts_on_one_side(tmp_path):
    path = lines(tmp_path, *({"prompt": f"p{i % 4}", "answer": i} for i in range(8)))
    training, held_out = prompts_of(build_task(TaskConfig(name=f"jsonl:{path}", evaluation_size=2)))

    assert len(training) == len(held_out) == 4
    assert not {*training} & {*held_out}


def test_jsonl_split_does_not_depend_on_the_order_of_lines(tmp_path):
    rows = [{"prompt": f"p{i}", "answer": i} for i in range(20)]
    forward = build_task(TaskConfig(name=f"jsonl:{lines(tmp_path, *rows, name='a')}", evaluation_size=5))
    backward = build_task(TaskConfig(name=f"jsonl:{lines(tmp_path, *rows[::-1], name='b')}", evaluation_size=5))

    assert {*prompts_of(forward)[1]} == {*prompts_of(backward)[1]}
    assert forward.digest != backward.digest


def test_jsonl_takes_held_out_prompts_from_their_own_file(tmp_path):
    training = lines(tmp_path, {"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2})
    held_out = lines(tmp_path, {"prompt": "c", "answer": 3}, name="held_out.jsonl")

    task = build_task(TaskConfig(name=f"jsonl:{training}", evaluation_path=str(held_out)))

    assert prompts_of(task) == (["a", "b"], ["c"])
    assert task.evaluation_prompt(0).answer == "3"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "b", "answer": 2}], "task.evaluation_path.*1 prompts.*held_out.jsonl"),
        (
            [{"messages": [{"role": "user", "content": "b"}], "answer": 2}],
            "task.evaluation_path.*1 prompts.*held_out.jsonl",
        ),
        ([], "task.evaluation_path.*no prompts"),
        ([b"{"], "task.evaluation_path.*held_out.jsonl, line 1"),
    ],
)
def test_wrong_evaluation_file_names_its_key(tmp_path, rows, message):
    training = lines(tmp_path, {"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2})
    held_out = lines(tmp_path, *rows, name="held_out.jsonl")

    with pytest.raises(ConfigError, match=message):
        build_task(TaskConfig(name=f"jsonl:{training}", evaluation_path=str(held_out)))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "a", "answer": "b"}], "at least 2"),
        ([{"prompt": "a"}, {}], "line 1"),
        ([{"prompt": "a", "answer": "b"}, b"not json"], "line 2"),
        ([{"prompt": 3, "answer": "b"}], "line 1"),
        ([b"x" * (2 << 20)], "longer than"),
        ([b"[" * 900_000], "line 1"),
        ([{"prompt": "a", "answer": []}], "line 1"),
        ([{"prompt": "", "answer": "b"}], "line 1.*empty"),
        ([b'{"prompt": "\\ud800", "answer": "b"}'], "line 1.*surrogate"),
        ([b'{"prompt": "\xed\xa0\x80", "answer": "b"}'], "line 1.*surrogate"),
        ([b"\xff\xfe"], "line 1"),
        ([{"prompt": "a", "answer": "b"}, {"prompt": "a", "answer": "c"}], "at least 2"),
    ],
)
def test_bad_jsonl_names_file_and_line(tmp_path, rows, message):
    with pytest.raises(ConfigError, match=message):
        build_task(TaskConfig(name=f"jsonl:{lines(tmp_path, *rows)}"))


@pytest.mark.process
@pytest.mark.timeout(120)
def test_math_verify_compares_mathematics_and_survives_what_hangs_it(tmp_path, monkeypatch):
    # T13: a verifier that hangs is killed, and its error is not a zero reward.
    path = lines(tmp_path, *({"prompt": f"half{mark}", "answer": "$\\frac{1}{2}$"} for mark in "?!"))
    task = build_task(TaskConfig(name=f"jsonl:{path}", match="math_verify", reward_timeout_s=20))
    assert task.score(task.prompt(0), "it is $0.5$")[0].value == 1.0
    assert task.score(task.prompt(0), "it is $0.4$")[0].value == 0.0

    # Processor time alone, however long it takes by the clock.
    monkeypatch.setattr(answer_match, "PATIENCE", 1000.0)
    verifier = MathVerifier(timeout_s=0.5)
    try:
        # What takes too long to compare is wrong, and another machine may have had the time.
        assert verifier.verify(answer="$2$", completion=HANGS) is False
        assert verifier.near.names("correct", "$2$", HANGS)
        assert verifier.verify(answer="$2$", completion="$2$") is True
        assert not verifier.near.names("correct", "$2$", "$2$")
        with pytest.raises(RewardError, match="cannot be parsed"):
            verifier.verify(answer="", completion="$2$")
        # An answer that cannot be parsed in time is no fault of the completion.
        with pytest.raises(RewardError, match="the right answer takes more than 0.5 s of processor time"):
            verifier.verify(answer="(" * 30 + "1" + ")" * 30, completion="$2$")
    finally:
        verifier.close()
        task._verifier.close()


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("answer", "values"), [([3, 4], [1, 1, 1, 0]), ("[3, 4]", [0, 0, 1, 0])])
def test_a_list_of_two_numbers_is_its_values_and_its_text_an_interval(tmp_path, answer, values):
    rows = ({"prompt": f"{number}?", "facts": {"right": answer}} for number in range(2))
    data = {"answer": "facts.right"}
    task = build_task(TaskConfig(name=f"jsonl:{lines(tmp_path, *rows)}", match="math_verify", data=data))
    try:
        said = ("\\boxed{3,4}", "3 and 4", "\\boxed{[3,4]}", "\\boxed{3}")
        assert [task.score(task.prompt(0), each)[0].value for each in said] == values
    finally:
        task.close()


def test_digest_says_what_decides_a_comparison(tmp_path, monkeypatch):
    path = lines(tmp_path, *({"prompt": f"{number}?", "answer": "2"} for number in range(2)))

    def digest(match="math_verify", **options):
        task = build_task(TaskConfig(name=f"jsonl:{path}", match=match, **options))
        task.close()
        return task.digest

    first, exact = digest(), digest("exact")
    # A longer limit changes no comparison.
    assert digest(reward_timeout_s=60) == first != digest(reward_timeout_s=1)
    for package in ("math-verify", "latex2sympy2_extended", "sympy"):
        with monkeypatch.context() as patch:
            patch.setattr(answer_match, "version", lambda name, own=package: "0" if name == own else version(name))
            assert digest() != first
            assert digest("exact") == exact


@pytest.mark.process
@pytest.mark.timeout(120)
def test_the_first_answer_after_a_start_has_its_whole_time():
    # What the library makes at its first use takes longer.
    verifier = MathVerifier(timeout_s=0.05)
    verifier.pool.workers[0].timeout_s = 60.0
    try:
        assert verifier.verify(answer="$2$", completion="$2$") is True
        os.kill(verifier.pool.workers[0].process.pid, signal.SIGKILL)
        verifier.pool.workers[0].process.wait()
        assert verifier.verify(answer="$2$", completion="$2$") is True
    finally:
        verifier.close()


@pytest.fixture
def verifier():
    verifier = MathVerifier(timeout_s=20.0)
    yield verifier
    verifier.close()


HANGS = "$9^{9^{9^{9^9}}}$ is $\\boxed{9^{9^{9^{9^9}}}}$"


@pytest.mark.process
@pytest.mark.timeout(120)
def test_math_worker_ends_by_itself_when_nobody_is_left_to_kill_it():
    process = subprocess.Popen([sys.executable, "-P", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        process.stdin.write(json.dumps({"kind": "math_verify", "max_memory_bytes": MAX_MEMORY_BYTES}).encode() + b"\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["ready"] is True
        process.stdin.write(
            json.dumps({"answer": "$2$", "completion": HANGS, "cpu_s": 60.0, "limit_s": 1.0}).encode() + b"\n"
        )
        process.stdin.flush()

        # Killed by its own alarm inside one step of C; our end of the pipes stays open and says nothing.
        assert process.wait() == -signal.SIGALRM
    finally:
        process.kill()
        process.communicate()


@pytest.mark.process
@pytest.mark.timeout(120)
def test_math_worker_is_replaced_after_a_crash_and_its_memory_is_bounded(verifier):
    assert verifier.verify(answer="$2$", completion="$2$") is True
    first = verifier.pool.workers[0].process.pid
    assert resource.prlimit(first, resource.RLIMIT_AS) == (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES)
    os.kill(first, signal.SIGKILL)
    verifier.pool.workers[0].process.wait()

    assert verifier.verify(answer="$2$", completion="$3$") is False
    assert verifier.pool.workers[0].process.pid != first


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "function", ["math_verify.grader.sympy_expr_eq", "math_verify.parser.extract_target_from_pred"]
)
def test_math_worker_out_of_memory_is_replaced_and_the_answer_may_be_right(tmp_path, monkeypatch, function):
    module, name = function.rsplit(".", 1)
    # Python imports this file first in each worker.
    (tmp_path / "sitecustomize.py").write_text(
        f"import {module} as library\n"
        f"real = library.{name}\n"
        f"def {name}(*given, **options):\n"
        "    if '13' in str(given):\n"
        "        raise MemoryError\n"
        "    if '14' in str(given):\n"
        "        raise RecursionError\n"
        "    return real(*given, **options)\n"
        f"library.{name} = {name}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    verifier = MathVerifier(timeout_s=20.0)
    try:
        assert verifier.verify(answer="$2$", completion="the sum of it comes to $2$") is True
        (worker,) = verifier.pool.workers
        first = worker.process
        # Another error of the library is a wrong answer.
        assert verifier.verify(answer="$2$", completion="the sum of it comes to $14$") is False
        assert worker.process is first
        assert not verifier.near.names("correct", "$2$", "the sum of it comes to $14$")

        assert verifier.verify(answer="$2$", completion="the sum of it comes to $13$") is False
        assert worker.process is None
        assert verifier.near.names("correct", "$2$", "the sum of it comes to $13$")
        assert verifier.verify(answer="$2$", completion="the sum of it comes to $2$") is True
    finally:
        verifier.close()


@pytest.mark.process
@pytest.mark.timeout(120)
def test_math_worker_that_gets_no_processor_says_nothing_of_the_answer():
    verifier = MathVerifier(timeout_s=60.0)
    try:
        assert verifier.verify(answer="$2$", completion="$2$") is True
        (worker,) = verifier.pool.workers
        assert worker.timeout_s == answer_match.LIMIT_S * answer_match.PATIENCE
        worker.timeout_s = 0.5
        os.kill(worker.process.pid, signal.SIGSTOP)
        with pytest.raises(RewardError, match="no answer in 0.5 s"):
            verifier.verify(answer="$2$", completion="$3$")
        assert not verifier.near.names("correct", "$2$", "$3$")
    finally:
        verifier.close()


@pytest.mark.process
@pytest.mark.timeout(120)
def test_math_verify_works_in_a_process_with_many_descriptors(verifier):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("this machine allows fewer than 2048 descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    # select() knows descriptors below 1024 only; the worker's pipes come after these.
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert verifier.verify(answer="$2$", completion="$2$") is True
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_reasoning_gym_has_the_same_prompts_when_two_threads_ask_for_new_ones(monkeypatch):
    import reasoning_gym

    made, second = [], []
    task = build_task(TaskConfig(name="reasoning_gym:chain_sum", size=20, evaluation_size=5))
    create = reasoning_gym.create_dataset
    waits = threading.Event()

    class Lock:
        """The task's own lock, and whether a second thread waits for it."""

        lock = task._entries._making

        def __enter__(self):
            if self.lock.locked():
                waits.set()
            self.lock.acquire()

        def __exit__(self, *_):
            self.lock.release()

    monkeypatch.setattr(task._entries, "_making", Lock())

    def slow(name, *, size, seed):
        made.append(seed)
        if len(made) == 1:
            # Another thread needs the same data set while the first one makes it.
            second.append(threading.Thread(target=task._entries.dataset, args=(40,)))
            second[0].start()
            waits.wait()
        return create(name, size=size, seed=seed)

    monkeypatch.setattr(reasoning_gym, "create_dataset", slow)
    task._entries.dataset(40)
    second[0].join()

    # One seed for each: what was made twice would stand in the place of the next.
    assert len(made) == len(set(made))


@pytest.mark.process
def test_worker_whose_parent_is_gone_ends_without_a_word():
    command = [sys.executable, "-P", str(SCRIPT)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as worker:
        worker.stdout.close()
        worker.stdin.write(b'{"kind": "exact"}\n')
        worker.stdin.close()

        assert worker.stderr.read() == b""
        assert worker.wait() == 0
