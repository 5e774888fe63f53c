"""Completions of reasoning-gym in the real sandbox: scores as outside, and none reaches the service or another one."""

import dataclasses
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from heterorl.common.errors import ConfigError, RewardError
from heterorl.common.tasks.rewards.sandbox import bubblewrap, gym_reward
from heterorl.common.tasks.rewards.worker_pool import PATIENCE
from heterorl.common.tasks.sources.mixture import MixtureTask, Source
from heterorl.common.tasks.task import SystemPromptTask
from heterorl.common.tasks.task_config import TaskConfig, build_task

pytestmark = pytest.mark.process

COUNTDOWN = TaskConfig(name="reasoning_gym:countdown", size=8, evaluation_size=4, reward_timeout_s=20.0)


def opened(settings=COUNTDOWN):
    return build_task(settings)


@pytest.fixture(scope="module")
def task():
    task = opened()
    yield task
    task.close()


def run(code):
    """A completion that countdown's verifier runs as Python."""
    return f"exec({code!r})"


def value(task, completion):
    return task.score(task.prompt(0), completion)[0].value


def says(task, expression):
    """What Python inside says of an expression: its digits come out as a forged score."""
    code = f"import os, socket\nsaid = float({expression})\nos.write(3, f'value {{said}}\\n'.encode())"
    return value(task, run(code))


def is_sound(task):
    """Whether a right answer, a wrong one and none get what they should."""
    prompt = task.prompt(0)
    return [value(task, prompt.answer), value(task, "1"), value(task, "rubbish")] == [1.0, 0.05, 0.01]


def test_a_completion_reaches_no_file_no_environment_no_network_and_no_process(task, tmp_path, monkeypatch):
    mark = tmp_path / "mark"
    monkeypatch.setenv("SECRET", "s3cret")
    mine = opened()
    try:
        value(mine, f"__import__('os').system('id > {mark}; echo $SECRET >> {mark}')")
        assert not mark.exists()
        assert says(mine, "'SECRET' in os.environ") == 0.0
        # The way by which it says so is open.
        assert says(mine, "1") == 1.0
    finally:
        mine.close()
    assert says(task, f"os.path.exists({str(Path(__file__).parent)!r})") == 0.0
    assert says(task, "any(map(os.path.exists, ('/etc/passwd', '/proc/1', '/home', '/var')))") == 0.0
    assert says(task, "os.getuid() == 0") == 0.0
    code = "import os, socket\ntry:\n    socket.socket()\n    n = 0.0\nexcept OSError: n = 1.0\nos.write(3, f'value {n}\\n'.encode())"
    assert value(task, run(code)) == 1.0
    # Of the parent it has the pipe of its answer, and not those by which the service is spoken to.
    code = "import os, stat\nkinds = []\nfor number in range(64):\n    try: kinds.append(stat.S_ISFIFO(os.fstat(number).st_mode))\n    except OSError: pass\n"
    assert value(task, run(code + "os.write(3, f'value {float(kinds == [False] * 3 + [True])}\\n'.encode())")) == 1.0


def test_what_a_completion_replaces_is_whole_for_the_next_one(task):
    patch = "import reasoning_gym.games.countdown as c\nc.CountdownDataset.score_answer = lambda *_, **__: 1.0"
    value(task, run(patch))
    value(task, run("import builtins\nbuiltins.float = lambda _: 1.0"))

    assert is_sound(task)


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "raise SystemExit",
        *(
            pytest.param(code, marks=pytest.mark.slow)
            for code in (
                "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
                "import os, time\nif os.fork(): os._exit(0)\nos.setsid()\ntime.sleep(1000)",
                "import time; time.sleep(1000)",
                "import os\nwhile True: os.write(3, b'a')",
                "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
                "import os; os._exit(0)",
            )
        ),
    ],
    ids=["loop", "exit", "fork bomb", "daemon", "sleep", "long answer", "killed", "end"],
)
def test_what_does_not_answer_is_worth_nothing_and_the_next_one_is_scored(task, code):
    assert is_sound(task)
    server = server_of(task)

    assert value(task, run(code)) == 0.0
    assert is_sound(task)
    assert server_of(task) == server


