"""Ranks that go silent end the others within the stated time."""

import threading
import time

import pytest
import torch.distributed as dist

from heterorl.learner.backends.ranks.place import Place
from heterorl.learner.backends.ranks.watch import Watch

TIMEOUT_S = 2.0


def _place(rank, world_size=3):
    return Place(rank=rank, local_rank=0, world_size=world_size, local_world_size=1, host="127.0.0.1", port=1)


@pytest.fixture
def stores():
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return lambda: dist.TCPStore("127.0.0.1", master.port, is_master=False)


def test_silent_rank_ends_rank_0_and_by_it_the_others_within_the_stated_time(stores):
    ends, done = {}, [threading.Event(), threading.Event()]

    def note(rank):
        def on_silence(error):
            ends[rank] = (time.monotonic(), str(error))
            done[rank].set()

        return on_silence

    watches = [
        Watch(stores(), _place(rank), timeout_s=TIMEOUT_S, on_silence=note(rank) if rank < 2 else lambda _: None)
        for rank in range(3)
    ]
    assert not done[0].wait(TIMEOUT_S * 1.5), "all of them give signs of life"

    killed = time.monotonic()
    watches[2].close()

    assert done[0].wait(10)
    assert done[1].wait(10)
    for ended, reason in ends.values():
        assert ended - killed <= 1.5 * TIMEOUT_S + 1.0
        assert "no sign of life from rank 2 for 2 s" in reason


def test_closed_watch_judges_nobody(stores):
    failures = []
    watch = Watch(stores(), _place(0, 2), timeout_s=TIMEOUT_S, on_silence=failures.append)

    watch.close()

    assert not watch._closing.wait(0) or failures == []
    assert watch.silent() == []


def test_watchdog_is_postponed_while_others_are_watched_and_closed_with_the_watch(stores):
    class Watchdog:
        def __init__(self):
            self.is_postponed, self.is_closed = threading.Event(), False

        def postpone(self):
            self.is_postponed.set()

        def close(self):
            self.is_closed = True

    watchdog = Watchdog()
    watch = Watch(stores(), _place(0, 2), timeout_s=TIMEOUT_S, on_silence=lambda _: None, watchdog=watchdog)

    assert watchdog.is_postponed.wait(TIMEOUT_S)
    assert not watchdog.is_closed
    watch.close()
    assert watchdog.is_closed
