"""Weights of a large model on the host: rounding on the card, the copy, coding a delta and applying it."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu.rows import Place, Rows, seconds
from heterorl.common.model.tensors import store_tensors
from heterorl.common.weights.arena import Arena, Layout, TensorSpec
from heterorl.common.weights.payload import apply_payload, write_delta
from heterorl.plan.assumptions import Assumptions
from heterorl.plan.estimate import encode_s

CHANGED = 0.014
TILE = 1 << 24


def run(rows: Rows, place: Place) -> None:
    """8 B weights in bf16: 16 GB a state, of which 1.4 % change by one unit."""
    given, threads = Assumptions(), os.cpu_count() or 1
    rows.add("threads", threads, "", forecast=given.coding_threads)
    _rounding(rows, place, given)
    specs = [
        TensorSpec(name=f"layer{number}", dtype="bf16", shape=(place.pick(250_000_000, 1_000_000),), alias_of="")
        for number in range(place.pick(32, 2))
    ]
    layout = Layout.build(specs)
    old, new = Arena(layout), Arena(layout)
    rng = np.random.default_rng(0)
    tile = rng.standard_normal(TILE, dtype=np.float32)
    bits = torch.from_numpy(tile).to(torch.bfloat16).view(torch.int16).numpy()
    changed = bits + (rng.random(TILE) < CHANGED).astype(np.int16)
    for number in range(old.num_chunks):
        size = old.chunk(number).size
        old.chunk(number)[:] = np.resize(bits, size)
        new.chunk(number)[:] = np.resize(changed, size)
    total = f"{layout.num_elements / 1e9:.3g} B"
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        path = Path(name) / "delta"
        started = time.perf_counter()
        root = old.state_root(threads=threads)
        rows.add(f"digests of {total}", layout.full_bytes / (time.perf_counter() - started) / 1e9, "GB/s")
        started = time.perf_counter()
        info = write_delta(path, old, new, threads=threads)
        taken = time.perf_counter() - started
        forecast = encode_s(layout.full_bytes, given=given)
        rows.add(f"code a delta of {total}, digests included", taken, "s", forecast=forecast)
        rows.add("delta", info.num_bytes / 1e6, "MB")
        started = time.perf_counter()
        apply_payload(path, old, expected_from_root=root, threads=threads)
        rows.add(f"apply and verify it on {total}", time.perf_counter() - started, "s")
    if old.state_root(threads=threads) != new.state_root(threads=threads):
        rows.note("exact", "NO: the applied state is another one")


def _rounding(rows: Rows, place: Place, given: Assumptions) -> None:
    masters = torch.randn(place.pick(1 << 30, 1 << 20), device=place.device)
    spec = TensorSpec(name="weight", dtype="bf16", shape=tuple(masters.shape), alias_of="")
    arena = Arena(Layout.build([spec]))
    taken = seconds(lambda: store_tensors([(spec, masters)], arena), device=place.device)
    speed = 2 * masters.numel() / taken / 1e9
    rows.add("round masters into the host's memory", speed, "GB/s of bf16", forecast=given.pcie_gb_s)
