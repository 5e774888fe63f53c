"""An engine alone on given requests: `python -m benchmarks.loop_engine JOB.json ANSWER.json`, of benchmarks.loop.

It always has more requests than rows, so it is as busy as it can be. A request with `given` tokens is a trajectory:
its next turn follows them at once. The answer is the span between the first
fill's end and the last one's beginning; a file, because an engine writes to standard output what it likes.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from heterorl.common.generation.inference_engine import Finished, Request
from heterorl.sampler.sampler_app import load_components
from heterorl.sampler.sampler_config import SamplerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Tokens that ended within some seconds."""

    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def span_of(ends: Sequence[tuple[float, int]]) -> Span:
    """Between the first and the last of (instant, tokens until then)."""
    (began, before), (ended, after) = ends[0], ends[-1]
    return Span(tokens=after - before, seconds=ended - began)


def main() -> None:
    """Run a job and print its span."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    parts = load_components(SamplerConfig.model_validate(job["sampler"]))
    try:
        base = parts.base()
        assert base is not None
        parts.engine.load(base, 0)
        rows = parts.engine.max_running
        plays = any("given" in request for request in job["requests"])
        waiting, playing = deque(enumerate(job["requests"])), {}

        def begin() -> None:
            key, request = waiting.popleft()
            given = deque(request.get("given", []))
            prompt, count = np.array(request["prompt"], np.int32), len(request["lengths"])
            first = Request(
                key=key, prompt=prompt, seed=request["seed"], num_completions=count, may_continue=bool(given)
            )
            playing[key] = given, first
            parts.engine.submit(first)

        num = sum(len(request["lengths"]) + len(request.get("given", [])) for request in job["requests"])
        # More trajectories at once would not keep their turns in the engine.
        for _ in range(min(2 * rows, len(waiting)) if plays else len(waiting)):
            begin()
        left, tokens, ends = num, 0, []
        while left:
            ended = [one for one in parts.engine.collect() if isinstance(one, Finished)]
            left -= len(ended)
            tokens += sum(one.completion.token_ids.size for one in ended)
            ends.append((time.monotonic(), tokens, left))
            for one in ended:
                given, last = playing[one.key]
                if given:
                    answer = np.array(given.popleft(), np.int32)
                    prompt = np.concatenate([last.prompt, one.completion.token_ids, answer])
                    turn = dataclasses.replace(last, prompt=prompt, seed=last.seed + num, may_continue=bool(given))
                    playing[one.key] = given, turn
                    parts.engine.submit(turn)
                elif plays and waiting:
                    begin()
        steady = [(at, count) for at, count, remaining in ends if rows <= remaining <= num - rows]
        span = span_of(steady if len(steady) > 1 else [(at, n) for at, n, _ in ends])
        Path(sys.argv[2]).write_text(json.dumps(dataclasses.asdict(span)), encoding="utf-8")
    finally:
        parts.close()


if __name__ == "__main__":
    main()
