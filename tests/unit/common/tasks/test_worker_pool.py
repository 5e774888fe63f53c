"""Answers of worker processes: one time limit, no more processes than are needed."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from heterorl.common.errors import RewardError
from heterorl.common.tasks.rewards import worker_pool
from heterorl.common.tasks.rewards.worker_pool import WorkerPool

pytestmark = pytest.mark.process


MODULE = """
import os, pathlib, time
while time.process_time() < {import_s}:
    pass

def score(prompt, completion, answer):
    # A directory, and how many files it must have before there is an answer.
    place = pathlib.Path(prompt)
    (place / answer.format(pid=os.getpid())).touch()
    while len(list(place.iterdir())) < int(completion):
        time.sleep(0.01)
    return 1.0
"""


def pool_of(tmp_path, num_workers=1, import_s=0.0, **limits):
    (tmp_path / "gated.py").write_text(MODULE.format(import_s=import_s))
    (tmp_path / "files").mkdir()
    job = {"kind": "function", "module": "gated", "name": "score", "directory": str(tmp_path)}
    return WorkerPool(job, **{"timeout_s": 600.0, **limits}, num_workers=num_workers)


def asked(tmp_path, count, name="{pid}"):
    return {"prompt": str(tmp_path / "files"), "completion": str(count), "answer": name}


def test_process_that_cannot_be_started_again_costs_one_reward(tmp_path, monkeypatch):
    pool = pool_of(tmp_path)
    pool.start()

    def refuse(*args, **kwargs):
        raise BlockingIOError("no more processes")

    pool.workers[0].close()
    with monkeypatch.context() as patch:
        patch.setattr("subprocess.Popen", refuse)
        with pytest.raises(RewardError, match="no more processes"):
            pool.ask(asked(tmp_path, 1))
    with monkeypatch.context() as patch:
        patch.setattr(pool.workers[0], "_job", {"kind": "nothing"})
        with pytest.raises(RewardError, match="does not start again"):
            pool.ask(asked(tmp_path, 1))
    assert pool.ask(asked(tmp_path, 1))["parts"] == {"reward": 1.0}
    pool.close()


def test_an_answer_that_is_stopped_is_killed_and_the_next_one_is_computed(tmp_path, monkeypatch):
    pool = pool_of(tmp_path)
    pool.start()
    process = pool.workers[0].process
    # As a verifier that hangs: it answers nothing.
    os.kill(process.pid, 19)
    with monkeypatch.context() as patch:
        patch.setattr(pool.workers[0], "timeout_s", 0.5)
        with pytest.raises(RewardError, match="no answer in 0.5 s"):
            pool.ask(asked(tmp_path, 1))
    assert pool.ask(asked(tmp_path, 1))["parts"] == {"reward": 1.0}
    pool.close()
    assert process.poll() is not None


def test_another_process_starts_only_where_those_that_run_are_not_enough(tmp_path):
    pool = pool_of(tmp_path, num_workers=3)
    for _ in range(3):
        pool.ask(asked(tmp_path, 1))
    assert sum(worker.process is not None for worker in pool.workers) == 1
    # Each answer waits for two other processes.
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda _: pool.ask(asked(tmp_path, 3)), range(6)))

    assert sum(worker.process is not None for worker in pool.workers) == 3
    pool.close()


def test_a_process_that_starts_later_loads_the_files_of_the_first_one_or_answers_nothing(tmp_path):
    pool = pool_of(tmp_path, num_workers=2)
    first, second = pool.workers
    first.start()
    old = (tmp_path / "gated.py").read_text()
    (tmp_path / "gated.py").write_text(old.replace("return 1.0", "return 20.0"))
    for worker in (second, first):
        worker.close()
        with pytest.raises(RewardError, match=r"^its files changed since the start: .* restart this process$"):
            worker.ask(asked(tmp_path, 1))
        assert worker.process is None

    (tmp_path / "gated.py").write_text(old)
    assert [worker.ask(asked(tmp_path, 1))["parts"] for worker in (first, second)] == [{"reward": 1.0}] * 2
    pool.close()


def test_a_start_counts_against_no_answer_also_where_the_worker_has_died(tmp_path):
    # An import takes more than all that an answer has.
    pool = pool_of(tmp_path, import_s=1.0, cpu_s=0.5)
    for _ in range(2):
        assert pool.ask(asked(tmp_path, 1))["parts"] == {"reward": 1.0}
        pool.workers[0].process.kill()
        pool.workers[0].process.wait()
    assert pool.ask(asked(tmp_path, 1))["parts"] == {"reward": 1.0}
    # Nor do the answers before.
    for _ in range(20):
        assert pool.ask(asked(tmp_path, 1))["used_s"] < 0.5
    pool.close()


def test_the_wait_for_a_free_worker_counts_against_no_answer(tmp_path, monkeypatch):
    class Clock:
        now_s = 0.0

        def monotonic(self):
            return self.now_s

    clock = Clock()
    monkeypatch.setattr(worker_pool, "time", clock)
    pool, files = pool_of(tmp_path, timeout_s=600.0), tmp_path / "files"
    pool.start()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(pool.ask, asked(tmp_path, 2, "first"))
        while not (files / "first").exists():
            threading.Event().wait(0.01)
        second = threads.submit(pool.ask, asked(tmp_path, 4, "second"))
        with pool._changed:
            while not pool._changed._waiters:
                pool._changed.wait(0.01)
        # Each in its own time, and both together not.
        clock.now_s += 500.0
        (files / "go").touch()
        assert first.result()["parts"] == {"reward": 1.0}
        while not (files / "second").exists():
            threading.Event().wait(0.01)
        clock.now_s += 500.0
        (files / "on").touch()
        assert second.result()["parts"] == {"reward": 1.0}
    pool.close()


def test_closed_pool_answers_nobody_and_starts_nothing(tmp_path):
    pool = pool_of(tmp_path)
    pool.start()
    worker = pool.workers[0].process
    errors = []

    def ask():
        try:
            pool.ask(asked(tmp_path, 1000))
        except RewardError as error:
            errors.append(str(error))

    callers = [threading.Thread(target=ask) for _ in range(2)]
    for caller in callers:
        caller.start()
    with pool._changed:
        while pool._running or not pool._changed._waiters:
            pool._changed.wait(0.01)
    pool.close()
    for caller in callers:
        caller.join()

    assert len(errors) == 2
    assert worker.poll() is not None
    assert all(worker.process is None for worker in pool.workers)
