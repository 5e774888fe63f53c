"""Seconds from the end of a learner's step to the durable ack of its version, and what each rank holds meanwhile.

For the torch backend, ZeRO and FSDP2 with 1, 2 and 4 ranks over gloo, each rank a real process, and a
coordinator in a process of its own over gRPC. `before` is the same backend with versions and checkpoints gathered by
rank 0, which codes and writes them alone; in `between` ranks write checkpoints between two steps (`overlap_checkpoint =
false`). `stall_s` is the part of a checkpoint for which the next step waits, and `state_s` what of it masters and
moments take; the rest is a snapshot of the published weights. Each row is a run of its own: load, a first version (a
snapshot), then steps and their versions, the last ones with a checkpoint. Memory is the peak of each rank's resident
memory (VmHWM) in each phase, and what it held before the model (`base_rss_mb`), with everything imported.

`digests_equal`: a last version is coded by all ranks and again by rank 0 alone from the gathered weights; payload,
manifest and digests are the same bytes.

`losses` are those of the steps, on the same groups from the same weights in every row.

`nodes` is how many machines the ranks count at their meeting: as many agents of torchrun start them, on loopback here.

    python -m benchmarks.publish --rows fsdp2:2 fsdp2:2:2 torch:1 --out benchmarks/results/publish.json

Rows that the file has already and that are not asked for stay as they are.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.costs import forget_peak, resident_bytes
from benchmarks.load_memory import write_model
from tests.support.ports import free_port
from tests.support.rank_processes import torchrun

ROOT = Path(__file__).resolve().parents[1]
MB = 1e6
BACKENDS: dict[str, dict[str, Any]] = {
    "torch": {"kind": "torch"},
    "zero before": {"kind": "deepspeed", "stage": 2, "overlap_checkpoint": False},
    "zero": {"kind": "deepspeed", "stage": 2},
    "fsdp2 before": {"kind": "fsdp2", "overlap_checkpoint": False},
    "fsdp2 between": {"kind": "fsdp2", "overlap_checkpoint": False},
    "fsdp2": {"kind": "fsdp2"},
}
ROWS = [
    ("torch", 1, 1),
    *((name, ranks, 1) for ranks in (1, 2, 4) for name in BACKENDS if name != "torch"),
    ("zero", 2, 2),
    ("fsdp2", 2, 2),
]
"""Backend, ranks, and on how many nodes."""
PHASES = ("load", "step", "publish", "checkpoint")


class _Peaks:
    """The peak of each rank's memory in each phase."""

    def __init__(self, pids: list[int]) -> None:
        self.pids = pids
        self.base = self._read("VmRSS")
        self.found: dict[str, list[float]] = {}

    def _read(self, field: str) -> list[float]:
        return [round(resident_bytes(pid, field) / MB, 1) for pid in self.pids]

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure; a phase may come again."""
        for pid in self.pids:
            forget_peak(pid)
        yield
        # The other ranks may be some instructions behind rank 0.
        time.sleep(0.3)
        peaks = zip(self._read("VmHWM"), self.found.get(name, [0.0] * len(self.pids)), strict=True)
        self.found[name] = [max(pair) for pair in peaks]


def _config(name: str, model_dir: str, directory: Path, address: str) -> Any:
    from heterorl.learner.learner_config import LearnerConfig

    options = {"compute_dtype": "fp32", "threads": 1, "micro_batch_tokens": 64, "lr": 1e-5, **BACKENDS[name]}
    return LearnerConfig.model_validate(
        {
            "run_id": "bench", "coordinator": address, "tls": {"insecure": True}, "model_dir": model_dir,
            "state_dir": directory / "learner", "sampling": {"max_new_tokens": 16}, "loss": {"kind": "grpo"},
            "backend": options,
        }
    )  # fmt: skip


def _work(job: dict[str, Any]) -> dict[str, Any]:
    """One row, in rank 0's process."""
    import torch

    from heterorl.common.rpc.transport_options import keep_freed_frames
    from heterorl.demo.processes import start, stop
    from heterorl.learner.backends.ranks import checkpoint_writer
    from heterorl.learner.backends.ranks.local_ranks import LocalRanks
    from heterorl.learner.backends.ranks.rank_env import rank_env_of
    from heterorl.learner.backends.ranks.rank_group import RankGroup
    from heterorl.learner.backends.ranks.sharded_backend import ShardedBackend
    from heterorl.learner.backends.torch_backend import TorchBackend
    from heterorl.learner.learner_parts import build_divided
    from heterorl.learner.rank_process import follow
    from tests.support.training import random_groups

    # As a learner's own process does.
    keep_freed_frames()
    name, directory = job["backend"], Path(job["directory"])
    address = f"127.0.0.1:{free_port()}"
    tiny, config = (_config(name, job[key], directory, address) for key in ("tiny", "model_dir"))
    if BACKENDS[name]["kind"] == "deepspeed":
        from heterorl.learner.backends.zero import import_deepspeed

        import_deepspeed("cpu")
    torch.set_num_threads(1)
    place = rank_env_of(os.environ)
    if place is not None and place.rank:
        (directory / f"pid-{place.rank}").write_text(str(os.getpid()), encoding="utf-8")
        sys.exit(follow(place))
    local = LocalRanks(job["ranks"]) if name != "torch" and place is None else None
    met = place if local is None else local.rank_env
    rank_group = None if met is None else RankGroup(met)

    def build(config: Any) -> Any:
        if rank_group is None:
            sampling = config.sampling.semantics()
            return TorchBackend(model_dir=config.model_dir, config=config.backend, loss=config.loss, sampling=sampling)
        rank_group.rendezvous.say(config.model_dump_json())
        return build_divided(config, rank_group.join(config))

    if name.endswith("before"):
        # What rank 0 does alone; the others do what it says.
        mock.patch.object(ShardedBackend, "is_divided", new=False).start()
        mock.patch.object(checkpoint_writer, "_sees", return_value=False).start()
    warm = build(tiny)
    warm.train_step(random_groups(4, seed=0), head_version=2, step=1)
    if rank_group is not None:
        warm.stop()
    if place is None:
        others = [] if local is None else [process.pid for process in local._children]
    else:
        others = [int((directory / f"pid-{rank}").read_text()) for rank in range(1, place.world_size)]
    tables = {
        "run_id": "bench", "data_dir": str(directory / "coordinator"), "listen": address, "metrics_port": 0,
        "groups_per_version": 4, "max_outstanding_groups": 4096, "max_staleness_versions": 4096,
        "max_superseded_s": 1e6, "tls": {"insecure": True},
    }  # fmt: skip
    child = start("coordinator", name="coordinator", tables=tables, directory=directory)
    try:
        peaks = _Peaks([os.getpid(), *others])
        with peaks.phase("load"):
            backend = build(config)
        answer = asyncio.run(_versions(job, config, backend, peaks))
    finally:
        stop([child])
    if rank_group is not None:
        counted = rank_group.rendezvous.rank_env
        answer["nodes"] = counted.world_size // counted.local_world_size
        backend.stop()
        rank_group.rendezvous.end()
        rank_group.leave()
    if local is not None:
        local.close()
    return answer


