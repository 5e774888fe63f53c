"""Chain against merged delta: bytes and processor seconds for samplers that lag 1 to 256 versions behind.

A synthetic bf16 run at the density of lr 1e-6: log-normal magnitudes, an fp32 master that moves by about the same
absolute step everywhere, so an element changes with a probability of about step / ulp. Both ways run in one process on
one thread: the chain is applied delta by delta, the merged delta is composed from 4^j blocks (as the coordinator keeps
them) and applied once. Both must end at the same state root.

    python -m benchmarks.weights_merge --out benchmarks/results/weights_merge.json
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from heterorl.common.weights.arena import Arena, Layout, TensorSpec
from heterorl.common.weights.compose import compose
from heterorl.common.weights.payload import apply_payload, write_delta, write_snapshot
from heterorl.coordinator.payloads.merged_deltas import RADIX

LAGS = (1, 2, 4, 8, 16, 64, 256)


class SyntheticRun:
    """An fp32 master under small noisy steps with momentum, rounded to bf16 for each version."""

    def __init__(self, layout: Layout, *, step: float) -> None:
        self._rng = np.random.default_rng(0)
        count = layout.num_elements
        self._step = step
        self._master = (0.02 * self._rng.standard_normal(count)).astype(np.float32)
        self._velocity = self._rng.standard_normal(count).astype(np.float32)

    def advance(self) -> None:
        """One optimizer step: steps of one element mostly go the same way, as Adam's do."""
        noise = self._rng.standard_normal(self._master.size, np.float32)
        self._velocity *= np.float32(0.9)
        self._velocity += np.float32(0.43589) * noise
        self._master += np.float32(self._step) * self._velocity

    def store(self, arena: Arena) -> None:
        """Round to nearest, ties to even, into the arena's bits."""
        bits = self._master.view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        arena.view("w").reshape(-1)[:] = rounded.astype(np.uint16).view(np.int16)


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """The result of some work, and the processor seconds it took."""
    started = time.process_time()
    result = work()
    return result, time.process_time() - started


def joined(paths: list[Path], target: Path, layout: Layout) -> int:
    """Compose and return the size."""
    return compose(paths, target, layout_id=layout.layout_id, chunks=layout.chunks).num_bytes


def cover(start: int, stop: int, blocks: dict[tuple[int, int], Path]) -> list[Path]:
    """The longest block that fits at each place."""
    paths = []
    while start < stop:
        end = max(end for (begin, end) in blocks if begin == start and end <= stop)
        paths.append(blocks[start, end])
        start = end
    return paths


def publish(run: SyntheticRun, arena: Arena, versions: int, directory: Path) -> tuple[dict[tuple[int, int], Path], Any]:
    """All single deltas and blocks of a run, with the states that the lags start from, as snapshots on disk."""
    layout, blocks, numbers = arena.layout, {}, {"changed": 0, "compose_s": 0.0, "block_bytes": 0, "single_bytes": 0}
    starts = {versions - lag for lag in LAGS if lag <= versions}
    for version in range(1, versions + 1):
        old = arena.copy()
        if version - 1 in starts:
            write_snapshot(directory / f"snapshot-{version - 1}", old)
        run.advance()
        run.store(arena)
        path = directory / f"{version - 1}-{version}"
        info = write_delta(path, old, arena)
        numbers["changed"] += info.num_changed
        numbers["single_bytes"] += info.num_bytes
        blocks[version - 1, version] = path
        length = RADIX
        while version % length == 0:
            parts = cover(version - length, version, blocks)
            target = directory / f"{version - length}-{version}"
            size, seconds = timed(lambda parts=parts, target=target: joined(parts, target, layout))  # type: ignore[misc]
            blocks[version - length, version] = target
            numbers["compose_s"] += seconds
            numbers["block_bytes"] += size
            length *= RADIX
    return blocks, numbers


