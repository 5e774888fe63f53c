"""Unit tests of completions' code in the real bubblewrap: right code passes, and nothing harms who runs it."""

import dataclasses
import errno
import json
import os
import select
import socket
import struct
import subprocess
import tempfile
from pathlib import Path

import psutil
import pytest

from heterorl.common.errors import ConfigError, RewardError
from heterorl.common.tasks.rewards.sandbox import bubblewrap, code_reward
from heterorl.common.tasks.rewards.sandbox.bubblewrap import (
    START_TIMEOUT_S,
    NoSandbox,
    SandboxLimits,
    SandboxOutcome,
    find_sandbox,
)
from heterorl.common.tasks.rewards.sandbox.bubblewrap import Sandbox as RealSandbox
from heterorl.common.tasks.rewards.sandbox.code_reward import Test as UnitTest
from heterorl.common.tasks.rewards.sandbox.code_reward import code_of, judged, tried
from heterorl.common.tasks.rewards.sandbox.code_reward import tests_of as unit_tests_of
from heterorl.common.tasks.rewards.worker_pool import PATIENCE, children_of
from heterorl.common.tasks.source_config import CodeRewardConfig
from heterorl.common.tasks.task_config import TaskConfig, build_task
from heterorl.common.types.rollout import RewardPart

pytestmark = pytest.mark.process

LIMITS = SandboxLimits(
    cpu_s=5.0, timeout_s=60.0, memory_bytes=512 << 20, work_bytes=1 << 20, output_bytes=4096, num_processes=8
)  # fmt: skip
SQUARE = UnitTest(code="assert f(2) == 4")
# As root tests run as another user; both ways are tried where the tests are root's and this interpreter is anybody's.
ANYBODYS = "/usr/bin/python3"


@pytest.fixture(scope="module")
def sandbox():
    return find_sandbox(python="", shown=(), limits=LIMITS)


def tried_in(sandbox, code, test=SQUARE, **limits):
    return tried(code, test, dataclasses.replace(sandbox, limits=dataclasses.replace(sandbox.limits, **limits)))


def ends(sandbox, code, test=SQUARE, **limits):
    return tried_in(sandbox, code, test, **limits)[0]


def test_right_code_passes_and_wrong_code_does_not(sandbox):
    assert ends(sandbox, "def f(x): return x * x")
    assert not ends(sandbox, "def f(x): return x")
    assert not ends(sandbox, "def f(x:")
    assert ends(sandbox, "print(int(input()) + 1)", UnitTest(standard_input="41\n", standard_output="42"))
    assert not ends(sandbox, "print(input())", UnitTest(standard_input="41\n", standard_output="42"))
    assert not ends(sandbox, "print(42); exit(1)", UnitTest(standard_output="42"))


READS = (
    "import io, os\ninput = io.BytesIO(os.read(0, os.fstat(0).st_size)).readline\nprint(int(input()) + 1)",
    "import mmap\nprint(int(mmap.mmap(0, 0, mmap.MAP_PRIVATE, mmap.PROT_READ).readline()) + 1)",
    "print(int(open('/dev/stdin').readline()) + 1)",
    "import pathlib\nprint(int(pathlib.Path('/dev/stdin').read_text().split()[0]) + 1)",
    "import sys\nsys.stdin.seek(0, 2)\nsys.stdin.seek(0)\nprint(int(sys.stdin.readline()) + 1)",
    "import os\ntry: os.write(0, b'9')\nexcept PermissionError: print(int(input()) + 1)",
    "import os\ntry: os.ftruncate(0, 1 << 20)\nexcept PermissionError: print(int(input()) + 1)",
)


def test_standard_input_is_a_file_that_nothing_changes(sandbox):
    test = UnitTest(standard_input="41\n" + "x\n" * (1 << 17), standard_output="42")

    assert [code for code in READS if not ends(sandbox, code, test)] == []
    assert ends(sandbox, "import os\nprint(os.fstat(0).st_size, os.read(0, 1))", UnitTest(standard_output="0 b''"))


