"""Bytes of a version on a long line when eight samplers of one site pull it, with a relay and without.

Two network namespaces, joined by a TUN device whose packets arrive 75 ms later each way. In one of them a coordinator
in a process of its own; in the other the samplers' side of a pull (plan, fetch, apply, digest of the state), eight of
them at once, and with a relay its process. Certificates are on. Counted is what crosses the device, in both directions,
headers, handshakes and pings included, beside one sampler's pull without a relay in the same run.

    python -m benchmarks.relay --out benchmarks/results/relay.json
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.pull import build_arenas, publish
from heterorl.certs.authority_directory import Authority
from heterorl.common.identity.spiffe import Role
from heterorl.common.identity.tls import TlsConfig, files_in
from heterorl.common.process.clock import SystemClock
from heterorl.common.pull.puller import Puller
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.weights.arena import Layout, TensorSpec
from heterorl.demo.processes import Child, start, stop
from tests.support.wan_link import ADDRESS_A, WanLink, inside, unavailable

SAMPLERS = 8
DELAY_S = 0.075
GOAL = 1.05
COORDINATOR, RELAY = f"{ADDRESS_A}:50051", "127.0.0.1:50061"
START_S = 60.0


def certificates(directory: Path) -> dict[str, Path]:
    """Files of every node, by its site or role."""
    authority, now = Authority(directory), datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    authority.init(run="bench", now=now, lifetime=2 * day)

    def issue(role: Role, site: str, *hosts: str) -> Path:
        return authority.issue(role=role, site=site, hosts=hosts, out=None, now=now, lifetime=day)

    nodes = {
        "coordinator": issue(Role.COORDINATOR, "main", ADDRESS_A),
        "learner": issue(Role.LEARNER, "main"),
        "relay": issue(Role.RELAY, "eu"),
    }
    return nodes | {f"eu.{number}": issue(Role.SAMPLER, f"eu.{number}") for number in range(SAMPLERS)}


def line_bytes() -> int:
    """Bytes that have crossed the line in both directions."""
    command = ["ip", "-s", "-j", "link", "show", "dev", "wan0"]
    (entry,) = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return int(entry["stats64"]["rx"]["bytes"]) + int(entry["stats64"]["tx"]["bytes"])


async def pull_all(address: str, *, count: int, version: int, model_bytes: int, directory: Path) -> float:
    """Pull a version with so many samplers at once; returns the seconds until the last has it."""
    layout = Layout.build([TensorSpec(name="w", dtype="bf16", shape=(model_bytes // 2,))])

    async def pull(number: int) -> str:
        site = f"eu.{number}"
        tls = TlsConfig(**files_in(directory / "certs" / f"sampler-{site}"))
        with tempfile.TemporaryDirectory(dir=directory) as spool:
            async with CoordinatorClient(address, tls=tls) as client:
                puller = Puller(api=client, spool=Path(spool), layout=layout, clock=SystemClock())
                return (await puller.pull(held=None, want_version=version)).manifest.state_root

    started = time.perf_counter()
    roots = await asyncio.gather(*(pull(number) for number in range(count)))
    assert len(set(roots)) == 1
    return time.perf_counter() - started


def pulled(
    link: WanLink, address: str, *, count: int, options: argparse.Namespace, directory: Path
) -> tuple[int, float]:
    """(bytes on the line, seconds) of pulls by a process at the far site."""
    words = [sys.executable, "-m", "benchmarks.relay", "--pull", address, "--count", str(count)]
    words += ["--directory", str(directory), "--model-mb", str(options.model_mb)]
    before = line_bytes()
    with inside(link.site_b):
        child = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    return line_bytes() - before, float(child.stdout)


def serving(child: Child, address_file: Path) -> None:
    """Wait until a service listens."""
    deadline = time.monotonic() + START_S
    while not address_file.exists():
        child.check()
        assert time.monotonic() < deadline, f"{child.name} does not listen: {child.log}"
        time.sleep(0.1)


async def measure(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """All figures of one run."""
    nodes = certificates(directory / "certs")
    link = WanLink(delay_s=DELAY_S, jitter_s=0.0, loss=0.0)
    children = []
    try:
        tables = {
            "run_id": "bench",
            "data_dir": str(directory / "coordinator"),
            "listen": COORDINATOR,
            "metrics_port": 0,
            "tls": files_in(nodes["coordinator"]),
        }
        children.append(start("coordinator", name="coordinator", tables=tables, directory=directory))
        await asyncio.to_thread(serving, children[-1], directory / "coordinator" / "address")
        async with CoordinatorClient(COORDINATOR, tls=TlsConfig(**files_in(nodes["learner"]))) as learner:
            refs = await publish(learner, build_arenas(options.model_mb * 1_000_000), directory)
        rows = {
            name: await asyncio.to_thread(pulled, link, COORDINATOR, count=count, options=options, directory=directory)
            for name, count in (("one_pull", 1), ("without_relay", SAMPLERS))
        }
        tables = {
            "coordinator": COORDINATOR,
            "listen": RELAY,
            "cache_dir": str(directory / "relay"),
            "metrics_port": 0,
            "tls": files_in(nodes["relay"]),
        }
        before = line_bytes()
        with inside(link.site_b):
            children.append(start("relay", name="relay", tables=tables, directory=directory))
        await asyncio.to_thread(serving, children[-1], directory / "relay" / "address")
        _, seconds = await asyncio.to_thread(pulled, link, RELAY, count=SAMPLERS, options=options, directory=directory)
        rows["with_relay"] = (line_bytes() - before, seconds)
        rows["kept"] = await asyncio.to_thread(
            pulled, link, RELAY, count=SAMPLERS, options=options, directory=directory
        )
    finally:
        stop(children)
        link.close()
    one = rows["one_pull"][0]
    return {
        "samplers": SAMPLERS,
        "round_trip_s": 2 * DELAY_S,
        "model_bytes": options.model_mb * 1_000_000,
        "payload_bytes": refs[0].num_bytes,
        "bytes_of_one_pull": one,
        "bytes_on_line_per_version": rows["with_relay"][0],
        "goal_ratio": GOAL,
        "ratio": round(rows["with_relay"][0] / one, 4),
        "ratio_without_relay": round(rows["without_relay"][0] / one, 4),
        "rows": {
            name: {"bytes_on_line": num_bytes, "seconds": round(seconds, 2)}
            for name, (num_bytes, seconds) in rows.items()
        },
    }


def main() -> None:
    """Measure, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-mb", type=int, default=16)
    parser.add_argument("--pull", default="", help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/relay.json"))
    options = parser.parse_args()
    if options.pull:
        num_bytes = options.model_mb * 1_000_000
        pulling = pull_all(
            options.pull, count=options.count, version=0, model_bytes=num_bytes, directory=options.directory
        )
        sys.stdout.write(f"{asyncio.run(pulling)}\n")
        return
    if not options.inside:
        if problem := unavailable():
            parser.error(problem)
        os.execvp("unshare", ["unshare", "-rn", sys.executable, "-m", "benchmarks.relay", *sys.argv[1:], "--inside"])
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with tempfile.TemporaryDirectory(prefix="heterorl-relay-") as directory:
        results = asyncio.run(measure(options, Path(directory)))
    table = Table(title=f"{SAMPLERS} samplers pull a payload of {results['payload_bytes'] / 1e6:.1f} MB, 150 ms away")
    for column in ("pulls", "MB on the line", "of one pull", "seconds"):
        table.add_column(column, justify="right")
    for name, row in results["rows"].items():
        share = row["bytes_on_line"] / results["bytes_of_one_pull"]
        table.add_row(name, f"{row['bytes_on_line'] / 1e6:.2f}", f"{share:.3f}", f"{row['seconds']:.1f}")
    Console(width=100).print(table)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