def test_processes_and_memory_end_at_their_limits(task):
    count = (
        "import os, time\nn = 1\n"
        "for _ in range(100):\n"
        "    try:\n"
        "        if os.fork() == 0: time.sleep(60)\n"
        "        n += 1\n"
        "    except OSError: pass\n"
        "os.write(3, f'value {n / 100}\\n'.encode())\n"
    )
    assert value(task, run(count)) in (gym_reward.NUM_PROCESSES / 100, (gym_reward.NUM_PROCESSES - 1) / 100)
    # sympy takes the MemoryError for an answer that cannot be read.
    assert value(task, run("x = bytearray(10 << 30)")) == 0.01
    assert is_sound(task)


# To pid 1, which scores all completions: what reaches it, and what stays when its processes are gone.
@pytest.mark.parametrize(
    ("code", "starts_again"),
    [
        ("import os, signal\nfor n in (9, 15, 19, 2): os.kill(1, n)\nos.kill(-1, 19)", False),
        pytest.param(
            "import ctypes\nlibc = ctypes.CDLL(None)\nassert libc.ptrace(16, 1, 0, 0) == -1",
            False,
            marks=pytest.mark.slow,
        ),
        ("import resource\nresource.prlimit(1, resource.RLIMIT_AS, (1 << 20, 1 << 20))", True),
        ("import os, resource\nresource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))\nos.write(3, b'x')", True),
        pytest.param(
            "import resource\nresource.prlimit(1, resource.RLIMIT_CPU, (1, 1))\nwhile True: pass",
            True,
            marks=pytest.mark.slow,
        ),
        pytest.param("import os\nos.setpriority(os.PRIO_PROCESS, 1, 19)", True, marks=pytest.mark.slow),
        pytest.param(
            "import os\nos.sched_setscheduler(1, os.SCHED_BATCH, os.sched_param(0))", True, marks=pytest.mark.slow
        ),
        pytest.param("open('/tmp/sympy.py', 'w').write('x')", True, marks=pytest.mark.slow),
    ],
    ids=["signals", "trace", "memory", "files", "time", "nice", "batch", "file"],
)
def test_what_a_completion_changes_of_the_process_that_scores_ends_with_it(task, code, starts_again):
    assert is_sound(task)
    before = server_of(task)

    value(task, run(code))

    # Another one is there with the next completion.
    assert is_sound(task)
    assert (server_of(task) != before) is starts_again


def server_of(task):
    """The process that is pid 1 inside."""
    (worker,) = (psutil.Process(each.process.pid) for each in task.pool.workers if each.process)
    (inside,) = worker.children()
    return inside.pid


def test_a_server_that_is_gone_is_started_again_for_the_next_completion(task):
    assert is_sound(task)
    psutil.Process(server_of(task)).kill()

    assert is_sound(task)


@pytest.mark.slow
def test_another_start_and_its_imports_count_against_no_completion(monkeypatch):
    # An import takes more processor time than a completion has.
    monkeypatch.setattr(gym_reward, "PATIENCE", 1000.0)
    mine = opened(COUNTDOWN.model_copy(update={"reward_timeout_s": 0.5}))
    try:
        assert is_sound(mine)
        psutil.Process(server_of(mine)).kill()
        assert is_sound(mine)
        # Left behind, so that what scores is started again.
        value(mine, run("open('/tmp/sympy.py', 'w').write('x')"))
        assert is_sound(mine)
    finally:
        mine.close()


def test_a_server_that_stands_still_is_killed_and_the_next_completion_is_scored(task, monkeypatch):
    assert is_sound(task)
    (worker,) = task.pool.workers
    psutil.Process(worker.process.pid).suspend()
    psutil.Process(server_of(task)).suspend()
    patience_s = worker.timeout_s
    monkeypatch.setattr(worker, "timeout_s", 2.0)
    first = worker.process

    assert value(task, "1") == 0.05
    assert first.returncode == -9
    monkeypatch.setattr(worker, "timeout_s", patience_s)
    assert is_sound(task)