def test_code_that_reads_a_set_in_its_order_says_the_same_each_time(sandbox):
    code = "print(hash('a'), list({str(n) for n in range(99)}))"
    outputs = {
        sandbox.run(json.dumps({"kind": "program", "code": code}).encode() + b"\n", b"", standard_input=b"").output
        for _ in range(2)
    }

    assert len(outputs) == 1
    # Its modules are those of the interpreter alone.
    assert ends(sandbox, "import sys\ndef f(x): return 4 if all('python' in path for path in sys.path) else sys.path")


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "import os\ndef f(x): os._exit(0)",
        "def f(x): raise SystemExit(0)",
        "import os\nos.write(1, b'loaded')\nos._exit(0)",
        "import sys\nsys.argv = []\nraise KeyboardInterrupt",
    ],
)
def test_a_program_that_ends_well_before_its_test_has_not_passed(sandbox, code):
    assert not ends(sandbox, code)


def children():
    return {each.pid for each in psutil.Process().children(recursive=True)}


SLEEPS = "import time; time.sleep(1000)"


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "import os, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nos.setsid() if not os.fork() else None\nwhile True: pass",
        SLEEPS,
        "import threading\nwhile True:\n    try: threading.Thread(target=lambda: __import__('time').sleep(99)).start()\n    except RuntimeError: pass",
    ],
    ids=["loop", "fork bomb", "daemon", "sleep", "threads"],
)
def test_what_does_not_end_fails_at_its_time_and_leaves_nothing(sandbox, code):
    before, limits = children(), {"timeout_s": 0.5} if code == SLEEPS else {"cpu_s": 0.2}

    is_passed, found = tried_in(sandbox, code, **limits)

    assert not is_passed
    # What loops is ended by its processor time, however long that takes by the clock.
    assert found.why == ("time" if code == SLEEPS else "")
    assert children() <= before


def test_processor_time_is_that_of_all_processes(sandbox):
    code = (
        "import os, signal, time\n"
        "signal.setitimer(signal.ITIMER_PROF, 0)\n"
        "if not os.fork():\n"
        "    while time.process_time() < 0.5: pass\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "def f(x): return 4\n"
    )
    assert ends(sandbox, code)
    is_passed, found = tried_in(sandbox, code, cpu_s=0.2)

    assert (is_passed, found.status) == (False, 0)
    assert found.used_s >= 0.5


@pytest.fixture
def clock(monkeypatch):
    """The clock of sandboxes: it moves by what a test gives, whenever one waits for the first time."""
    new_poll = select.poll

    class Clock:
        now_s = given_s = 0.0

        def monotonic(self):
            return self.now_s

    class Poll:
        def __init__(self):
            self._poll = new_poll()
            self.register, self.unregister = self._poll.register, self._poll.unregister

        def poll(self, timeout_ms):
            clock.now_s, clock.given_s = clock.now_s + clock.given_s, 0.0
            return self._poll.poll(timeout_ms)

    clock = Clock()
    monkeypatch.setattr(bubblewrap, "time", clock)
    monkeypatch.setattr(bubblewrap.select, "poll", Poll)
    return clock


def test_a_slow_start_of_a_sandbox_counts_against_no_code(sandbox, clock):
    clock.given_s = START_TIMEOUT_S - 1
    is_passed, found = tried_in(sandbox, "def f(x): return 4", timeout_s=1.0)

    assert (is_passed, found.took_s) == (True, 0.0)
    clock.given_s = START_TIMEOUT_S
    with pytest.raises(NoSandbox, match="not built: time"):
        ends(sandbox, "def f(x): return 4")


def test_processes_are_counted(sandbox):
    code = (
        "import os, time\nn = 1\n"
        "for _ in range(100):\n"
        "    try:\n"
        "        if os.fork() == 0: time.sleep(60)\n"
        "        n += 1\n"
        "    except OSError: pass\n"
        "def f(x): return 4 if n in (8, 9) else n\n"
    )
    assert ends(sandbox, code)


