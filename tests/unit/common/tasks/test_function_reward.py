"""The user's own reward: where it is found, which files it is, and what it cannot do to a service."""

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from heterorl.common.errors import AnswerUnreadable, ConfigError, RewardError
from heterorl.common.process.config_file import load
from heterorl.common.tasks.rewards.worker_pool import MAX_PRINTED, PATIENCE, SCRIPT, is_outage
from heterorl.common.tasks.task import check_answer
from heterorl.common.tasks.task_config import TaskConfig, build_task
from heterorl.common.text.conversation import try_answers, try_reward
from heterorl.common.types.rollout import MAX_PART_NAME, MAX_PART_VALUE, MAX_REWARD_PARTS
from heterorl.coordinator.rpc.bounds import bound_of, text_problem
from heterorl.learner.learner_config import LearnerConfig

pytestmark = pytest.mark.process

REWARD = """
import os, sys, time
from helper import factor

def score(prompt, completion, answer):
    print("an answer?", {"parts": {"reward": 9}})
    os.write(1, b'{"parts": {"reward": 9}}' + bytes([10]))
    if completion == "hang":
        time.sleep(1000)
    while completion == "loop":
        pass
    if completion == "end":
        os._exit(3)
    if completion == "fork":
        child = os.fork()
        if child == 0:
            return -1.0
        os.waitpid(child, 0)
    if completion == "read":
        return float(len(sys.stdin.read()))
    return {"length": factor * len(completion), "right": float(completion == answer)}

def wrong(prompt, completion, answer):
    return {"nan": float("nan"), "none": None, "text": "x", "empty": {}, "list": [1],
            "huge": {"a": 1.0, "b": -1.1e15}, "most": 1e15}[completion]
"""


@pytest.fixture
def place(tmp_path):
    write(tmp_path, "mytask/rewards.py", REWARD)
    write(tmp_path, "mytask/words.txt", "one")
    write(tmp_path, "helper.py", "factor = 1.0")
    return tmp_path


def write(directory, name, text):
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def task_in(directory, reward="mytask.rewards:score", **options):
    return build_task(TaskConfig(digits=1, reward=reward, reward_path=str(directory), **options))


def digest_in(directory, reward="mytask.rewards:score"):
    return task_in(directory, reward).digest


def test_reward_gives_named_parts_whatever_it_prints_and_reads(place):
    task = task_in(place)
    prompt = task.prompt(0)

    parts = {part.name: part.value for part in task.score(prompt, prompt.answer)}

    assert parts == {"length": float(len(prompt.answer)), "right": 1.0}
    assert task.score(prompt, "read")[0].value == 0.0
    # Its forked child returns too.
    assert [task.score(prompt, text)[0].value for text in ("fork", "abc")] == [4.0, 3.0]
    assert task.digest != build_task(TaskConfig(digits=1)).digest
    assert task.evaluation_prompt(0).text
    assert "mytask" not in sys.modules


def test_what_a_reward_prints_is_logged_under_its_name_up_to_a_bound(place, caplog):
    write(
        place,
        "mytask/rewards.py",
        "def score(prompt, completion, answer):\n    print(completion)\n    print('y' * 50_000, flush=True)\n    return 1",
    )
    task = task_in(place)
    with caplog.at_level("INFO"):
        for said in range(2):
            task.score(task.prompt(0), str(said))
            # A thread reads it.
            while f"score prints: {said}\n" not in caplog.text or caplog.text.count("more is left out") <= said:
                os.sched_yield()

    assert len(caplog.text) < 4 * MAX_PRINTED


@pytest.mark.parametrize("completion", ["nan", "none", "text", "empty", "list", "no such key"])
def test_what_is_no_finite_number_is_an_error_and_no_reward(place, completion):
    task = task_in(place, "mytask.rewards:wrong")

    with pytest.raises(RewardError, match="prompt 0"):
        task.score(task.prompt(0), completion)


def test_a_value_that_no_learner_takes_is_an_error(place):
    task = task_in(place, "mytask.rewards:wrong")

    with pytest.raises(RewardError, match=r"returned -1.1e\+15 for b, at most 1e\+15 .* on prompt 0"):
        task.score(task.prompt(0), "huge")
    assert task.score(task.prompt(0), "most")[0].value == MAX_PART_VALUE


