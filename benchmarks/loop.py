"""Busy share of a sampler's engine over a long line, against the engine in a bare loop on the same requests.

Coordinator, sampler and rewards are processes as they are; the coordinator is a round trip of 150 ms away, behind a
relay, and every reward takes 50 ms. A learner publishes version 0 and ends. A row is an engine and a limit of new
tokens; lengths are the model's own and long-tailed.

    sampler        tokens a second of the sampler's own counter, from its first fill on
    engine alone   the requests that the sampler's groups answer, with their seeds, handed to the engine at once; tokens
                   of the same span, first fill and last one left out
    outage         the line is cut in the middle of the span; groups_lost: spooled, and never acknowledged

    python -m benchmarks.loop --model DIR --out benchmarks/results/loop.json

`--before DIR` measures the sampler of another checkout in the same way.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tomli_w
from rich.console import Console
from rich.table import Table

from benchmarks.loop_engine import Span, span_of
from heterorl.common.generation.tiny_model import write_tiny_model
from heterorl.common.identity.tls import TlsConfig
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.types.rollout import Group
from heterorl.common.types.run import RunStatus
from heterorl.common.wire.sealed_groups import open_group, read_sealed
from heterorl.coordinator.groups.schedule import seed_of
from tests.support.ports import free_port
from tests.support.relay import Relay

ROUND_TRIP_S, REWARD_S, GROUP_SIZE, GOAL = 0.15, 0.05, 8, 0.95
REWARD = f"""import time

def score(prompt, completion, answer):
    time.sleep({REWARD_S})
    return float(len(completion) % 2)
"""
INSECURE = {"insecure": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One engine with one distribution of lengths."""

    engine: str
    lengths: str
    model_dir: str
    rows: int
    max_new_tokens: int
    use_chat_template: bool

    @property
    def warm_tokens(self) -> int:
        """Tokens before the span: those of a fill."""
        return 16 * self.rows

    def engine_table(self) -> dict[str, Any]:
        """Section `engine` of a sampler's configuration."""
        table: dict[str, Any] = {"kind": self.engine, "batch_rows": self.rows, "compute_dtype": "fp32"}
        if self.engine == "vllm":
            table |= {"kv_cache_bytes": 1 << 30, "max_model_len": self.max_new_tokens + 256, "enforce_eager": True}
        return table

    def write(self, directory: Path) -> None:
        """Write the files that the configuration names."""
        (directory / "slow.py").write_text(REWARD)

    def shared(self, directory: Path) -> dict[str, Any]:
        """What every node of the run has."""
        return {
            "model_dir": self.model_dir, "group_size": GROUP_SIZE, "use_chat_template": self.use_chat_template,
            "sampling": {"max_new_tokens": self.max_new_tokens},
            "task": {"name": "arithmetic", "digits": 2, "reward": "slow:score", "reward_path": str(directory),
                     "reward_timeout_s": 30.0, "reward_workers": 8},
        }  # fmt: skip