def test_processor_time_is_that_of_all_processes_of_a_completion(task):
    # A child and its parent, each within the limit of one process.
    code = (
        "import os, signal, time\n"
        "signal.setitimer(signal.ITIMER_PROF, 0)\n"
        "child = os.fork()\n"
        "while time.process_time() < {each}: pass\n"
        "os.waitpid(child, 0) if child else os._exit(0)\n"
        "os.write(3, b'value 1.0\\n')\n"
    )
    assert value(task, run(code.format(each=0.1))) == 1.0
    assert value(task, run(code.format(each=0.6 * gym_reward.LIMIT_S))) == 0.0


@pytest.mark.slow
def test_what_is_imported_may_lie_under_the_directory_that_a_completion_writes_to(monkeypatch):
    import reasoning_gym

    with tempfile.TemporaryDirectory(dir="/tmp") as above:
        shutil.copytree(Path(reasoning_gym.__file__).parent, Path(above, "site", "reasoning_gym"))
        Path(above).chmod(0o755)
        monkeypatch.setenv("PYTHONPATH", f"{above}/site:{Path.cwd() / 'src'}")
        mine = opened()
        try:
            assert is_sound(mine)
            assert says(mine, f"os.path.exists({above + '/site/reasoning_gym/__init__.py'!r})") == 1.0
            server = server_of(mine)
            value(mine, run(f"open({above!r} + '/mark', 'w')"))
            value(mine, run(f"open({above!r} + '/site/reasoning_gym/mark', 'w')"))
            assert is_sound(mine)
            assert server_of(mine) == server, "nothing was left behind"
        finally:
            mine.close()


def test_a_forged_score_is_a_number_from_0_to_1(task):
    for forged, got in (("1e300", 1.0), ("-5", 0.0), ("nan", 0.0), ("inf", 0.0), ("x", 0.0), ("0.25", 0.25)):
        assert value(task, run(f"import os\nos.write(3, b'value {forged}\\n')")) == got


def test_nothing_is_left_when_the_task_is_closed():
    task = opened()
    worker = value(task, "1") and psutil.Process(task.pool.workers[0].process.pid)
    family = [worker, *worker.children(recursive=True)]
    assert len(family) >= 2

    task.close()

    _, alive = psutil.wait_procs(family)
    assert alive == []


@pytest.mark.parametrize(
    "name",
    [
        "prime_factorization",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("chain_sum", "countdown", "leg_counting", "spiral_matrix")
        ),
    ],
)
def test_scores_are_those_of_the_data_set_itself(name):
    settings = TaskConfig(name=f"reasoning_gym:{name}", size=12, evaluation_size=4, reward_timeout_s=20.0)
    task = opened(settings)
    try:
        for index in range(12):
            prompt, entry = task.prompt(index), task._entries.find(index, False)
            for text in (prompt.answer, f" {prompt.answer}\n", task.prompt((index + 1) % 12).answer, "", "12"):
                for said in (text, f"<answer>3</answer>, no: <answer>{text}</answer>."):
                    assert task.score(prompt, said)[0].value == task._entries.score(entry, text)
        held_out = task.evaluation_prompt(0)
        assert task.score(held_out, held_out.answer)[0].value == 1.0
        # Its verifier raises for what is no number: no answer, and not the end of a group.
        if name == "prime_factorization":
            assert task.score(task.prompt(0), "two") == (dataclasses.replace(task.score(held_out, "1")[0], value=0.0),)
    finally:
        task.close()