def test_a_reward_that_raises_names_the_users_own_line(place):
    task = task_in(place, "mytask.rewards:wrong")

    with pytest.raises(RewardError, match=r"KeyError: 'x' \(.*mytask/rewards.py, line \d+\)"):
        task.score(task.prompt(0), "x")


@pytest.mark.parametrize("error", ["ConnectionError", "BrokenPipeError", "TimeoutError"])
def test_a_function_that_reaches_no_server_fails_as_any_other(place, error):
    write(place, "mytask/rewards.py", f"def score(p, c, a):\n    raise {error}('gone')\n")
    task = task_in(place)
    with pytest.raises(RewardError, match=f"{error}: gone") as raised:
        task.score(task.prompt(0), "7")
    assert not is_outage(raised.value)


def test_a_reward_that_raises_with_the_completion_in_its_words_says_one_short_line(place):
    write(place, "mytask/rewards.py", "def score(p, c, a):\n    raise ValueError('not an answer: ' + c)\n")
    task = task_in(place)
    completion = "7\n\x1b[2J2026 CRITICAL forged \ud800" * 20_000

    with pytest.raises(RewardError, match=r"ValueError: not an answer: 7 .*\(.*mytask/rewards.py, line 2\)") as raised:
        task.score(task.prompt(0), completion)

    words = str(raised.value)
    assert len(words) < 1000
    assert words.isprintable()


@pytest.mark.parametrize("name", ["right\u00a0answer", "tags\n", "x" * (MAX_PART_NAME + 1), "\ud800"])
def test_a_part_whose_name_no_coordinator_takes_is_an_error_and_no_group(place, name):
    """A group with such a name would be refused for good, by every site that has this reward."""
    write(place, "mytask/rewards.py", f"def score(p, c, a):\n    return {{{name!r}: 1.0}}\n")
    task = task_in(place)

    with pytest.raises(RewardError, match="the name of a part.* on prompt 0") as raised:
        task.score(task.prompt(0), "x")
    assert str(raised.value).isprintable()


def test_a_part_whose_name_is_as_long_as_a_coordinator_takes_is_one(place):
    name = "\u00e9" * MAX_PART_NAME
    write(place, "mytask/rewards.py", f"def score(p, c, a):\n    return {{{name!r}: 1.0}}\n")

    assert task_in(place).score(task_in(place).prompt(0), "x")[0].name == name
    assert not text_problem(name, bound_of("RewardPart", "name"))
    assert bound_of("Rollout", "reward_parts").count >= MAX_REWARD_PARTS


def test_relative_files_of_a_reward_are_those_of_its_directory(place, monkeypatch):
    text = "def score(prompt, completion, answer):\n    return float(completion == open('mytask/words.txt').read())\n"
    write(place, "mytask/rewards.py", text)
    (place / "elsewhere").mkdir()
    monkeypatch.chdir(place / "elsewhere")
    task = task_in(place)

    assert task.score(task.prompt(0), "one")[0].value == 1.0


def test_the_directory_is_that_of_the_configuration_file(place, tmp_path, monkeypatch):
    other = place / "elsewhere"
    other.mkdir()
    file = write(place, "node.toml", '[task]\ndigits = 1\nreward = "mytask.rewards:score"\n')
    monkeypatch.chdir(other)

    config = load(LearnerConfig, file).task

    assert config.reward_path == str(place)
    assert build_task(config).digest == task_in(place).digest
    # What other processes are sent stays where it was.
    assert TaskConfig.model_validate_json(config.model_dump_json()) == config
    relative = load(LearnerConfig, file, ["task.reward_path=lib"]).task
    assert relative.reward_path == str(place / "lib")
    assert load(LearnerConfig, file, ["task.reward="]).task.reward_path == ""


@pytest.mark.parametrize("name", ["mytask/rewards.py", "mytask/words.txt", "mytask/other.py", "helper.py", "late.py"])
def test_digest_covers_the_package_and_what_it_imports_beside_it(place, name):
    write(place, "mytask/rewards.py", REWARD + "\ndef unused():\n    import late\n")
    write(place, "mytask/other.py", "")
    write(place, "late.py", "")
    before = digest_in(place)
    assert digest_in(place) == before

    path = place / name
    path.write_text(path.read_text() + "# changed\n")

    assert digest_in(place) != before


