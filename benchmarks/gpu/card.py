"""Limits of a card: products in bf16, copies within its memory, and copies to the host."""

from __future__ import annotations

import functools

import torch

from benchmarks.gpu.rows import PEAK, Place, Rows, seconds
from heterorl.plan.assumptions import Assumptions


def run(rows: Rows, place: Place) -> None:
    """Measure products and copies on random data."""
    given, device = Assumptions(), place.device
    size, count = place.pick(8192, 512), place.pick(10, 2)
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))

    def products() -> None:
        for _ in range(count):
            torch.mm(left, right)

    taken = seconds(products, device=device)
    rows.add(PEAK, count * 2 * size**3 / taken / 1e12, "TFLOP/s", forecast=given.gpu_tflops)
    source = torch.randint(-9, 9, (place.pick(2 << 30, 8 << 20),), device=device, dtype=torch.int16)
    target = torch.empty_like(source)
    num_bytes = source.numel() * source.element_size()
    taken = seconds(lambda: target.copy_(source), device=device)
    rows.add("copy within memory, read and written", 2 * num_bytes / taken / 1e9, "GB/s", forecast=given.hbm_gb_s)
    part = source[: source.numel() // 4]
    for name, is_pinned in (("pageable", False), ("pinned", True)):
        host = torch.empty(part.shape, dtype=part.dtype, pin_memory=is_pinned and device != "cpu")
        for what, to, of in (("to", host, part), ("from", part, host)):
            taken = seconds(functools.partial(to.copy_, of), device=device)
            rows.add(f"copy {what} the host, {name}", num_bytes / 4 / taken / 1e9, "GB/s", forecast=given.pcie_gb_s)
