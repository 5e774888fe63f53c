"""A learner whose step is drawn: `python -m benchmarks.regions.learner --config FILE`.

A step takes a stated time and adds a normal number to each fp32 master. Its scale is chosen so that about as many bf16
elements change as in GRPO at a learning rate of 1e-6 (1.4 %, results/weights.json). Rounding, encoding, upload and
commit are the learner's own. `sizes.jsonl` in the run's directory gets the bytes that other schemes need for the same
version.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.weight_schemes import schemes
from heterorl.cli import main as cli
from heterorl.common.types.common import StepReport
from heterorl.common.types.rollout import QueuedGroup
from heterorl.common.weights.arena import Arena
from heterorl.learner.backends.torch_backend import TorchBackend
from heterorl.learner.publish.publisher import Publisher

SPARSE = "gap_xor_zstd"
"""Positions and values as coded by the closest open scheme of benchmarks.weight_schemes."""
BF16_BYTES = 2


def sparse_bytes(old: Arena, new: Arena) -> int:
    """Bytes of positions and values of all elements that changed."""
    (scheme,) = (each for each in schemes() if each.name == SPARSE)
    return sum(
        len(part)
        for number in range(new.num_chunks)
        for part in scheme.encode(old.chunk(number), new.chunk(number))  # type: ignore[arg-type]
    )


def report_of(groups: Sequence[QueuedGroup], *, head_version: int, step: int, step_s: float) -> StepReport:
    """A report with what the run counts; there is no loss."""
    needed = [each.name for each in dataclasses.fields(StepReport) if each.default is dataclasses.MISSING]
    tokens = sum(rollout.token_ids.size for queued in groups for rollout in queued.group.rollouts)
    stated: dict[str, Any] = {
        "step": step, "version": head_version + 1, "num_groups": len(groups), "num_tokens": tokens, "step_s": step_s,
        "staleness_max": max(head_version - queued.group.oldest_version for queued in groups), "is_applied": True,
    }  # fmt: skip
    return StepReport(**{**dict.fromkeys(needed, 0.0), **stated})


def main() -> None:
    """Replace the step, note other schemes' bytes, then run the learner's command."""
    directory = Path(sys.argv[sys.argv.index("--config") + 1]).parents[1]
    bench = json.loads((directory / "bench.json").read_text(encoding="utf-8"))
    encode = Publisher._encode

    def step_by_clock(self: TorchBackend, groups: Sequence[QueuedGroup], *, head_version: int, step: int) -> StepReport:
        began = time.monotonic()
        with torch.no_grad():
            for parameter in self.torch_model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=bench["step_scale"])
        time.sleep(max(0.0, began + bench["step_s"] - time.monotonic()))
        return report_of(groups, head_version=head_version, step=step, step_s=time.monotonic() - began)

    def noted(self: Publisher, arena: Any, step: int, with_snapshot: bool) -> Any:
        shadow, version = self.position.shadow, self.position.head_version + 1
        encoded = encode(self, arena, step, with_snapshot)
        if isinstance(shadow, Arena):
            row = {
                "version": version,
                "full": BF16_BYTES * self.layout.num_elements,
                "sparse": sparse_bytes(shadow, arena),
                "ours": min(each.num_bytes for each in encoded.manifest.payloads),
            }
            # Before the upload: a sampler asks for it as soon as the version is there.
            with (directory / "sizes.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        return encoded

    TorchBackend.train_step = step_by_clock  # type: ignore[method-assign]
    Publisher._encode = noted  # type: ignore[method-assign]
    sys.argv.insert(1, "learner")
    cli.main()


if __name__ == "__main__":
    main()