def compare(lag: int, head: int, blocks: dict[tuple[int, int], Path], layout: Layout, directory: Path) -> Any:
    """Bytes and seconds of both ways from `head - lag` to `head`."""
    start = head - lag
    held = Arena(layout)
    apply_payload(directory / f"snapshot-{start}", held, expected_from_root=None)
    chain = [blocks[version, version + 1] for version in range(start, head)]
    parts = cover(start, head, blocks)
    merged, compose_s = timed(lambda: (joined(parts, directory / "merged", layout), directory / "merged")[1])

    def apply(paths: list[Path]) -> str:
        staging = held.copy()
        root = held.state_root()
        for path in paths:
            apply_payload(path, staging, expected_from_root=root)
            root = path.read_bytes()[76:108].hex()
        return staging.state_root()

    by_chain, chain_s = timed(lambda: apply(chain))
    by_merged, merged_s = timed(lambda: apply([merged]))
    assert by_chain == by_merged, "the two ways disagree"
    chain_bytes = sum(path.stat().st_size for path in chain)
    return {
        "lag": lag,
        "chain_bytes": chain_bytes,
        "blocks_bytes": sum(path.stat().st_size for path in parts),
        "blocks": len(parts),
        "merged_bytes": merged.stat().st_size,
        "saved": round(chain_bytes / merged.stat().st_size, 2),
        "chain_apply_s": round(chain_s, 4),
        "merged_apply_s": round(merged_s, 4),
        "compose_s": round(compose_s, 4),
    }


def peak_bytes(paths: list[Path], layout: Layout, target: Path) -> int:
    """Most memory that a composition holds at once."""
    tracemalloc.start()
    try:
        joined(paths, target, layout)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/weights_merge.json"))
    parser.add_argument("--elements", type=int, default=1 << 19)
    parser.add_argument("--chunk-elements", type=int, default=1 << 17)
    parser.add_argument("--versions", type=int, default=259)
    parser.add_argument("--step", type=float, default=4e-7)
    arguments = parser.parse_args()
    layout = Layout.build(
        [TensorSpec(name="w", dtype="bf16", shape=(arguments.elements,))], chunk_elements=arguments.chunk_elements
    )
    run, arena = SyntheticRun(layout, step=arguments.step), Arena(layout)
    run.store(arena)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        blocks, numbers = publish(run, arena, arguments.versions, directory)
        lags = [
            compare(lag, arguments.versions, blocks, layout, directory) for lag in LAGS if lag <= arguments.versions
        ]
        widest = [blocks[version, version + 1] for version in range(min(64, arguments.versions))]
        peak = peak_bytes(widest, layout, directory / "peak")
    results = {
        "machine": platform.processor() or platform.machine(),
        "clock": "processor seconds, one thread",
        "full_bytes": layout.full_bytes,
        "versions": arguments.versions,
        "density": round(numbers["changed"] / arguments.versions / arguments.elements, 5),
        "single_bytes_mean": numbers["single_bytes"] // arguments.versions,
        "blocks": {
            "bytes_per_single_byte": round(numbers["block_bytes"] / numbers["single_bytes"], 3),
            "compose_s_per_version": round(numbers["compose_s"] / arguments.versions, 5),
        },
        "peak_bytes_composing_64": peak,
        "peak_in_chunks": round(peak / (2 * arguments.chunk_elements), 2),
        "lags": lags,
    }
    print(f"density {results['density']:.4f}, peak {results['peak_in_chunks']} chunks, blocks {results['blocks']}")
    for row in lags:
        print(
            f"lag {row['lag']:4}  chain {row['chain_bytes']:10,} B {row['chain_apply_s']:.3f} s"
            f"  blocks {row['blocks_bytes']:9,} B  merged {row['merged_bytes']:9,} B {row['merged_apply_s']:.3f} s"
            f"  {row['saved']:.1f}x, composed in {row['compose_s']:.3f} s"
        )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