def test_digest_covers_what_is_imported_by_a_name_that_no_text_shows(place):
    write(
        place,
        "mytask/rewards.py",
        "import importlib\nimportlib.import_module('hel' + 'per')\n"
        + REWARD[1:].replace("from helper import factor", "factor = 1"),
    )
    before = digest_in(place)

    write(place, "helper.py", "factor = 3.0")

    assert digest_in(place) != before


def test_digest_covers_nothing_else_and_does_not_depend_on_the_place(place, tmp_path_factory):
    before = digest_in(place)
    write(place, "train.jsonl", "{}")
    write(place, "unrelated.py", "")
    write(place, "mytask/.rewards.py.swp", "")
    write(place, "mytask/__pycache__/x.pyc", "")
    assert digest_in(place) == before

    copy = tmp_path_factory.mktemp("copy")
    for name in ("mytask/rewards.py", "mytask/words.txt", "helper.py"):
        write(copy, name, (place / name).read_text())
    assert digest_in(copy) == before


def test_a_single_module_counts_alone(tmp_path):
    write(tmp_path, "alone.py", "def score(p, c, a):\n    return 1.0\n")
    before = digest_in(tmp_path, "alone:score")
    write(tmp_path, "beside.py", "")

    assert digest_in(tmp_path, "alone:score") == before


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("nothing", "'nothing' is not package.module:function"),
        ("mytask.rewards.score", "is not package.module:function"),
        ("mytsk.rewards:score", "no module mytsk in {place}.*next to the configuration file.*task.reward_path"),
        ("mytask.reward:score", "no module mytask.reward in {place}"),
        ("mytask.rewards:scoer", "has no function scoer; did you mean score"),
        ("helper:factor", "has no function factor"),
        ("broken:score", r"broken cannot be imported: SyntaxError.*broken.py"),
        ("ends:score", "ends cannot be imported: SystemExit"),
        ("needs:score", r"No module named 'no_such_package' \(.*needs.py, line 1\)"),
    ],
)
def test_what_cannot_be_loaded_is_said_with_place_and_remedy(place, reward, message):
    write(place, "broken.py", "def score(:")
    write(place, "ends.py", "raise SystemExit(1)")
    write(place, "needs.py", "import no_such_package")

    with pytest.raises(ConfigError, match="^task.reward: .*" + message.format(place=place)):
        task_in(place, reward)


def test_installed_packages_keep_their_names(place):
    # A file of ours never stands in for a package that others import.
    write(place, "json.py", "raise RuntimeError('shadowed')")
    write(place, "numpy.py", "raise RuntimeError('shadowed')")
    write(place, "mytask/rewards.py", "import json, numpy\n" + REWARD)

    assert task_in(place).score(task_in(place).prompt(0), "abc")[0].value == 3.0
    with pytest.raises(ConfigError, match=r"the name numpy stands for .*numpy.* and for .*numpy.py: rename"):
        task_in(place, "numpy:score")


def test_a_package_called_services_is_the_users_own(place):
    write(place, "services/__init__.py", "")
    write(place, "services/pricing.py", "factor = 2.0")
    write(place, "mytask/rewards.py", REWARD.replace("from helper", "from services.pricing"))

    task = task_in(place)

    assert task.score(task.prompt(0), "abc")[0].value == 6.0
    before = task.digest
    write(place, "services/pricing.py", "factor = 4.0")
    assert digest_in(place) != before


@pytest.mark.parametrize(
    ("completion", "limits", "message"),
    [
        ("hang", {"timeout_s": 0.5}, "no answer in 0.5 s"),
        # However long that takes by the clock.
        ("loop", {"cpu_s": 0.2}, "no answer in 0.2 s of processor time"),
        ("end", {}, "ended with code 3"),
    ],
)
def test_what_hangs_or_crashes_costs_one_answer(place, monkeypatch, completion, limits, message):
    task = task_in(place, reward_timeout_s=60.0)
    worker = task._reward.pool.workers[0]
    first = worker.process.pid

    assert (worker.cpu_s, worker.timeout_s) == (60.0, 60.0 * PATIENCE)
    with monkeypatch.context() as patch:
        for name, limit in limits.items():
            patch.setattr(worker, name, limit)
        with pytest.raises(RewardError, match=message):
            task.score(task.prompt(0), completion)

    assert task.score(task.prompt(0), "abc")[0].value == 3.0
    assert worker.process.pid != first
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