class Node:
    """One service's process; `source` is the checkout that it runs."""

    def __init__(self, service: str, tables: dict[str, Any], directory: Path, *, source: Path | None = None) -> None:
        config = directory / f"{service}.toml"
        config.write_text(tomli_w.dumps(tables), encoding="utf-8")
        self.log = directory / f"{service}.log"
        path = f"{source}/src:{source}" if source else os.environ.get("PYTHONPATH", "")
        with self.log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "heterorl", service, "--config", str(config)],
                stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, **({"PYTHONPATH": path} if path else {})},
            )  # fmt: skip

    def end(self) -> None:
        """Stop it; kill it where that takes long."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


async def sample(
    case: Case, directory: Path, *, seconds: float, outage_s: float, source: Path | None
) -> dict[str, Any]:
    """One sampler over the line for so many seconds after its first fill; its counters."""
    case.write(directory)
    address, metrics_port = f"127.0.0.1:{free_port()}", free_port()
    run = {"run_id": "loop", "tls": INSECURE, "metrics_port": 0}
    limits = {"groups_per_version": 64, "max_outstanding_groups": 100_000, "max_staleness_versions": 10_000,
              "max_work_ahead_s": 3600.0}  # fmt: skip
    shared = case.shared(directory)
    with contextlib.ExitStack() as nodes:

        def start(service: str, tables: dict[str, Any], **named: Any) -> Node:
            node = Node(service, tables, directory, **named)
            nodes.callback(node.end)
            return node

        start("coordinator", {**run, "data_dir": str(directory / "coordinator"), "listen": address, **limits})
        async with CoordinatorClient(address, tls=TlsConfig(insecure=True)) as client:
            learner = start("learner", {
                **run, **shared, "coordinator": address, "state_dir": str(directory / "learner"),
                "groups_per_step": 64, "max_steps": 1, "verification": {"recompute_rewards": False},
            })  # fmt: skip
            await until(client, lambda status: status.head_version >= 0, learner)
            await asyncio.to_thread(learner.end)
            async with Relay(address, one_way_s=ROUND_TRIP_S / 2).open() as relay:
                own = {"groups_per_batch": case.rows // GROUP_SIZE} if source else {"work_ahead_s": outage_s + 60.0}
                sampler = start("sampler", {
                    **shared, "site": "site", "tls": INSECURE, "coordinator": f"127.0.0.1:{relay.port}",
                    "state_dir": str(directory / "site"), "metrics_port": metrics_port,
                    "engine": case.engine_table(), **own,
                }, source=source)  # fmt: skip
                ends = await watched(sampler, metrics_port, relay, case, seconds=seconds, outage_s=outage_s)
                # Running requests are given up; a release that waits for its batch may do so.
                await asyncio.to_thread(sampler.end)
            counts = (await client.get_status()).ledger
    spooled, left = spool_of(directory / "site")
    return {"ends": ends, "lost": spooled - left - counts.acked}


async def watched(
    sampler: Node, port: int, relay: Relay, case: Case, *, seconds: float, outage_s: float
) -> list[tuple[float, int]]:
    """The sampler's counter of tokens, four times a second, over a span that begins when the engine is full."""
    seen: list[tuple[float, int]] = []
    began = 0.0
    while not began or time.monotonic() < began + seconds:
        assert sampler.process.poll() is None, sampler.log.read_text()[-2000:]
        now, tokens = time.monotonic(), await asyncio.to_thread(tokens_of, port)
        seen.append((now, tokens))
        if not began and tokens > case.warm_tokens:
            began = now
        if began and outage_s:
            is_away = began + seconds / 4 < now < began + seconds / 4 + outage_s
            if is_away != relay.is_cut:
                relay.cut() if is_away else relay.mend()
        await asyncio.sleep(0.25)
    relay.mend()
    return [(at, tokens) for at, tokens in seen if at >= began]


def tokens_of(port: int) -> int:
    """A sampler's counter; 0 before it serves."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return 0
    return int(float(next((line.split()[1] for line in lines if line.startswith("heterorl_tokens_total")), "0")))


def spool_of(state_dir: Path) -> tuple[int, int]:
    """Groups ever spooled, and those that are still there."""
    with contextlib.closing(sqlite3.connect(state_dir / "outbox.sqlite")) as connection:
        (following,) = connection.execute("SELECT value FROM meta WHERE key = 'next_sequence'").fetchone()
        (left,) = connection.execute("SELECT count(*) FROM groups").fetchone()
    return int(following) - 1, int(left)


def groups_of(directory: Path) -> list[Group]:
    """The groups that the coordinator has, in the order of their assignments."""
    with contextlib.closing(sqlite3.connect(directory / "coordinator" / "coordinator.sqlite")) as connection:
        rows = connection.execute("SELECT payload FROM groups").fetchall()
    return sorted((open_group(read_sealed(payload)) for (payload,) in rows), key=lambda group: group.assignment)


def requests_of(directory: Path) -> list[dict[str, Any]]:
    """What was asked of the engine for these groups."""
    return [
        {
            "prompt": group.prompt_token_ids.tolist(),
            "seed": seed_of(group.assignment, seed=0),
            "lengths": [int(rollout.token_ids.size) for rollout in group.rollouts],
        }
        for group in groups_of(directory)
    ]


async def until(client: CoordinatorClient, condition: Any, node: Node) -> RunStatus:
    """Wait for the run's status."""
    async with asyncio.timeout(600):
        while True:
            with contextlib.suppress(Exception):
                status = await client.get_status()
                if condition(status):
                    return status
            assert node.process.poll() is None, node.log.read_text()[-2000:]
            await asyncio.sleep(0.2)


def alone(case: Case, directory: Path, requests: list[dict[str, Any]]) -> Span:
    """The engine in a process of its own on the same requests."""
    job, answer = directory / "alone.json", directory / "answer.json"
    sampler = {**case.shared(directory), "state_dir": str(directory / "alone"), "engine": case.engine_table()}
    job.write_text(json.dumps({"sampler": sampler, "requests": requests}), encoding="utf-8")
    subprocess.run([sys.executable, "-m", "benchmarks.loop_engine", str(job), str(answer)], check=True)
    return Span(**json.loads(answer.read_text(encoding="utf-8")))


