"""The line that joins two namespaces: late, lossy, and silent while it is cut; `make wan` runs two sites over it."""

import json
import os
import socket
import subprocess
import sys
import time

import pytest

from tests.support.limits import WAIT_S
from tests.support.wan_link import ADDRESS_A, ADDRESS_B, WanLink, inside, unavailable

DELAY_S, LOSS, NUM_PACKETS = 0.05, 0.3, 200
REASON = unavailable()


@pytest.mark.skipif(bool(REASON), reason=REASON or "available")
@pytest.mark.slow
def test_line_is_late_and_lossy_and_silent_while_cut():
    command = ["unshare", "-rn", sys.executable, "-m", "tests.faults.test_wan_link"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ}, check=False)

    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["round_trip_s"] >= 2 * DELAY_S
    # The kernel sends a few packets of its own, which may be among the lost.
    assert NUM_PACKETS - seen["stats"]["lost"] <= seen["arrived"] < NUM_PACKETS
    # 200 packets, a loss of 0.3: 60 are lost, five standard deviations are 32. More would not fit a socket buffer.
    assert 28 <= seen["stats"]["lost"] <= 92
    assert seen["arrived_while_cut"] == 0
    assert seen["arrived_after"] > 0


def _measure():
    """Runs in a namespace of its own."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    link = WanLink(delay_s=DELAY_S, jitter_s=0.0, loss=0.0)
    with socket.create_server((ADDRESS_A, 0)) as server, inside(link.site_b):
        started = time.perf_counter()
        socket.create_connection(server.getsockname(), WAIT_S).close()
        round_trip_s = time.perf_counter() - started
    link.close()
    link = WanLink(delay_s=DELAY_S, jitter_s=0.0, loss=LOSS)
    with inside(link.site_b):
        receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    receiver.bind((ADDRESS_B, 0))
    arrived = _send(sender, receiver, lambda: _not_lost(link))
    stats = link.stats()
    link.say("down")
    link.stats()
    while_cut = _send(sender, receiver, lambda: 0)
    link.say("up")
    link.stats()
    after = _send(sender, receiver, lambda: 1)
    link.close()
    for each in (sender, receiver):
        each.close()
    json.dump({
        "round_trip_s": round_trip_s, "arrived": arrived, "stats": stats, "arrived_while_cut": while_cut,
        "arrived_after": after,
    }, sys.stdout)  # fmt: skip


def _not_lost(link):
    """Packets that the line lets through, once it has seen all."""
    while (stats := link.stats())["seen"] < NUM_PACKETS:
        time.sleep(DELAY_S)
    return NUM_PACKETS - stats["lost"]


def _send(sender, receiver, expected):
    """Packets that arrive: the expected ones however late, others until the line is silent."""
    for _ in range(NUM_PACKETS):
        sender.sendto(b"x", receiver.getsockname())
    least, arrived = expected(), 0
    try:
        while True:
            receiver.settimeout(WAIT_S if arrived < least else 20 * DELAY_S)
            receiver.recv(10)
            arrived += 1
    except TimeoutError:
        return arrived


if __name__ == "__main__":
    _measure()
