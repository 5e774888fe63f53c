"""Bytes and speed of weight deltas: ours, open schemes and the entropy bound on the same deltas of real GRPO steps.

Every scheme codes the same chunks of the same versions in one process on one thread. Times are processor seconds of
the process, the best of several repeats over several versions: neighbours on the machine only ever add to them. GB/s
are bytes of bf16 weights, not of what is sent. The entropy bound is that of a coder who knows the share of changed
elements and the distribution of the integer steps: n h(k / n) + k H(step) bits for k of n elements; the conditional one
knows the share and the steps for each exponent of the old value too, which the receiver holds.

    python -m benchmarks.weights --out benchmarks/results/weights.json
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.weight_schemes import Scheme, schemes

CHUNK = 4 << 20
LAGS = {1e-6: (1, 8, 24)}
OTHER_LAGS = (1, 8)
MERGES = (8, 24)
Bits = npt.NDArray[np.int16]
Pair = tuple[Bits, Bits]


def main() -> None:
    """Measure, show and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/weights.json"))
    parser.add_argument("--cache", type=Path, default=Path(".cache/heterorl"))
    parser.add_argument("--repeats", type=int, default=4)
    arguments = parser.parse_args()
    # Before torch is loaded: one thread everywhere.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from benchmarks.grpo_deltas import Recipe, make_runs, record
    from benchmarks.weights_table import show, targets
    from benchmarks.weights_variants import measure_variants

    recipe = Recipe()
    runs = make_runs(recipe, cache=arguments.cache)
    rows: list[dict[str, Any]] = []
    merged: list[dict[str, Any]] = []
    variants: list[dict[str, Any]] = []
    for run in runs:
        # Width 2 only: one array of all elements.
        arenas = list(run.states())
        states = [np.concatenate([arena.chunk(n) for n in range(arena.num_chunks)]) for arena in arenas]
        if not rows:
            rows.append(limits(states, repeats=arguments.repeats))
        for lag in LAGS.get(run.lr, OTHER_LAGS):
            pairs = [(states[n], states[n + lag]) for n in range(0, len(states) - lag, max(1, lag // 2))][:4]
            rows += measure(pairs, lr=run.lr, lag=lag, repeats=arguments.repeats)
        variants += measure_variants(arenas, lr=run.lr, lags=LAGS.get(run.lr, OTHER_LAGS))
        merged += [merge(run, lag) for lag in MERGES if lag <= run.num_steps]
    results = {
        "machine": {"processor": _processor(), "cores": os.cpu_count(), "python": platform.python_version()},
        "clock": "processor seconds of the process, one thread, best of the repeats",
        "made_by": record(recipe, cache=arguments.cache),
        "num_elements": runs[0].layout.num_elements,
        "chunk_elements": CHUNK,
        "rows": rows,
        "merged": merged,
        "variants": variants,
        "targets": targets(rows, merged),
    }
    show(results)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def limits(states: Sequence[Bits], *, repeats: int) -> dict[str, Any]:
    """What the memory allows: a copy, a comparison, a scatter of the changes of one step at the lowest rate."""
    out, flags = np.empty_like(states[0]), np.empty(states[0].size, np.bool_)
    index = np.flatnonzero(states[0] != states[1])
    step = states[1][index] - states[0][index]

    def scatter() -> None:
        out[index] += step

    num_bytes = states[0].nbytes
    works = {
        "memcpy_gb_s": lambda: np.copyto(out, states[0]),
        "compare_gb_s": lambda: np.not_equal(states[0], states[1], out=flags),
        "scatter_gb_s": scatter,
    }
    speeds = {name: round(num_bytes / best(work, 3 * repeats) / 1e9, 2) for name, work in works.items()}
    return {"scheme": "limits", **speeds}


def measure(pairs: Sequence[Pair], *, lr: float, lag: int, repeats: int) -> list[dict[str, Any]]:
    """One row for each scheme on the same pairs of states."""
    bound = sum(entropy_bytes(*pair) for pair in pairs)
    conditional = sum(conditional_entropy_bytes(*pair) for pair in pairs)
    num_bytes = sum(old.nbytes for old, _ in pairs)
    changed = sum(int(np.count_nonzero(old != new)) for old, new in pairs) / sum(old.size for old, _ in pairs)
    rows = []
    for scheme in schemes():
        # Whole states of a step are alike and slow: one is enough.
        some = pairs[:1] if scheme.is_whole else pairs
        sent, encode_s, apply_s = run_scheme(scheme, some, repeats=repeats)
        rows.append(
            {
                "scheme": scheme.name,
                "describe": scheme.describe,
                "lr": lr,
                "lag_versions": lag,
                "changed_fraction": round(changed, 5),
                "ratio": round(sum(old.nbytes for old, _ in some) / sent, 2),
                "encode_gb_s": round(some[0][0].nbytes / encode_s / 1e9, 3),
                "apply_gb_s": round(some[0][0].nbytes / apply_s / 1e9, 3),
                "entropy_bound_ratio": round(num_bytes / bound, 2),
                "conditional_bound_ratio": round(num_bytes / conditional, 2),
            }
        )
    return rows


def run_scheme(scheme: Scheme, pairs: Sequence[Pair], *, repeats: int) -> tuple[int, float, float]:
    """Bytes for all pairs, and the least seconds to code and to apply one of them; what is applied is compared."""
    sent, encode_s, apply_s = 0, math.inf, math.inf
    for number, (old, new) in enumerate(pairs):
        parts = [slice(start, start + CHUNK) for start in range(0, old.size, CHUNK)]
        # Other versions pass through the cache between two repeats.
        for repeat in range(repeats if number < 2 else 1):
            started = time.process_time()
            coded = [scheme.encode(old[part], new[part]) for part in parts]
            encode_s = min(encode_s, time.process_time() - started)
            state = old.copy()
            started = time.process_time()
            for part, item in zip(parts, coded, strict=True):
                scheme.apply(item, state[part])
            apply_s = min(apply_s, time.process_time() - started)
            if repeat == 0:
                assert np.array_equal(state, new), f"{scheme.name} is not exact"
                sent += sum(len(item) for chunk in coded for item in chunk if isinstance(item, bytes))
    return sent, encode_s, apply_s


def merge(run: Any, lag: int) -> dict[str, Any]:
    """The chain of `lag` deltas as one, beside the chain and the direct difference."""
    from heterorl.common.weights.arena import Arena
    from heterorl.common.weights.compose import compose
    from heterorl.common.weights.payload import apply_payload, write_delta

    paths = [run.directory / f"{number}" for number in range(lag)]
    first = Arena(run.layout)
    apply_payload(run.directory / "first", first, expected_from_root=None)
    last = first.copy()
    for path in paths:
        apply_payload(path, last, expected_from_root=last.state_root())
    with tempfile.TemporaryDirectory() as name:
        target, direct = Path(name) / "merged", Path(name) / "direct"
        started = time.process_time()
        composed = compose(paths, target, layout_id=run.layout.layout_id, chunks=run.layout.chunks)
        seconds = time.process_time() - started
        write_delta(direct, first, last)
        is_identical = target.read_bytes() == direct.read_bytes()
    chain = sum(path.stat().st_size for path in paths)
    return {
        "lr": run.lr,
        "lag_versions": lag,
        "chain_bytes": chain,
        "merged_bytes": composed.num_bytes,
        "saved": round(chain / composed.num_bytes, 2),
        "is_direct_difference": is_identical,
        "compose_s": round(seconds, 4),
    }


def entropy_bytes(old: Bits, new: Bits) -> float:
    """n h(k / n) + k H(step), bytes."""
    index = np.flatnonzero(old != new)
    return (position_bits(index.size, old.size) + value_bits(new[index] - old[index])) / 8


def conditional_entropy_bytes(old: Bits, new: Bits) -> float:
    """The same for each exponent of the old value on its own, bytes."""
    exponent = (old.view(np.uint16) >> 7) & 0xFF
    total = np.bincount(exponent, minlength=256)
    index = np.flatnonzero(old != new)
    step, key = new[index] - old[index], exponent[index]
    bits = 0.0
    for value in np.unique(key):
        own = step[key == value]
        bits += position_bits(own.size, int(total[value])) + value_bits(own)
    return bits / 8


def position_bits(count: int, total: int) -> float:
    """Entropy of which `count` of `total` elements changed, when each is as likely."""
    share = count / total
    return -total * sum(part * math.log2(part) for part in (share, 1 - share) if part > 0)


def value_bits(step: Bits) -> float:
    """Empirical entropy of the steps."""
    counts = np.unique(step, return_counts=True)[1]
    return float(-(counts * np.log2(counts / step.size)).sum())


def best(work: Callable[[], Any], repeats: int) -> float:
    """The least seconds of several."""
    least = math.inf
    for _ in range(repeats):
        started = time.process_time()
        work()
        least = min(least, time.process_time() - started)
    return least


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