def measure(
    case: Case, *, seconds: float, outage_s: float, before: Path | None, work: Path
) -> Iterator[dict[str, Any]]:
    """Rows of one case: this release and, where there is one, the other."""
    runs: list[tuple[str, Path | None, float]] = [("now", None, 0.0)]
    runs += [("now", None, outage_s)] if outage_s else []
    runs += [("before", before.resolve(), 0.0)] if before else []
    for release, source, cut_s in runs:
        directory = work / f"{case.engine}-{case.lengths}-{release}-{cut_s:g}"
        directory.mkdir(parents=True)
        span_s = max(seconds, 2 * cut_s)
        found = asyncio.run(sample(case, directory, seconds=span_s, outage_s=cut_s, source=source))
        requests = requests_of(directory)
        sampler, engine = span_of(found["ends"]), alone(case, directory, requests)
        lengths = sorted(length for request in requests for length in request["lengths"])
        yield {
            "engine": case.engine, "model": Path(case.model_dir).name, "lengths": case.lengths,
            "release": release, "rows": case.rows,
            "engine_alone_tokens_per_s": round(engine.tokens_per_s, 1),
            "sampler_tokens_per_s": round(sampler.tokens_per_s, 1),
            "utilisation": round(sampler.tokens_per_s / engine.tokens_per_s, 3),
            "rtt_ms": round(1e3 * ROUND_TRIP_S), "reward_ms": round(1e3 * REWARD_S), "outage_s": cut_s,
            "groups": len(requests), "groups_lost": found["lost"], "span_s": round(sampler.seconds, 1),
            "length_p50": lengths[len(lengths) // 2], "length_p95": lengths[len(lengths) * 95 // 100],
            "length_max": lengths[-1],
        }  # fmt: skip


def main() -> None:
    """Measure every engine that is installed and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="", help="a pretrained model for vLLM; else a small one of random weights")
    parser.add_argument("--before", type=Path, help="a checkout of another release")
    parser.add_argument("--engines", nargs="*", default=["hf", "vllm"])
    parser.add_argument("--limits", nargs="*", type=int, default=[192, 384], help="most new tokens")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--outage-s", type=float, default=60.0)
    parser.add_argument("--keep", action="store_true", help="keep what --out holds of other cases")
    arguments = parser.parse_args()
    # An end from outside ends the processes of the run too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="loop-") as name:
        small = str(write_tiny_model(Path(name) / "random", seed=0, hidden_size=256, num_layers=4))
        for engine in arguments.engines:
            if engine == "vllm" and find_spec("vllm") is None:
                continue
            is_real = engine == "vllm" and bool(arguments.model)
            for limit in arguments.limits:
                case = Case(
                    engine=engine, lengths=f"own, at most {limit}", model_dir=arguments.model if is_real else small,
                    rows=arguments.rows, max_new_tokens=limit, use_chat_template=is_real,
                )  # fmt: skip
                for row in measure(
                    case, seconds=arguments.seconds, outage_s=arguments.outage_s, before=arguments.before,
                    work=Path(name),
                ):  # fmt: skip
                    print(row, flush=True)
                    rows.append(row)
    if arguments.keep and arguments.out.is_file():
        found = {case_of(row) for row in rows}
        before = json.loads(arguments.out.read_text(encoding="utf-8"))["rows"]
        rows = [row for row in before if case_of(row) not in found] + rows
    show(rows)
    document = {
        "processor": "cpu", "cores": os.cpu_count(), "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(), "goal": GOAL, "rows": rows,
    }  # fmt: skip
    arguments.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def case_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a row measures."""
    return tuple(row[name] for name in ("engine", "model", "lengths", "release", "rows", "outage_s"))


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    table = Table(
        "engine", "model", "lengths", "release", "outage s", "alone tokens/s", "sampler tokens/s", "utilisation", "lost"
    )
    for row in rows:
        table.add_row(
            row["engine"], row["model"], row["lengths"], row["release"], f"{row['outage_s']:g}",
            f"{row['engine_alone_tokens_per_s']:,.0f}", f"{row['sampler_tokens_per_s']:,.0f}",
            f"{row['utilisation']:.3f}", str(row["groups_lost"]),
        )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
