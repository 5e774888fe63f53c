"""Ranks that go silent end the others within the stated time."""

import queue
import threading

import pytest
import torch.distributed as dist

from heterorl.learner.backends.ranks.heartbeats import BeatFiles, Heartbeats
from heterorl.learner.backends.ranks.rank_env import RankEnv

TIMEOUT_S = 0.4


def _place(rank, world_size=3):
    return RankEnv(rank=rank, local_rank=0, world_size=world_size, local_world_size=1, host="127.0.0.1", port=1)


@pytest.fixture
def stores():
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return lambda: dist.TCPStore("127.0.0.1", master.port, is_master=False)


def test_beats_of_one_machine_are_written_in_place(tmp_path):
    """A full disk has no room for a new file."""
    beats = BeatFiles(tmp_path)
    assert not beats.check(["beat/1"])
    seen = []
    for number in ("9", "10"):
        beats.set("beat/1", number)
        seen.append((beats.get("beat/1"), [(path.stat().st_ino, path.stat().st_size) for path in tmp_path.iterdir()]))

    assert [value for value, _ in seen] == [b"9", b"10"]
    assert seen[0][1] == seen[1][1]


class Ranks:
    """Watches of three ranks by one clock that the test moves, and what happens to them in order."""

    def __init__(self, stores):
        self.now = 0.0
        self.reasons = {}
        self._turns = queue.Queue()
        self.watches = [self._watch(stores(), rank) for rank in range(3)]

    def _watch(self, store, rank):
        ranks = self

        class Noted(Heartbeats):
            def listen(self, number):
                super().listen(number)
                ranks._turns.put(rank)

        def on_silence(error):
            self.reasons[rank] = str(error)
            self._turns.put(rank)

        return Noted(store, _place(rank), timeout_s=TIMEOUT_S, on_silence=on_silence, monotonic=lambda: self.now)

    def advance(self, seconds, *, alive):
        """Move the clock, then wait until those that live have heard each other at the new time, or have ended."""
        self.now += seconds
        while not self._turns.empty():
            self._turns.get()
        # The first turn may have begun before; the second states a new beat, which the others hear in their fourth.
        missing = dict.fromkeys(alive, 4)
        while any(count > 0 for rank, count in missing.items() if rank not in self.reasons):
            rank = self._turns.get()
            if rank in missing:
                missing[rank] -= 1


def test_silent_rank_ends_rank_0_and_by_it_the_others_within_the_stated_time(stores):
    ranks = Ranks(stores)
    ranks.advance(0.0, alive=range(3))
    for _ in range(6):
        ranks.advance(0.75 * TIMEOUT_S, alive=range(3))
    assert ranks.reasons == {}, "all of them give signs of life"

    ranks.watches[2].close()
    num_steps = 0
    while 0 not in ranks.reasons:
        ranks.advance(0.75 * TIMEOUT_S, alive=(0, 1))
        num_steps += 1
    # Two are more than the stated time; what rank 2 was saying while it was closed may count as said after the first.
    assert num_steps <= 3
    # By the word of rank 0: its clock stands still.
    while 1 not in ranks.reasons:
        ranks.advance(0.0, alive=(1,))

    assert ranks.reasons.keys() == {0, 1}
    for reason in ranks.reasons.values():
        assert f"no sign of life from rank 2 for {TIMEOUT_S:g} s" in reason


def test_watch_that_is_closed_while_it_judges_calls_nobody_silent(stores):
    failures, made, judged = [], threading.Event(), threading.Event()

    def monotonic():
        if threading.current_thread().name != "rank-watch-_judge":
            return 0.0
        made.wait()
        watch.close()
        judged.set()
        return 2 * TIMEOUT_S

    before = set(threading.enumerate())
    watch = Heartbeats(stores(), _place(0, 2), timeout_s=TIMEOUT_S, on_silence=failures.append, monotonic=monotonic)
    threads = set(threading.enumerate()) - before
    made.set()
    judged.wait()
    for thread in threads:
        thread.join()

    assert failures == []


def test_watchdog_is_postponed_while_others_are_watched_and_closed_with_the_watch(stores):
    class Watchdog:
        def __init__(self):
            self.is_postponed, self.is_closed = threading.Event(), False

        def postpone(self):
            self.is_postponed.set()

        def close(self):
            self.is_closed = True

    watchdog = Watchdog()
    watch = Heartbeats(stores(), _place(0, 2), timeout_s=TIMEOUT_S, on_silence=lambda _: None, watchdog=watchdog)

    watchdog.is_postponed.wait()
    assert not watchdog.is_closed
    watch.close()
    assert watchdog.is_closed