def test_memory_ends_at_its_limit(sandbox):
    assert not ends(sandbox, "x = bytearray(10 << 30)\ndef f(x): return 4")
    code = "try:\n    x = bytearray(10 << 30)\n    ok = 0\nexcept MemoryError: ok = 4\ndef f(x): return ok"
    assert ends(sandbox, code)
    # Files are memory too: of one file, and of all together.
    assert not ends(sandbox, "open('/tmp/x', 'wb').write(b'a' * (2 << 20))\ndef f(x): return 4")
    code = "for n in range(9):\n    open(f'/tmp/{n}', 'wb').write(b'a' * (1 << 18))\ndef f(x): return 4"
    assert not ends(sandbox, code)
    # Of a memfd each process would have as much again, of System V's memory any number.
    assert not ends(sandbox, "import os\nos.memfd_create('x')\ndef f(x): return 4")
    assert ends(sandbox, "import ctypes\ndef f(x): return 4 * (ctypes.CDLL(None).shmget(0, 1 << 20, 0o1600) == -1)")


def test_what_is_printed_ends_at_its_limit(sandbox):
    is_passed, found = tried_in(sandbox, "while True: print('a' * 1000)")

    assert (is_passed, found.why, len(found.output)) == (False, "output", LIMITS.output_bytes)


def test_a_right_output_beyond_the_limit_is_right(sandbox):
    wanted = UnitTest(standard_output="\n".join(map(str, range(2000))))

    assert len(wanted.standard_output) > 2 * LIMITS.output_bytes
    assert ends(sandbox, "for n in range(2000): print(n)", wanted)
    assert not ends(sandbox, "for n in range(2001): print(n)", wanted)
    assert tried_in(sandbox, "while True: print('a' * 1000)", wanted)[1].why == "output"


def test_output_that_is_seen_before_the_report_is_no_missing_sandbox(sandbox, monkeypatch):
    reported, new_poll, converse = [], select.poll, bubblewrap._converse

    def noted(process, orders, number, *args, **words):
        reported.append(number)
        return converse(process, orders, number, *args, **words)

    class PollThatSeesNoReport:
        def __init__(self):
            self._poll = new_poll()
            self.register, self.unregister = self._poll.register, self._poll.unregister

        def poll(self, timeout_ms):
            return [event for event in self._poll.poll(timeout_ms) if event[0] != reported[-1]]

    monkeypatch.setattr(bubblewrap, "_converse", noted)
    monkeypatch.setattr(bubblewrap.select, "poll", PollThatSeesNoReport)

    assert not ends(sandbox, "while True: print('a' * 1000)")


def test_there_is_no_network_not_even_this_machine(sandbox, monkeypatch):
    # Not even where sockets of the network were not refused.
    monkeypatch.setattr(bubblewrap, "_AF_UNIX", socket.AF_INET)
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = (
            "import socket\nok = 4\n"
            f"for place in (('127.0.0.1', {server.getsockname()[1]}), ('1.1.1.1', 53)):\n"
            "    try:\n"
            "        socket.create_connection(place, 1)\n"
            "        ok = 0\n"
            "    except OSError: pass\n"
            "def f(x): return ok\n"
        )
        assert ends(sandbox, code)


REFUSED = """
import ctypes, os, socket, subprocess, threading
libc = ctypes.CDLL(None, use_errno=True)
def refused(number, *arguments):
    return ctypes.get_errno() if libc.syscall(number, *arguments) < 0 else 0
found = {{name: refused(number, *[ctypes.c_long(0)] * 5) for name, number in {numbers}.items()}}
assert set(found.values()) == {{1}}, found
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, 38, 40):
    try:
        socket.socket(family, socket.SOCK_DGRAM if family == 16 else socket.SOCK_STREAM)
    except OSError as error:
        assert error.errno == 97
    else:
        raise AssertionError(family)
for flag in (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
    assert refused({unshare}, ctypes.c_long(flag)) == 1, flag
    assert flag == 0x80 or refused({clone}, ctypes.c_long(flag | 17), *[ctypes.c_long(0)] * 4) == 1, flag
assert refused(435, ctypes.c_long(0), ctypes.c_long(0)) == 38
# What programs do stays.
started = threading.Thread(target=socket.socketpair)
started.start()
started.join()
assert subprocess.run(["/bin/true"]).returncode == 0
def f(x): return 4
"""


def test_calls_that_leave_something_behind_or_open_the_kernel_are_refused(sandbox):
    column = ("x86_64", "aarch64").index(os.uname().machine)
    numbers = {name: both[column] for name, both in bubblewrap._REFUSED.items()}

    result = tried_in(sandbox, REFUSED.format(numbers=numbers, clone=(56, 220)[column], unshare=(272, 97)[column]))

    assert result[0]


