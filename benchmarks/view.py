"""Time of `heterorl view` with many samples, against a bare page of the same size from the same process.

Requests are what a person does: the newest page, pages deep in the list, filters, searches for what is often said, for
what is said once, for two characters, for what nobody says, and samples. Each is followed by a request of a bare page
that is as large, answered by the same kind of server without index, templates or pages. Times are from a client's
request to the last byte, over one connection. Samples are made up: arithmetic in 4 completions of about 90 tokens.

    python -m benchmarks.view --out benchmarks/results/view.json
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from heterorl.common.types.sample import Sample
from heterorl.view.pages import Pages
from heterorl.view.sample_index import SampleIndex, SourceProgress
from heterorl.view.view_server import Answer, ViewServer, cookie_name
from tests.support.samples import make_sample

BATCH = 256
KEY = "key"
LIMIT_BYTES = 16 << 30


class MadeUp:
    """A source that has nothing more."""

    name = "made up"
    progress = SourceProgress(is_done=True)

    def start(self) -> None:
        """Nothing to begin."""

    def fetch(self, sample_id: int) -> Sample | None:  # noqa: ARG002 - of the protocol
        """Nothing beside the index."""
        return None

    def close(self) -> None:
        """Nothing to end."""


def kinds(num_samples: int) -> dict[str, Callable[[random.Random], str]]:
    """Requests by what they are for."""
    return {
        "newest page": lambda _: "/",
        "deep page": lambda dice: f"/?before={dice.randint(60, num_samples)}",
        "filters": lambda dice: (
            f"/?site=eu-1&fate=reward_mismatch&version_from={dice.randint(50, 1000)}&reward_from=0.9"
        ),
        "search, often said": lambda dice: f"/?text=check+the+carry&before={dice.randint(60, num_samples)}",
        "search, said seldom": lambda dice: f"/?text=boxed%7B{dice.randint(1000, 1998)}%7D",
        "search and filter": lambda dice: f"/?text=What+is+{dice.randint(100, 999)}&truncated=yes&site=ap-3",
        "search, two characters": lambda dice: f"/?text={dice.randint(10, 99)}",
        "search, nobody says it": lambda dice: f"/?text=carry+the+answer+{dice.randint(0, 9)}",
        "sample": lambda dice: f"/sample/{dice.randint(1, num_samples)}",
        "sample of a search": lambda dice: f"/sample/{dice.randint(1, num_samples)}?text=look+right&fate=dropped",
    }


class Client:
    """One connection to a server, as a browser keeps it."""

    def __init__(self, server: ViewServer) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
        self._headers = {"Cookie": f"{cookie_name(server.server_port)}={KEY}"}

    def ask(self, path: str) -> tuple[float, bytes]:
        """Milliseconds and what came."""
        begin = time.perf_counter()
        self._connection.request("GET", path, headers=self._headers)
        answer = self._connection.getresponse()
        body = answer.read()
        took_ms = 1000 * (time.perf_counter() - begin)
        assert answer.status == 200, (path, answer.status)
        return took_ms, body

    def close(self) -> None:
        """End the connection."""
        self._connection.close()


def measure(directory: Path, *, num_samples: int, repeats: int) -> dict[str, Any]:
    """Fill an index, then ask; times in ms."""
    index = SampleIndex(directory, limit_bytes=LIMIT_BYTES)
    fill_s, num_characters = 0.0, 0
    for first in range(1, num_samples + 1, BATCH):
        samples = [make_sample(n) for n in range(first, min(first + BATCH, num_samples + 1))]
        num_characters += sum(len(rollout.completion) for sample in samples for rollout in sample.rollouts)
        begin = time.perf_counter()
        index.add_samples(samples)
        fill_s += time.perf_counter() - begin
    held = {"body": b""}
    servers = [
        ViewServer(Pages(index, MadeUp()).respond, port=0, key=KEY),
        ViewServer(lambda *_: Answer(body=held["body"]), port=0, key=KEY),
    ]
    for server in servers:
        server.start()
    page, bare = map(Client, servers)
    dice, rows = random.Random(0), []
    times: list[tuple[float, float]] = []
    page.ask("/")
    for name, path in kinds(num_samples).items():
        own = []
        for _ in range(repeats):
            took_ms, held["body"] = page.ask(path(dice))
            own.append((took_ms, bare.ask("/")[0], len(held["body"])))
        times += [(took_ms, bare_ms) for took_ms, bare_ms, _ in own]
        p50, p95 = np.percentile([took_ms for took_ms, _, _ in own], [50, 95])
        rows.append(
            {
                "request": name,
                "page_ms_p50": round(float(p50), 2),
                "page_ms_p95": round(float(p95), 2),
                "bare_ms_p50": round(statistics.median(bare_ms for _, bare_ms, _ in own), 2),
                "kb": round(statistics.fmean(size for _, _, size in own) / 1000, 1),
            }
        )
    for client in (page, bare):
        client.close()
    for server in servers:
        server.close()
    index.close()
    page_p95, bare_p95 = (float(np.percentile([pair[i] for pair in times], 95)) for i in (0, 1))
    ratios = [took_ms / bare_ms for took_ms, bare_ms in times]
    return {
        "samples": num_samples,
        "page_ms_p95": round(page_p95, 2),
        "bare_ms_p95": round(bare_p95, 2),
        "ratio_p50": round(statistics.median(ratios), 1),
        "ratio_p95": round(page_p95 / bare_p95, 1),
        "fill_samples_per_s": round(num_samples / fill_s),
        "completion_mb": round(num_characters / 1e6, 1),
        "index_mb": round(sum(path.stat().st_size for path in directory.iterdir()) / 1e6, 1),
        "requests": rows,
    }


def main() -> None:
    """Measure, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/view.json"))
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--repeats", type=int, default=40)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="heterorl-bench-view-") as directory:
        results = measure(Path(directory), num_samples=arguments.samples, repeats=arguments.repeats)
    results |= {
        "repeats": arguments.repeats,
        "processor": platform.processor() or "cpu",
        "cores": os.cpu_count(),
        "load_average_before": round(load, 2),
    }
    table = Table(title=f"pages of heterorl view with {arguments.samples:,} samples, ms")
    for column in results["requests"][0]:
        table.add_column(column, justify="left" if column == "request" else "right")
    for row in results["requests"]:
        table.add_row(*(str(value) for value in row.values()))
    console = Console(width=120)
    console.print(table)
    console.print({name: value for name, value in results.items() if name != "requests"})
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
