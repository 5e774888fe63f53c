"""An engine alone on given requests: `python -m benchmarks.loop_engine JOB.json ANSWER.json`, of benchmarks.loop.

All requests are its own from the beginning, so it is as busy as it can be. The answer is the span between the first
fill's end and the last one's beginning; a file, because an engine writes to standard output what it likes.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from heterorl.common.generation.inference_engine import Finished, Request
from heterorl.sampler.components import load_components
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
    parts = load_components(SamplerConfig.model_validate(job["sampler"]), scores_here=True)
    try:
        base = parts.base()
        assert base is not None
        parts.engine.load(base, 0)
        members = [len(request["lengths"]) for request in job["requests"]]
        for key, (request, count) in enumerate(zip(job["requests"], members, strict=True)):
            prompt = np.array(request["prompt"], np.int32)
            parts.engine.submit(Request(key=key, prompt=prompt, seed=request["seed"], num_completions=count))
        left, tokens, ends = sum(members), 0, []
        while left:
            ended = [one for one in parts.engine.collect() if isinstance(one, Finished)]
            left -= len(ended)
            tokens += sum(one.completion.token_ids.size for one in ended)
            ends.append((time.monotonic(), tokens, left))
        rows = parts.engine.max_running
        steady = [(at, count) for at, count, remaining in ends if rows <= remaining <= sum(members) - rows]
        span = span_of(steady if len(steady) > 1 else [(at, n) for at, n, _ in ends])
        Path(sys.argv[2]).write_text(json.dumps(dataclasses.asdict(span)), encoding="utf-8")
    finally:
        parts.close()


if __name__ == "__main__":
    main()