def test_a_worker_is_chosen_before_its_service_when_memory_is_full(place):
    worker = task_in(place)._reward.pool.workers[0]

    assert int(Path(f"/proc/{worker.process.pid}/oom_score_adj").read_text()) >= 500


def test_a_worker_that_reads_nothing_is_not_waited_for_either(place, monkeypatch):
    task = task_in(place, reward_timeout_s=60.0)
    worker = task._reward.pool.workers[0]
    os.kill(worker.process.pid, signal.SIGSTOP)

    # More than a pipe holds.
    with monkeypatch.context() as patch:
        patch.setattr(worker, "timeout_s", 0.5)
        with pytest.raises(RewardError, match="no answer in 0.5 s"):
            task.score(task.prompt(0), "x" * 1_000_000)
    assert task.score(task.prompt(0), "x" * 1_000_000)[0].value == 1e6


@pytest.mark.parametrize("is_by_kernel", [False, True])
def test_a_process_that_a_reward_started_ends_with_it(place, is_by_kernel):
    write(place, "mytask/rewards.py", "import subprocess, time, pathlib\n"
          "def score(p, c, a):\n"
          "    child = subprocess.Popen(['sleep', '1000'])\n"
          "    pathlib.Path(c).write_text(str(child.pid))\n"
          "    time.sleep(1000)\n")  # fmt: skip
    task, written = task_in(place, reward_timeout_s=600.0), place / "pid"
    with ThreadPoolExecutor(1) as thread:
        score = thread.submit(task.score, task.prompt(0), str(written))
        while not (written.exists() and written.read_text()):
            threading.Event().wait(0.02)
        worker = task._reward.pool.workers[0]
        # As its time limit does, or as the kernel without memory.
        os.kill(worker.process.pid, signal.SIGKILL) if is_by_kernel else worker.kill()
        with pytest.raises(RewardError, match="ended by SIGKILL"):
            score.result()

    child = int(written.read_text())
    while running(child):
        threading.Event().wait(0.02)