@pytest.mark.slow
def test_a_score_that_hangs_on_the_machines_speed_is_known_as_such(task, monkeypatch):
    slow, asleep = run(LOOPS), run(f"import time; time.sleep({0.3 * PATIENCE * gym_reward.LIMIT_S})")
    prompt = task.prompt(0)
    for completion in (slow, asleep):
        task.score(prompt, completion)

    assert task.doubts(prompt, slow).near == ("score",)
    assert task.doubts(prompt, asleep).near == ("score",)
    # By processor time alone, however slow the machine is.
    monkeypatch.setattr(gym_reward, "PATIENCE", 1000.0)
    patient = opened()
    try:
        assert value(patient, "1") == 0.05
        assert patient.doubts(prompt, "1").near == ()
    finally:
        patient.close()
    # Also where it is one task of several, or has a system prompt.
    mixture = MixtureTask([Source(label="a", weight=1.0, task=SystemPromptTask(task, "Be brief."))])
    assert mixture.doubts(mixture.prompt(0), slow).near == ("score",)


LOOPS = f"import time\nwhile time.process_time() < {0.4 * gym_reward.LIMIT_S}: pass"


@pytest.mark.slow
def test_own_score_in_a_sum_goes_through_the_sandbox_too(tmp_path):
    mark = tmp_path / "mark"
    match = [{"kind": "match", "name": "correct", "weight": 2.0}]
    settings = COUNTDOWN.model_copy(update={"rewards": TaskConfig(rewards=match).rewards})
    for task in (opened(settings), build_task(settings)):
        try:
            prompt = task.prompt(0)
            assert task.score(prompt, prompt.answer)[0].value == 1.0
            task.score(prompt, f"__import__('os').system('touch {mark}')")
            slow = run(LOOPS)
            task.score(prompt, slow)
            assert task.doubts(prompt, slow).near == ("correct",)
        finally:
            task.close()
    assert not mark.exists()


def test_without_bubblewrap_a_start_ends_with_what_to_install(tmp_path, monkeypatch):
    # The worker finds bwrap by its PATH, and the packaged one only where its package is installed.
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho bwrap: No permissions to create a new namespace >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    task = opened()
    try:
        with pytest.raises(
            ConfigError, match=r"^task.name: .*No permissions.*user namespaces must be allowed.*docs/rew"
        ):
            value(task, "1")
    finally:
        task.close()
    monkeypatch.setattr(bubblewrap, "_packaged", lambda: "")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="scored in a sandbox: bubblewrap is not installed: apt install bubblewrap"):
        gym_reward.load({"timeout_s": 5.0})


def test_a_sandbox_that_is_not_built_later_is_an_error_and_no_zero(tmp_path, monkeypatch):
    task = opened()
    try:
        assert value(task, "1") == 0.05
        for worker in task.pool.workers:
            worker.close()
        monkeypatch.setenv("PATH", str(tmp_path))
        (tmp_path / "bwrap").write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / "bwrap").chmod(0o755)
        with pytest.raises(RewardError, match="builds no sandbox here"):
            value(task, "1")
    finally:
        task.close()


def test_the_time_for_a_completion_is_part_of_the_contract():
    digests = {}
    for seconds in (1.0, 4.0, 60.0):
        digests[seconds] = build_task(COUNTDOWN.model_copy(update={"reward_timeout_s": seconds})).digest

    assert digests[4.0] == digests[60.0] != digests[1.0]


@pytest.mark.slow
def test_no_score_is_computed_where_questions_are_made():
    """The service makes questions with the package itself; of completions it sees the score."""
    code = (
        "import json, reasoning_gym.games.countdown as c\n"
        "from heterorl.common.tasks.task_config import TaskConfig, build_task\n"
        "def refuse(*_, **__): raise SystemExit('scored here')\n"
        "c.CountdownDataset.score_answer = refuse\n"
        "config = TaskConfig(name='reasoning_gym:countdown', size=8, evaluation_size=4, reward_timeout_s=20.0)\n"
        "task = build_task(config)\n"
        "print(json.dumps(task.score(task.prompt(0), '1')[0].value))\n"
        "task.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert json.loads(done.stdout) == 0.05