async def _versions(job: dict[str, Any], config: Any, backend: Any, peaks: _Peaks) -> dict[str, Any]:
    from heterorl.common.identity.tls import TlsConfig
    from heterorl.common.process.backoff import Backoff
    from heterorl.common.process.clock import SystemClock
    from heterorl.common.rpc.client import CoordinatorClient
    from heterorl.learner.publish.checkpoint_store import CheckpointStore
    from heterorl.learner.publish.publisher import Publisher
    from heterorl.learner.publish.version_payloads import PublishedHead
    from heterorl.learner.step_metrics import TrainingLog
    from tests.support.learner_world import make_contract
    from tests.support.training import random_groups

    class TimedStore(CheckpointStore):
        """Adds up what checkpoints take."""

        seconds = stall = state = 0.0

        def __getattribute__(self, name: str) -> Any:
            found = super().__getattribute__(name)
            if name not in ("begin", "write", "write_published"):
                return found

            def timed(*arguments: Any, **named: Any) -> Any:
                started = time.perf_counter()
                try:
                    return found(*arguments, **named)
                finally:
                    passed = time.perf_counter() - started
                    self.seconds += passed
                    self.stall += passed * (name != "write")
                    self.state += passed * (name == "begin")

            return timed

    directory = Path(job["directory"]) / "learner"
    store = TimedStore(directory / "checkpoints")
    backoff = Backoff(clock=SystemClock(), rng=random.Random(0), base_s=0.1, cap_s=0.5)
    losses: list[float] = []
    times: dict[str, list[float]] = {"step": [], "publish": [], "checkpoint": [], "stall": [], "state": []}
    async with CoordinatorClient(config.coordinator, tls=TlsConfig(insecure=True)) as client:
        contract = make_contract(backend.layout, vocab_size=job["vocab_size"])
        await backoff.retry(client.get_status)
        grant = await client.acquire_lease(holder="bench", contract=contract, request_id="bench")
        publisher = Publisher(
            client, run_id="bench", epoch=grant.epoch, layout=backend.layout, directory=directory / "payloads",
            store=store, training_log=TrainingLog(directory), backoff=backoff, snapshot_every_versions=1000,
            checkpoint_every_versions=1000,
        )  # fmt: skip
        publisher.position = PublishedHead(head_version=-1, lineage_version=-1, lineage_digest="", shadow=None)
        for number in range(-1, 2 * job["versions"]):
            if number >= 0:
                started = time.perf_counter()
                with peaks.phase("step"):
                    groups = random_groups(job["groups"], seed=number)
                    report = await asyncio.to_thread(backend.train_step, groups, head_version=2, step=number)
                    losses.append(report.loss)
                    times["step"].append(time.perf_counter() - started)
            with_checkpoint = number >= job["versions"]
            store.seconds = store.stall = store.state = 0.0
            started = time.perf_counter()
            with peaks.phase("checkpoint" if with_checkpoint else "publish"):
                arena = await publisher.stage(backend)
                saved_by = backend if with_checkpoint else None
                await publisher.publish(arena, step=number + 1, saved_by=saved_by, is_last=with_checkpoint)
                del arena
                seconds = time.perf_counter() - started
            if with_checkpoint:
                times["checkpoint"].append(store.seconds)
                times["stall"].append(store.stall)
                times["state"].append(store.state)
            elif number >= 0:
                times["publish"].append(seconds)
        equal = await asyncio.to_thread(_is_equal, backend, publisher, directory)
    found = peaks.found
    return {
        "backend": job["backend"],
        "ranks": job["ranks"],
        "nodes": 1,
        "parameters": job["parameters"],
        **{f"{name}_s": round(statistics.median(values), 3) for name, values in times.items()},
        "peak_rss_mb": [max(values) for values in zip(*found.values(), strict=True)],
        "base_rss_mb": peaks.base,
        "phases_rss_mb": {phase: found[phase] for phase in PHASES},
        "losses": losses,
        "digests_equal": equal,
    }