def _decided(program, architecture, number, argument=0):
    """What classic BPF decides of a call."""
    data = {0: number, 4: architecture, 16: argument}
    place, value = 0, 0
    while True:
        code, if_so, if_not, operand = struct.unpack_from("=HBBI", program, 8 * place)
        place += 1
        if code == 0x06:
            return operand
        if code == 0x20:
            value = data[operand]
        else:
            holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[code]
            place += if_so if holds else if_not


@pytest.mark.parametrize(
    ("machine", "architecture", "numbers"),
    [
        ("x86_64", 0xC000003E, {
            "keyctl": 250, "shmget": 29, "msgget": 68, "semget": 64, "socket": 41, "clone": 56, "unshare": 272,
            "read": 0, "openat": 257,
        }),
        ("aarch64", 0xC00000B7, {
            "keyctl": 219, "shmget": 194, "msgget": 186, "semget": 190, "socket": 198, "clone": 220, "unshare": 97,
            "read": 63, "openat": 56,
        }),
    ],
)  # fmt: skip
def test_program_of_each_machine_refuses_by_number_and_argument(machine, architecture, numbers):
    def decided(name, argument=0, architecture=architecture):
        verdict = _decided(bubblewrap.program_of(machine), architecture, numbers[name], argument)
        return 0 if verdict == 0x7FFF0000 else verdict - 0x50000

    assert [decided(name) for name in ("read", "openat", "keyctl")] == [0, 0, errno.EPERM]
    assert [decided(name) for name in ("shmget", "msgget", "semget")] == [errno.EPERM] * 3
    assert [decided("socket", family) for family in (1, 2, 40)] == [0, errno.EAFNOSUPPORT, errno.EAFNOSUPPORT]
    assert [decided("clone", flags) for flags in (17, 0x3D0F00, 0x10000011)] == [0, 0, errno.EPERM]
    assert [decided("unshare", flags) for flags in (0x400, 0x80)] == [0, errno.EPERM]
    assert decided("read", architecture=0x40000003) == errno.ENOSYS
    numbers["other"] = 0x40000000
    assert decided("other") == errno.ENOSYS


def test_without_a_filter_of_calls_there_is_no_sandbox(monkeypatch):
    monkeypatch.setattr(bubblewrap, "program_of", lambda machine: bytes(8))
    with pytest.raises(NoSandbox, match="builds no sandbox here: .*CONFIG_SECCOMP_FILTER"):
        find_sandbox(python="", shown=(), limits=LIMITS)
    monkeypatch.setattr(bubblewrap, "program_of", lambda machine: b"")
    with pytest.raises(NoSandbox, match="calls of the kernel are not filtered on"):
        find_sandbox(python="", shown=(), limits=LIMITS)


def test_no_process_is_left_of_a_sandbox_that_is_killed_as_it_begins(sandbox, monkeypatch):
    def killed(process, *_, **__):
        while not children_of(process.pid) and process.poll() is None:
            pass
        raise KeyError

    monkeypatch.setattr(bubblewrap, "_converse", killed)
    before = children_of(os.getpid())
    for _ in range(20):
        with pytest.raises(KeyError):
            sandbox.outcome_of(b"", b"", standard_input=b"", errors=subprocess.DEVNULL)

    assert [each for each in children_of(os.getpid()) if each not in before] == []


def test_interpreter_that_would_show_a_home_is_refused(tmp_path, monkeypatch):
    python = tmp_path / "me" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    for home in (tmp_path / "me", tmp_path / "me" / "below"):
        monkeypatch.setenv("HOME", str(home))
        with pytest.raises(NoSandbox, match="install Python in a directory of its own"):
            find_sandbox(python=str(python), shown=(), limits=LIMITS)
    assert not bubblewrap._is_home("/usr/local")
    assert bubblewrap._is_home("/home/somebody")


