"""math-verify in a process of its own that is killed when it takes too long: an error is never a zero reward.

Symbolic comparison of a hostile answer can run for hours and ignore signals, so no thread and no alarm will do.
One JSON line in, one JSON line out; nothing else is believed of what the process prints. A worker ends by itself when
its parent was killed in the middle of a comparison, and its memory is bounded.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import select
import signal
import subprocess
import sys
import threading

from services.common.errors import RewardError

MAX_ANSWER_CHARS = 20_000
START_TIMEOUT_S = 60.0
MAX_MEMORY_BYTES = 4 << 30
_GRACE_S = 5.0
"""The worker's own limit comes so much later than its parent's, which it only replaces."""
_WORKER = "from services.common.tasks import math_verify; math_verify.work()"


class MathVerifier:
    """Keeps one worker process; replaces it after a time-out or a crash."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def verify(self, *, answer: str, completion: str) -> bool:
        """Whether the completion's final answer equals the answer.

        Raises:
            RewardError: the worker crashed, timed out, or could not read the right answer.
        """
        request = {
            "answer": answer,
            "completion": completion[-MAX_ANSWER_CHARS:],
            "limit_s": self._timeout_s + _GRACE_S,
        }
        with self._lock:
            process = self._start()
            try:
                reply = _exchange(process, json.dumps(request).encode() + b"\n", self._timeout_s)
                result = json.loads(reply)
            except (OSError, ValueError, TimeoutError) as error:
                self.close()
                raise RewardError(f"math-verify failed: {error or 'no answer'}") from error
        if "error" in result:
            raise RewardError(f"math-verify: {result['error']}")
        return bool(result["correct"])

    def close(self) -> None:
        """Kill the worker."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
            )
            # The import takes seconds; it must not count against the first answer.
            try:
                _read_line(self._process, START_TIMEOUT_S)
            except (OSError, TimeoutError) as error:
                self.close()
                raise RewardError(f"math-verify does not start: {error}") from error
        return self._process


def _exchange(process: subprocess.Popen[bytes], line: bytes, timeout_s: float) -> bytes:
    assert process.stdin is not None
    process.stdin.write(line)
    return _read_line(process, timeout_s)


def _read_line(process: subprocess.Popen[bytes], timeout_s: float) -> bytes:
    assert process.stdout is not None
    # poll, not select: a process with many connections has descriptors beyond select's 1024.
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    received = b""
    while not received.endswith(b"\n"):
        # The worker writes short lines at once, so one wait per line bounds the whole time closely enough.
        if not poll.poll(timeout_s * 1000):
            raise TimeoutError(f"no answer in {timeout_s:g} s")
        piece = os.read(process.stdout.fileno(), 65536)
        if not piece:
            raise OSError("the worker ended")
        received += piece
    return received


def work() -> None:
    """Body of the worker: answer requests until the input ends."""
    import math_verify

    # An alarm without a handler ends the process even inside one long step of C, where Python code never gets its turn.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    # The library warns at every call that its own time limits are off.
    logging.disable(logging.WARNING)
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    # Whatever the library prints must not look like an answer.
    os.dup2(2, 1)
    out.write(b'{"ready": true}\n')
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["limit_s"])
        try:
            # The library's own time limits use signals and swallow errors as "wrong"; the parent's limit counts.
            right = math_verify.parse(request["answer"], parsing_timeout=None)
            if not right:
                raise ValueError("the right answer cannot be parsed")
            given = math_verify.parse(request["completion"], parsing_timeout=None)
            result: dict[str, object] = {
                "correct": bool(given) and math_verify.verify(right, given, timeout_seconds=None)
            }
        except Exception as error:  # noqa: BLE001 - reported to the parent, which raises it
            result = {"error": repr(error)}
        signal.setitimer(signal.ITIMER_REAL, 0)
        out.write(json.dumps(result).encode() + b"\n")
