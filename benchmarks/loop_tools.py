"""Busy share of a sampler's engine while tools run, over a long line, against the same engine alone.

Alone, the engine draws as many trajectories, and each turn's answer comes at once.

benchmarks.loop's world with trajectories of four turns. Between two turns a tool waits: log-normal, its mean three
times the generation of a turn, which a run without waits measures first. An outage cuts the line.

    python -m benchmarks.loop_tools --out benchmarks/results/loop_tools.json
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.curves.warm_start import build_tokenizer
from benchmarks.loop import GROUP_SIZE, ROUND_TRIP_S, Case, alone, groups_of, sample
from benchmarks.loop_engine import span_of
from heterorl.common.generation.tiny_model import write_tiny_model
from heterorl.common.types.rollout import turns_of

TURNS, WAITS, SIGMA = 4, 3.0, 0.6
ENVIRONMENT = """import random
import time


class Waits:
    def reset(self, row, *, seed):
        return "begin"

    def step(self, action):
        time.sleep({mean} * random.lognormvariate({mu}, {sigma}))
        return "go on"

    def score(self):
        return random.random()
"""
GOALS = {False: 0.90, True: 0.85}
"""Least busy share, without and with an outage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCase(Case):
    """A case with an environment whose steps take `wait_s` on average."""

    wait_s: float

    @property
    def workers(self) -> int:
        """Processes of episodes: those that play while the engine's rows draw, and a group's room."""
        return round(self.rows * (1 + WAITS)) + GROUP_SIZE

    @property
    def warm_tokens(self) -> int:
        """Tokens before the span: those of an episode in each worker, whose start takes a second of a core."""
        return self.workers * TURNS * self.max_new_tokens // 2

    def write(self, directory: Path) -> None:
        text = ENVIRONMENT.format(mean=self.wait_s, mu=-(SIGMA**2) / 2, sigma=SIGMA)
        (directory / "waiting.py").write_text(text)

    def shared(self, directory: Path) -> dict[str, Any]:
        draws = {"max_new_tokens": self.max_new_tokens, "max_trajectory_tokens": TURNS * (self.max_new_tokens + 32)}
        return {
            "model_dir": self.model_dir, "group_size": GROUP_SIZE, "use_chat_template": True, "sampling": draws,
            "task": {"name": "seeds", "size": 100_000, "environment": "waiting:Waits", "max_turns": TURNS,
                     "environment_path": str(directory), "step_timeout_s": 60.0,
                     "environment_workers": self.workers},
        }  # fmt: skip


def trajectories_of(directory: Path) -> list[dict[str, Any]]:
    """The coordinator's rollouts as requests: their drawn tokens by turn, and what was given between two turns."""
    requests: list[dict[str, Any]] = []
    for group in groups_of(directory):
        for rollout in group.rollouts:
            tokens = rollout.token_ids.tolist()
            drawn = turns_of(rollout)
            requests.append(
                {
                    "prompt": group.prompt_token_ids.tolist(), "seed": len(requests),
                    "lengths": [int(rollout.token_ids.size)],
                    "given": [tokens[end:start] for (_, end), (start, _) in itertools.pairwise(drawn)],
                    "turns": [end - start for start, end in drawn],
                }
            )  # fmt: skip
    return requests


def measure(case: ToolCase, *, seconds: float, outage_s: float, work: Path) -> dict[str, Any]:
    """One row."""
    directory = work / f"{case.wait_s:g}-{outage_s:g}"
    directory.mkdir(parents=True)
    found = asyncio.run(sample(case, directory, seconds=seconds, outage_s=outage_s, source=None))
    trajectories = trajectories_of(directory)
    sampler, engine = span_of(found["ends"]), alone(case, directory, trajectories)
    lengths = sorted(length for one in trajectories for length in one["turns"])
    # All rows of the engine draw one turn in this time.
    turn_s = case.rows * sum(lengths) / len(lengths) / engine.tokens_per_s
    return {
        "engine": case.engine, "rows": case.rows, "turns": TURNS, "turn_s": round(turn_s, 2),
        "tool_s": round(case.wait_s, 2), "outage_s": outage_s, "rtt_ms": round(1e3 * ROUND_TRIP_S),
        "engine_alone_tokens_per_s": round(engine.tokens_per_s, 1),
        "sampler_tokens_per_s": round(sampler.tokens_per_s, 1),
        "busy": round(sampler.tokens_per_s / engine.tokens_per_s, 3),
        "drawn_turns": len(lengths), "groups_lost": found["lost"], "span_s": round(sampler.seconds, 1),
        "length_p50": lengths[len(lengths) // 2],
    }  # fmt: skip


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    table = Table("turn s", "tool s", "outage s", "alone tokens/s", "sampler tokens/s", "busy", "lost")
    for row in rows:
        table.add_row(
            f"{row['turn_s']:g}", f"{row['tool_s']:g}", f"{row['outage_s']:g}",
            f"{row['engine_alone_tokens_per_s']:,.0f}", f"{row['sampler_tokens_per_s']:,.0f}", f"{row['busy']:.3f}",
            str(row["groups_lost"]),
        )  # fmt: skip
    Console(width=120).print(table)


def main() -> None:
    """Measure without waits, with waits, and with waits and an outage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=120.0, help="of the two runs without an outage")
    parser.add_argument("--outage-s", type=float, default=200.0, help="half of the third run")
    arguments = parser.parse_args()
    # A card computes aside from the episodes' cores: here one thread does.
    os.environ["OMP_NUM_THREADS"] = "1"
    # An end from outside ends the processes of the run too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="loop-tools-") as name:
        shape = {"hidden_size": 256, "num_layers": 4, "num_positions": 1024}
        model = str(write_tiny_model(Path(name) / "random", seed=0, tokenizer=build_tokenizer(()), **shape))
        wait_s, outage_s = 0.0, 0.0
        for _ in range(3):
            case = ToolCase(
                engine="hf", lengths="own", model_dir=model, rows=arguments.rows, max_new_tokens=96,
                use_chat_template=True, wait_s=wait_s,
            )  # fmt: skip
            span_s = max(arguments.seconds, 2 * outage_s)
            rows.append(measure(case, seconds=span_s, outage_s=outage_s, work=Path(name)))
            print(rows[-1], flush=True)
            outage_s = arguments.outage_s if wait_s else 0.0
            wait_s = WAITS * rows[0]["turn_s"]
    show(rows)
    document = {
        "processor": "cpu", "cores": os.cpu_count(), "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "goals": {"busy": GOALS[False], "busy_in_an_outage": GOALS[True]}, "rows": rows,
    }  # fmt: skip
    arguments.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
