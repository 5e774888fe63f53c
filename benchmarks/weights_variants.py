"""Bytes and speed of variants on the deltas of real steps: quantised with frozen scales, then coded like any arena.

Ratios are bytes of the bf16 weights over bytes sent, so that they stand beside those of bf16 deltas; the snapshot's is
the first version's. Speeds are bytes of bf16 weights a second, the best of the versions.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from heterorl.common.model.quantise import LIMIT, Variant, dequantise, quantise, variant_layout
from heterorl.common.weights.arena import Arena
from heterorl.common.weights.payload import write_delta, write_snapshot


def measure_variants(states: Sequence[Arena], *, lr: float, lags: Sequence[int]) -> list[dict[str, Any]]:
    """One row for each variant and lag on the same versions of a run."""
    return [row for variant in LIMIT for row in _measure(variant, states, lr=lr, lags=lags)]


def _measure(variant: Variant, states: Sequence[Arena], *, lr: float, lags: Sequence[int]) -> list[dict[str, Any]]:
    layout, full_bytes = variant_layout(states[0].layout, variant), states[0].layout.full_bytes
    forms: list[Arena] = []
    rescaled, quantise_s, dequantise_s = 0, math.inf, math.inf
    back = Arena(states[0].layout)
    for state in states:
        form = Arena(layout)
        started = time.process_time()
        rescaled += quantise(state, form, variant, frozen=forms[-1] if forms else None)
        quantise_s = min(quantise_s, time.process_time() - started)
        started = time.process_time()
        dequantise(form, back, variant)
        dequantise_s = min(dequantise_s, time.process_time() - started)
        forms.append(form)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        snapshot = write_snapshot(Path(name) / "snapshot", forms[0])
        for lag in lags:
            pairs = [(forms[n], forms[n + lag]) for n in range(0, len(forms) - lag, max(1, lag // 2))][:4]
            infos = [write_delta(Path(name) / "delta", *pair) for pair in pairs]
            rows.append(
                {
                    "variant": variant,
                    "lr": lr,
                    "lag_versions": lag,
                    "changed_fraction": round(
                        sum(i.num_changed for i in infos) / sum(i.num_elements for i in infos), 6
                    ),
                    "delta_bytes": round(sum(info.num_bytes for info in infos) / len(infos)),
                    "ratio": round(full_bytes * len(infos) / sum(info.num_bytes for info in infos), 1),
                    "state_ratio": round(full_bytes / layout.full_bytes, 3),
                    "snapshot_ratio": round(full_bytes / snapshot.num_bytes, 2),
                    "rescaled_rows": rescaled,
                    "quantise_gb_s": round(full_bytes / quantise_s / 1e9, 3),
                    "dequantise_gb_s": round(full_bytes / dequantise_s / 1e9, 3),
                }
            )
    return rows