def _is_equal(backend: Any, publisher: Any, directory: Path) -> bool:
    """Whether all ranks' next version has the bytes of rank 0's."""
    import dataclasses

    from heterorl.common.weights.arena import Arena
    from heterorl.learner.publish.publisher import maker_of
    from heterorl.learner.publish.version_payloads import encode_version
    from tests.support.training import random_groups

    backend.train_step(random_groups(4, seed=99), head_version=2, step=99)
    position = publisher.position
    maker = maker_of(backend, with_variants=False)
    arena = Arena(backend.layout)
    backend.store(arena)
    alone_from = dataclasses.replace(position, shadow=position.shadow.whole())
    cases: list[tuple[str, Any, Any]] = [("alone", alone_from, arena)]
    if maker is not None:
        cases.append(("together", position, maker.stage()))
    bytes_of = []
    for name, start, weights in cases:
        folder = directory / name
        folder.mkdir()
        encoded = encode_version(start, weights, directory=folder, run_id="b", epoch=1, step=9, with_snapshot=True)
        bytes_of.append((encoded.manifest_bytes, [path.read_bytes() for _, path in encoded.files]))
    return all(found == bytes_of[0] for found in bytes_of)


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Run one row in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    nodes, command = job["nodes"], [sys.executable, "-P", str(Path(__file__).resolve())]
    others: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="heterorl-publish-") as directory:
        own = ["--job", json.dumps({**job, "directory": directory})]
        if nodes > 1:
            environment |= {"GLOO_SOCKET_IFNAME": "lo"}
            port, num_processes = free_port(), job["ranks"] // nodes
            agents = [torchrun(node, nodes, port=port, num_processes=num_processes) for node in range(nodes)]
            command, *rest = [[*agent, "-m", "benchmarks.publish"] for agent in agents]
            others = [subprocess.Popen([*words, *own], env=environment, cwd=ROOT) for words in rest]
        try:
            done = subprocess.run(
                [*command, *own], env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=3600
            )
            for process in others:
                process.wait(60)
        finally:
            for process in others:
                process.kill()
                process.wait()
    line = next(line for line in done.stdout.splitlines() if line.startswith("ANSWER "))
    answer: dict[str, Any] = json.loads(line.removeprefix("ANSWER "))
    return answer