def running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_worker_ends_by_itself_when_nobody_is_left_to_kill_it(place):
    process = subprocess.Popen([sys.executable, "-P", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        job = {"kind": "function", "module": "mytask.rewards", "name": "score", "directory": str(place)}
        process.stdin.write(json.dumps(job).encode() + b"\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["ready"] is True
        request = {"prompt": "p", "completion": "hang", "answer": "a", "columns": {}, "cpu_s": 60.0, "limit_s": 0.5}
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()

        assert process.wait() == -signal.SIGALRM
    finally:
        process.kill()
        process.communicate()


def test_several_workers_score_a_group_at_once(place):
    # Each answer waits until three others are under way: one worker alone would never end.
    write(place, "mytask/rewards.py", "import os, pathlib, time\n"
          "def score(p, c, a):\n"
          "    here = pathlib.Path(c)\n"
          "    (here / str(os.getpid())).touch()\n"
          "    while len(list(here.iterdir())) < 3:\n"
          "        time.sleep(0.01)\n"
          "    return float(len(list(here.iterdir())))\n")  # fmt: skip
    task = task_in(place, reward_workers=3, reward_timeout_s=60)
    here = place / "here"
    here.mkdir()

    scores = task.score_all(task.prompt(0), [str(here)] * 6)

    assert [parts[0].value for parts in scores] == [3.0] * 6


FORMS = """
import random

def by_name(completion, level, answer=None, tags=(), **more):
    return {"level": float(level), "tags": float(len(tags)), "more": float(sorted(more) == ["messages", "note", "prompt", "whole"]),
            "answer": float(answer)}

def in_order(a, b, c, *, level):
    return float(level) + float((a, b, c) == ("q1", "seven", "1"))

def named_as_columns(level, text, note, **more):
    return float((level, text, note) == ("q1", "seven", "1")) + float(sorted(more) == ["messages", "tags", "whole"])

def two(prompt, completion):
    return float((prompt, completion) == ("q1", "seven"))

def thinking(completion, whole, messages):
    return {"rest": float(completion == "seven"), "whole": float(whole == "<think>six</think>seven"),
            "asked": float(messages[-1]["content"] == "q1")}

def whole_and_answer(whole, answer):
    return float((whole, answer) == ("<think>six</think>seven", "1"))

def whole_between(prompt, whole, answer):
    return float((prompt, whole, answer) == ("q1", "<think>six</think>seven", "1"))

def whole_and_columns(whole, **columns):
    return float((whole, columns["level"]) == ("<think>six</think>seven", 1))

def response(prompt, response, answer):
    return float((prompt, response, answer) == ("q1", "seven", "1"))

def no_column(response, answer):
    return 1.0

def trl(prompts, completions, answer, **columns):
    assert sorted(columns) == ["level", "note", "tags"], columns
    assert prompts == ["q1"] and completions == ["<think>six</think>seven"], (prompts, completions)
    return [level + one for level, one in zip(columns["level"], answer)]

def trl_short(completions, level, **kwargs):
    return [float(len(one)) for one in completions]

def trl_chat(prompts, completions, **kwargs):
    return [float(len(one)) + (each[-1]["content"] == "seven") + (each[0]["role"] == "assistant")
            for one, each in zip(prompts, completions)]

def trl_ids(completions, completion_ids, **kwargs):
    return [0.0]

def trl_none(completions, **kwargs):
    return [None]

async def later(completion):
    return 1.0

def by_chance(completion):
    return {"kept": 1.0, "drawn": random.random()}

def as_text(completion):
    return "0.7"


def trl_number(completions, **kwargs):
    return 1.0

def missing(completion, difficulty):
    return 1.0


def maybe(completion, answer="none"):
    return 1.0


def maybe_third(question, text, solution=None):
    return 1.0


def always(completion, answer):
    return 1.0


def third(question, text, solution):
    return 1.0


def trl_answer(completions, answer, **kwargs):
    return [1.0]


def trl_maybe(completions, answer=None, **kwargs):
    return [1.0]
"""


def formed(directory, reward, rows=None, **options):
    write(directory, "forms.py", FORMS)
    rows = rows or [{"prompt": f"q{n}", "answer": n, "level": n, "tags": ["a", "b"], "note": None} for n in (1, 1, 2)]
    path = write(directory, "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return build_task(
        TaskConfig(
            name=f"jsonl:{path}", evaluation_size=1, reward=f"forms:{reward}", reward_path=str(directory), **options
        )
    )


def q1(task):
    every = [task.prompt(index) for index in range(task.num_prompts)] + [task.evaluation_prompt(0)]
    return next(prompt for prompt in every if prompt.messages or prompt.text == "q1")


@pytest.mark.parametrize(
    ("reward", "parts"),
    [
        ("by_name", {"level": 1.0, "tags": 2.0, "more": 1.0, "answer": 1.0}),
        ("in_order", {"reward": 2.0}),
        ("named_as_columns", {"reward": 2.0}),
        ("two", {"reward": 1.0}),
        ("thinking", {"rest": 1.0, "whole": 1.0, "asked": 1.0}),
        ("whole_and_answer", {"reward": 1.0}),
        ("whole_between", {"reward": 1.0}),
        ("whole_and_columns", {"reward": 1.0}),
        ("response", {"reward": 1.0}),
        ("trl", {"reward": 2.0}),
        ("trl_short", {"reward": 23.0}),
    ],
)
def test_a_reward_is_given_what_its_signature_asks_for(tmp_path, reward, parts):
    task = formed(tmp_path, reward)
    try:
        found = task.score(q1(task), "<think>six</think>seven")
        assert {part.name: part.value for part in found} == parts
    finally:
        task.close()


def test_a_reward_is_given_the_column_of_the_prompt_by_its_name(tmp_path):
    write(tmp_path, "named.py", "def score(completion, question, **others):\n    return float(question == 'q1')\n")
    rows = [{"question": f"q{number}", "answer": "1"} for number in range(3)]
    path = write(tmp_path, "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    data = {"prompt": "question"}
    task = build_task(
        TaskConfig(name=f"jsonl:{path}", evaluation_size=1, reward="named:score", reward_path=str(tmp_path), data=data)
    )
    try:
        prompts = [*map(task.prompt, range(task.num_prompts)), task.evaluation_prompt(0)]
        found = {prompt.text: task.score(prompt, "x")[0].value for prompt in prompts}
    finally:
        task.close()
    assert found == {"q0": 0.0, "q1": 1.0, "q2": 0.0}


def test_messages_reach_a_reward_of_trl_as_messages(tmp_path):
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "q1"}]
    rows = [{"prompt": [*said[:1], {"role": "user", "content": f"q{n}"}]} for n in range(3)]

    task = formed(tmp_path, "trl_chat", rows)
    try:
        assert task.score(task.prompt(0), "seven")[0].value == 4.0
    finally:
        task.close()


def test_what_a_reward_cannot_be_given_is_said_at_the_start_or_by_its_name(tmp_path):
    with pytest.raises(ConfigError, match="task.reward: forms:trl_ids.*asks for completion_ids, which does not exist"):
        formed(tmp_path, "trl_ids")
    with pytest.raises(ConfigError, match="task.reward: forms:missing asks for difficulty; the row has answer, level"):
        formed(tmp_path, "missing")
    with pytest.raises(ConfigError, match="task.reward: forms:no_column asks for response; the row has answer"):
        formed(tmp_path, "no_column")
    for reward, words in (
        ("trl_none", "returned None"),
        ("trl_number", "a list of one number, and returned 1.0"),
        ("as_text", "returned '0.7', and no number"),
        ("later", "it is async: a reward is a plain function"),
    ):
        task = formed(tmp_path, reward)
        try:
            with pytest.raises(RewardError, match=words):
                task.score(q1(task), "seven")
        finally:
            task.close()


@pytest.mark.parametrize(("reward", "told"), [("by_chance", ["drawn"]), ("two", [])])
def test_a_reward_by_chance_is_told_at_the_start(tmp_path, caplog, reward, told):
    task = formed(tmp_path, reward)
    try:
        try_reward(task, None)
    finally:
        task.close()

    assert [record.args[1] for record in caplog.records if "arguments only" in record.getMessage()] == told


@pytest.mark.parametrize("without", [0, 3])
def test_a_row_without_a_column_of_the_reward_is_told_at_the_start_and_makes_no_group(tmp_path, caplog, without):
    rows = [{"prompt": f"q{n}", "answer": "1", "level": n} for n in range(5)]
    # The held-out row is q2.
    del rows[without]["level"]
    task = formed(tmp_path, "in_order", rows)
    try:
        try_answers(task)
        refused = 0
        for index in range(task.num_prompts):
            try:
                check_answer(task, task.prompt(index))
            except AnswerUnreadable as error:
                refused += "forms:in_order asks for level; the row has" in str(error)
    finally:
        task.close()

    told = [
        record for record in caplog.records if "1 of 4 rows that were tried cannot be scored" in record.getMessage()
    ]
    assert refused == len(told) == 1


@pytest.mark.parametrize("data", [{}, {"answer": ""}])
def test_a_reward_that_asks_for_answers_is_refused_where_the_rows_have_none(tmp_path, data):
    rows = [{"prompt": f"q{n}", "level": n} for n in range(3)]

    for reward in ("always", "third", "trl_answer"):
        with pytest.raises(
            ConfigError, match=f"task.data.answer: the row has no answer, and forms:{reward} asks for one"
        ):
            formed(tmp_path, reward, rows, data=data)
    for reward in ("maybe", "maybe_third", "trl_maybe", "two"):
        formed(tmp_path, reward, rows, data=data).close()


def test_trl_may_ask_for_a_column_of_answers_that_nothing_else_reads(tmp_path):
    formed(tmp_path, "trl_answer", data={"answer": ""}).close()
    with pytest.raises(ConfigError, match="task.data.answer: the row has no answer"):
        formed(tmp_path, "always", data={"answer": ""})