def test_no_file_of_the_machine_is_seen_and_none_is_written(sandbox, tmp_path, monkeypatch):
    secret = tmp_path / "key"
    secret.write_text("secret")
    monkeypatch.setenv("API_KEY", "secret")
    code = (
        "import os\nok = 4\n"
        f"for place in ({str(secret)!r}, '/etc/passwd', '/proc/1', '/sys', '/home', '/var', '/run', {str(Path.cwd())!r}):\n"
        "    ok = 0 if os.path.exists(place) else ok\n"
        "for place in ('/x', '/usr/x', '/dev/x', '/dev/shm/x', '/sandbox_main.py'):\n"
        "    try:\n"
        "        open(place, 'w')\n"
        "        ok = 0\n"
        "    except OSError: pass\n"
        "ok = 0 if 'API_KEY' in os.environ or os.getuid() == 0 else ok\n"
        "open('/tmp/mine', 'w').write('x')\n"
        "def f(x): return ok\n"
    )
    assert ends(sandbox, code)
    # Each test has files of its own.
    assert ends(sandbox, "import os\nassert os.listdir('/tmp') == []\ndef f(x): return 4")
    code = "import os\ntry:\n    os.kill(1, 9); os.kill(-1, 9)\nexcept OSError: pass\ndef f(x): return 4"
    # Whatever that does inside, who runs it goes on.
    ends(sandbox, code)
    assert ends(sandbox, "def f(x): return 4")


@pytest.mark.parametrize("root", ["/tmp", "/dev/shm"])
def test_what_is_shown_may_lie_where_the_sandbox_has_a_directory_of_its_own(root):
    with tempfile.TemporaryDirectory(dir=root) as above:
        shown = Path(above, "site", "packages")
        shown.mkdir(parents=True)
        Path(above).chmod(0o755)
        (shown / "mine.py").write_text("four = 4")
        Path(above, "secret").write_text("secret")
        code = (
            f"import os, sys\nsys.path.append({str(shown)!r})\nimport mine\nok = mine.four\n"
            f"ok = 0 if os.path.exists({above + '/secret'!r}) else ok\n"
            f"for place in ({above!r}, {above + '/site'!r}, {str(shown)!r}):\n"
            "    try:\n"
            "        open(place + '/x', 'w')\n"
            "        ok = 0\n"
            "    except OSError: pass\n"
            "open('/tmp/mine', 'w').write('x')\n"
            "def f(x): return ok\n"
        )
        assert ends(find_sandbox(python="", shown=(str(shown),), limits=LIMITS), code)
    with pytest.raises(NoSandbox, match="/tmp/ cannot be shown inside"):
        find_sandbox(python="", shown=("/tmp/",), limits=LIMITS)