def _row(text: str) -> tuple[str, int, int]:
    known = {f"{name}:{ranks}:{nodes}": (name, ranks, nodes) for name, ranks, nodes in ROWS}
    row = known.get(text if text.count(":") > 1 else f"{text}:1")
    if row is None:
        raise argparse.ArgumentTypeError(f"{text} is not one of {', '.join(known)}")
    return row


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", nargs="+", type=_row, default=ROWS, metavar="BACKEND:RANKS[:NODES]")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--versions", type=int, default=2, help="without a checkpoint, and as many with one")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        print("ANSWER " + json.dumps(_work(json.loads(options.job))), flush=True)
        return
    rows: dict[tuple[str, int, int], dict[str, Any]] = {}
    if options.out is not None and options.out.exists():
        old = json.loads(options.out.read_text(encoding="utf-8"))
        rows = {(row["backend"], row["ranks"], row["nodes"]): row for row in old["rows"]}
    with tempfile.TemporaryDirectory(prefix="heterorl-publish-model-") as place:
        tiny, model_dir = Path(place) / "tiny", Path(place) / "model"
        write_model(tiny, hidden_size=32, num_layers=1, vocab_size=64)
        vocab_size = 8192
        size = write_model(model_dir, hidden_size=options.width, num_layers=options.layers, vocab_size=vocab_size)
        job = {
            "tiny": str(tiny), "model_dir": str(model_dir), "parameters": size, "vocab_size": vocab_size,
            "versions": options.versions, "groups": options.groups,
        }  # fmt: skip
        for name, ranks, nodes in options.rows:
            if name.startswith("zero") and find_spec("deepspeed") is None:
                print(f"{name}:{ranks}:{nodes} is left out: DeepSpeed is not installed", flush=True)
                continue
            row = measure({**job, "backend": name, "ranks": ranks, "nodes": nodes})
            rows[name, ranks, row["nodes"]] = row
            print(json.dumps(row), flush=True)
            if options.out is not None:
                kept = [rows[key] for key in ROWS if key in rows]
                result = {"unit": "seconds; MB resident", "rows": kept, "processor": platform.processor()}
                options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
