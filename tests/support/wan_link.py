"""A long line between two network namespaces: TUN devices, and a process that carries packets late, or not at all.

    python -m tests.support.wan_link FD_A FD_B --delay 0.075 --jitter 0.005 --loss 0.01 --rate 0

Carries what comes from either descriptor of a TUN device to the other. Standard input takes `down`, `up` and `stats`;
the answer to `stats` is a line of JSON with the packets seen and lost since the start. The line keeps the order of
packets. It has a limit of rate if `--rate` is above 0 bytes a second, for each way; then a packet is lost that would wait
longer than QUEUE_S for its turn. What would wait beyond MAX_WAITING packets is lost too.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import json
import os
import random
import selectors
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.limits import WAIT_S

ADDRESS_A, ADDRESS_B = "10.77.0.1", "10.77.0.2"
MTU = 1400
MAX_WAITING = 20_000
QUEUE_S = 0.2
"""Longest queue in front of a line with a rate, in seconds of its rate."""
_TUN = "/dev/net/tun"
_TUNSETIFF, _IFF_TUN_NO_PI = 0x400454CA, 0x1001
_CLONE_NEWNET = 0x40000000


def unavailable() -> str:
    """Why there can be no such link on this machine; empty when there can be."""
    for name in ("unshare", "ip"):
        if shutil.which(name) is None:
            return f"the command {name} is missing"
    if not os.access(_TUN, os.R_OK | os.W_OK):
        return f"{_TUN} cannot be opened"
    if subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False).returncode:
        return "network namespaces may not be made here (`unshare -rn`)"
    return ""


@contextlib.contextmanager
def inside(namespace: int) -> Iterator[None]:
    """Let this thread, and the processes that it starts, be in a network namespace."""
    before = _current()
    _check("setns", namespace, _CLONE_NEWNET)
    try:
        yield
    finally:
        _check("setns", before, _CLONE_NEWNET)
        os.close(before)


class WanLink:
    """The namespace of this process (A) joined with a new one, `site_b`; begins up. `close` ends the carrier.

    `number`, below 256, tells several links of one process apart: in addresses and in the name of the device.
    """

    def __init__(
        self, *, delay_s: float, jitter_s: float, loss: float, bytes_per_s: float = 0.0, number: int = 0
    ) -> None:
        self.site_b = _new_namespace()
        self.address_a, self.address_b = f"10.77.{number}.1", f"10.77.{number}.2"
        ends = [_tun(self.address_a, self.address_b, name=f"wan{number}")]
        with inside(self.site_b):
            ends.append(_tun(self.address_b, self.address_a, name=f"wan{number}"))
        options = {"--delay": delay_s, "--jitter": jitter_s, "--loss": loss, "--rate": bytes_per_s}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.wan_link", *map(str, ends)]
            + [str(word) for option in options.items() for word in option],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=ends, text=True, bufsize=1,
        )  # fmt: skip
        for end in ends:
            os.close(end)

    def say(self, word: str) -> None:
        """Take the line `down` or `up`."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def stats(self) -> dict[str, int]:
        """Packets so far: `seen` while the line was up, `lost` of them."""
        self.say("stats")
        assert self._process.stdout is not None
        answer: dict[str, int] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        """End the carrier, and with it the devices."""
        self._process.terminate()
        self._process.wait(WAIT_S)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        os.close(self.site_b)


class Way:
    """One direction of a line of `bytes_per_s`, 0 for no limit: packets leave one after another."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def leave(self, num_bytes: int, now: float) -> float | None:
        """When the last byte of a packet has left; None if the queue is too long for it."""
        if not self._bytes_per_s:
            return now
        begins = max(now, self._free_at)
        if begins - now > QUEUE_S:
            return None
        self._free_at = begins + num_bytes / self._bytes_per_s
        return self._free_at


class Carrier:
    """The loop of the process."""

    def __init__(
        self, ends: tuple[int, int], *, delay_s: float, jitter_s: float, loss: float, bytes_per_s: float
    ) -> None:
        self._ends = ends
        self._delay_s, self._jitter_s, self._loss = delay_s, jitter_s, loss
        self._ways = {end: Way(bytes_per_s) for end in ends}
        self._random = random.Random(1)
        self._waiting: dict[int, deque[tuple[float, bytes]]] = {end: deque() for end in ends}
        self._is_up = True
        self._stats = {"seen": 0, "lost": 0}

    def run(self) -> None:
        """Carry until standard input ends."""
        with selectors.DefaultSelector() as selector:
            for source in (*self._ends, sys.stdin.fileno()):
                os.set_blocking(source, False)
                selector.register(source, selectors.EVENT_READ)
            while True:
                due = [waiting[0][0] for waiting in self._waiting.values() if waiting]
                events = selector.select(max(0.0, min(due) - time.monotonic()) if due else None)
                for key, _ in events:
                    if key.fd == sys.stdin.fileno():
                        words = os.read(key.fd, 4096).decode().split()
                        if not words:
                            return
                        self._obey(words)
                    else:
                        self._take(key.fd)
                self._deliver()

    def _obey(self, words: list[str]) -> None:
        for word in words:
            if word == "stats":
                os.write(sys.stdout.fileno(), (json.dumps(self._stats) + "\n").encode())
                continue
            self._is_up = word == "up"
            for waiting in self._waiting.values():
                waiting.clear()

    def _take(self, source: int) -> None:
        waiting = self._waiting[self._ends[source == self._ends[0]]]
        for _ in range(256):
            try:
                packet = os.read(source, 65536)
            except BlockingIOError:
                return
            if not self._is_up:
                continue
            self._stats["seen"] += 1
            left = None
            if len(waiting) < MAX_WAITING and self._random.random() >= self._loss:
                left = self._ways[source].leave(len(packet), time.monotonic())
            if left is None:
                self._stats["lost"] += 1
                continue
            due = left + self._delay_s + self._random.uniform(0.0, self._jitter_s)
            waiting.append((max(due, waiting[-1][0] if waiting else due), packet))

    def _deliver(self) -> None:
        now = time.monotonic()
        for target, waiting in self._waiting.items():
            while waiting and waiting[0][0] <= now:
                # A full device drops, as a full queue on the way would.
                with contextlib.suppress(BlockingIOError):
                    os.write(target, waiting.popleft()[1])


def _new_namespace() -> int:
    made: list[int] = []

    def make() -> None:
        # A namespace belongs to a thread; the descriptor keeps it when the thread has ended.
        _check("unshare", _CLONE_NEWNET)
        made.append(_current())
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return made[0]


def _tun(address: str, peer: str, *, name: str) -> int:
    end = os.open(_TUN, os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN_NO_PI))
    subprocess.run(["ip", "address", "add", address, "peer", peer, "dev", name], check=True)
    subprocess.run(["ip", "link", "set", name, "mtu", str(MTU), "up"], check=True)
    return end


def _current() -> int:
    return os.open(Path("/proc/thread-self/ns/net"), os.O_RDONLY | os.O_CLOEXEC)


def _check(name: str, *arguments: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def main() -> None:
    """Carry between two inherited descriptors."""
    parser = argparse.ArgumentParser()
    parser.add_argument("ends", type=int, nargs=2)
    for name in ("delay", "jitter", "loss", "rate"):
        parser.add_argument(f"--{name}", type=float, required=True)
    options = parser.parse_args()
    first, second = options.ends
    Carrier(
        (first, second),
        delay_s=options.delay, jitter_s=options.jitter, loss=options.loss, bytes_per_s=options.rate,
    ).run()  # fmt: skip


if __name__ == "__main__":
    main()