@pytest.mark.skipif(
    os.geteuid() != 0 or not Path(ANYBODYS).exists(), reason="needs root, and an interpreter for others"
)
def test_a_user_without_rights_has_the_same_sandbox(tmp_path):
    """In a child that is nobody, because user namespaces count processes otherwise than root does."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        verdicts = []
        try:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            box = find_sandbox(python=ANYBODYS, shown=(), limits=LIMITS)
            forks = "import os, time\nn = 1\nfor _ in range(40):\n    try:\n        if os.fork() == 0: time.sleep(60)\n        n += 1\n    except OSError: pass\n"
            verdicts = [
                ends(box, "def f(x): return x * x"),
                ends(box, forks + "def f(x): return 4 if n in (7, 8, 9) else n"),
                not ends(box, "x = bytearray(10 << 30)\ndef f(x): return 4"),
                not ends(box, "import socket\nsocket.create_connection(('1.1.1.1', 53), 1)\ndef f(x): return 4"),
            ]
        except BaseException as error:  # noqa: BLE001 - told to the parent
            verdicts = repr(error)
        os.write(write, json.dumps(verdicts).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        verdicts = json.loads(pipe.read() or b"null")
    os.waitpid(pid, 0)
    if isinstance(verdicts, str) and "bwrap" in verdicts and "site-packages" in bubblewrap._packaged():
        assert "PermissionError" in verdicts or "not installed" in verdicts or "builds no sandbox" in verdicts
        pytest.skip(f"nobody may not look into the directory of bwrap: {verdicts[:200]}")
    assert verdicts == [True] * 4


def code_task(tmp_path, *answers, reward_timeout_s=20.0, **reward):
    path = tmp_path / "code.jsonl"
    rows = [{"prompt": f"{number}", "answer": answer} for number, answer in enumerate([*answers, *"xyz"])]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "held.jsonl").write_text(json.dumps({"prompt": "held", "answer": "x"}) + "\n")
    config = TaskConfig(
        name=f"jsonl:{path}", evaluation_path=str(tmp_path / "held.jsonl"), reward_timeout_s=reward_timeout_s,
        rewards=[{"kind": "code", "name": "tests", "test_timeout_s": 5.0, **reward}],
    )  # fmt: skip
    return build_task(config)


def test_a_completion_is_scored_by_the_tests_of_its_prompt(tmp_path):
    three = json.dumps({"tests": ["assert f(2) == 4", "assert f(3) == 9", "assert f(4) == 99"]})
    completion = "First ```python\ndef f(x): return 0\n``` no:\n```python\ndef f(x): return x * x\n```"
    for credit, value in (("all", 0.0), ("share", pytest.approx(2 / 3))):
        task = code_task(tmp_path, three, "assert f(2) == 4", credit=credit)
        try:
            assert task.score(task.prompt(0), completion) == (RewardPart(name="tests", value=value),)
            assert task.score(task.prompt(1), completion)[0].value == 1.0
            assert task.score(task.prompt(1), "def f(x): return x * x")[0].value == 0.0
        finally:
            task.close()


def test_a_prompt_without_tests_is_an_error_and_no_zero(tmp_path):
    task = code_task(tmp_path, json.dumps({"tests": []}), json.dumps([{"input": "x"}]))
    try:
        for number, words in ((0, "holds no list of tests"), (1, "no test: ")):
            with pytest.raises(RewardError, match=words):
                task.score(task.prompt(number), "```python\nx = 1\n```")
    finally:
        task.close()


def test_a_result_that_hangs_on_the_machines_speed_is_known_as_such(tmp_path, monkeypatch):
    # By processor time alone, however slow the machine is.
    monkeypatch.setattr(code_reward, "PATIENCE", 1000.0)
    task = code_task(tmp_path, "assert True", test_timeout_s=2.0)
    prompt = task.prompt(0)
    half, endless, quick = (f"```python\nimport time\n{code}\n```" for code in (HALF, "while True: pass", "x = 1"))
    try:
        assert [task.score(prompt, text)[0].value for text in (half, endless, quick)] == [1.0, 0.0, 1.0]
        assert task.doubts(prompt, half).near == ("tests",)
        assert task.doubts(prompt, endless).near == ("tests",)
        assert task.doubts(prompt, quick).near == ()
        assert task.doubts(prompt, "another").near == ()
    finally:
        task.close()


HALF = "while time.process_time() < 1: pass"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given(RealSandbox):
    """A sandbox in which each test passes after the seconds (of processor time, by the clock) that are given."""

    seconds: list
    asked: list

    def run(self, first, second, *, standard_input):
        used_s, took_s = self.seconds.pop(0)
        self.asked.append((self.limits.cpu_s, self.limits.timeout_s))
        token = json.loads(second)["token"]
        return SandboxOutcome(status=0, output=b"", report=f"loaded\n{token}".encode(), used_s=used_s, took_s=took_s)


@pytest.mark.parametrize(
    ("seconds", "value", "share"),
    [
        # Of 5 s for a test and 10 s for all; by the clock PATIENCE times as many.
        ([(0.5, 0.5)] * 3, 1.0, 0.15),
        ([(0.5, 0.5), (2.0, 2.0), (0.5, 0.5)], 1.0, 0.4),
        ([(0.0, 8.0), (0.0, 1.0), (0.0, 1.0)], 1.0, 8 / (5 * PATIENCE)),
        ([(2.0, 2.0)] * 3, 1.0, 0.6),
        # The last one has 2 s left, and takes three.
        ([(4.0, 4.0), (4.0, 4.0), (3.0, 3.0)], 2 / 3, 1.1),
        # The last one is not run.
        ([(5.0, 5.0), (5.0, 5.0), (0.1, 0.1)], 2 / 3, 1.0),
        ([(0.0, 6 * PATIENCE), (0.0, 4 * PATIENCE), (0.0, 0.0)], 2 / 3, 1.2),
    ],
)
def test_a_test_that_the_time_of_all_does_not_reach_has_failed_and_may_pass_elsewhere(sandbox, seconds, value, share):
    limits = dataclasses.replace(LIMITS, cpu_s=5.0, timeout_s=5.0 * PATIENCE)
    given = Given(program="", python="", shown=(), limits=limits, seconds=list(seconds), asked=[])

    found = judged("x = 1", [SQUARE] * 3, given, cpu_s=10.0, patience=PATIENCE, gives_share=True)

    assert found == {"value": value, "share": pytest.approx(share)}
    assert given.asked[0] == (5.0, 5.0 * PATIENCE)
    assert all(cpu_s > 0 and timeout_s > 0 for cpu_s, timeout_s in given.asked)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asleep(RealSandbox):
    """A sandbox whose first test prints, and whose others sleep until they are killed."""

    asked: list

    def run(self, first, second, *, standard_input):
        self.asked.append(standard_input)
        if len(self.asked) == 1:
            return SandboxOutcome(status=0, output=standard_input, report=b"")
        return SandboxOutcome(status=None, output=b"", report=b"", why="time", took_s=self.limits.timeout_s)


def test_code_that_waits_until_its_time_ends_waits_once():
    asleep = Asleep(program="", python="", shown=(), limits=LIMITS, asked=[])
    tests = [UnitTest(standard_input=each, standard_output=each) for each in "1234"]

    found = judged("", tests, asleep, cpu_s=100.0, patience=PATIENCE, gives_share=True)

    assert found["value"] == 1 / 4
    assert found["share"] >= 1, "it may pass on a faster machine"
    assert asleep.asked == [b"1", b"2"]


def test_a_sandbox_that_cannot_be_built_later_is_an_error(tmp_path, sandbox):
    gone = dataclasses.replace(sandbox, shown=("/no/such/place",))

    with pytest.raises(NoSandbox, match="was not built"):
        tried("def f(x): return 4", SQUARE, gone)


def test_without_bubblewrap_a_start_ends_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(bubblewrap, "_packaged", lambda: "")
    with pytest.raises(NoSandbox, match="bubblewrap is not installed: apt install bubblewrap"):
        find_sandbox(python="", shown=(), limits=LIMITS)
    # What a container without user namespaces says.
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho bwrap: No permissions to create a new namespace >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    with pytest.raises(
        ConfigError, match=r"^task.rewards\[0\]: .*No permissions to create.*user namespaces must be allowed"
    ):
        code_task(tmp_path, "assert True")


def test_limits_and_python_are_part_of_the_contract_and_directories_are_not(tmp_path):
    digests = []
    for reward in ({}, {"shown": [str(tmp_path)]}, {"test_timeout_s": 4.0}, {"credit": "share"}):
        task = code_task(tmp_path, "assert True", **reward)
        digests.append(task.digest)
        task.close()

    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
    assert CodeRewardConfig(name="x").memory_bytes == 512 << 20


def test_tests_are_read_in_the_forms_that_data_sets_have():
    assert unit_tests_of("assert f(1)", {}) == [UnitTest(code="assert f(1)")]
    assert unit_tests_of('["assert f(1)"]', {}) == [UnitTest(code="assert f(1)")]
    program = UnitTest(standard_input="1", standard_output="2")
    assert unit_tests_of('{"tests": [{"stdin": "1", "stdout": "2"}]}', {}) == [program]
    assert unit_tests_of('{"inputs": ["1"], "outputs": ["2"]}', {}) == [program]
    for wrong in ("", "[1]", "{}", '[{"stdin": "1"}]'):
        with pytest.raises(ValueError, match="test"):
            unit_tests_of(wrong, {})


def test_the_last_block_of_python_is_the_code():
    assert code_of("a ```py\none\n``` b ```py\ntwo\n``` c", needs_block=True) == "two\n"
    # As the worker asks it: a quadratic search would take the time of all tests.
    assert code_of("```" + " " * 1_000_000 + "\ntwo\n```", needs_block=True) == "two\n"
    assert code_of("x = 1", needs_block=True) is None
    assert code_of("x = 1", needs_block=False) == "x = 1"
    assert code_of(" ", needs_block=False) is None
