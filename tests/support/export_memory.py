"""What an export of a large model takes of memory: a JSON line of bytes, from a process of its own.

`python -m tests.support.export_memory DIR` makes a version of about 100 million parameters, whose chunks repeat so that
they are coded once, exports it, and says how far the memory of this process went above what it was before.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import transformers

from heterorl.common.model import tensors
from heterorl.common.weights.arena import digest_integers
from heterorl.common.weights.codec import encode_chunk
from heterorl.common.weights.manifest import build_manifest
from heterorl.common.weights.payload import NO_ROOT, write_coded
from heterorl.common.wire.policy_messages import manifest_to_bytes
from heterorl.learner.backends.loading import empty_model
from heterorl.learner.export import export_model
from heterorl.learner.publish.checkpoint_store import Begun, CheckpointStore, Cursor


class _LaidOut:
    def __init__(self, layout):
        self.layout = layout


def _checkpoint(directory: Path, *, hidden: int, layers: int, vocabulary: int) -> int:
    """Model directory without weights and a checkpoint; returns the number of parameters."""
    config = transformers.Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=8, head_dim=hidden // 8, tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(directory / "model")
    layout = tensors.layout_of(empty_model(str(directory / "model")), "bf16")
    coded = {}
    for chunk in layout.chunks:
        size = chunk.stop - chunk.start
        if size not in coded:
            values = np.random.default_rng(size).normal(0, 0.02, size).astype(np.float32)
            bits = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.int16)
            coded[size] = (*encode_chunk(None, bits), digest_integers(bits))
    path = directory / "snapshot"
    info = write_coded(
        path, (coded[chunk.stop - chunk.start] for chunk in layout.chunks), layout=layout, from_root=NO_ROOT
    )
    manifest = build_manifest(
        run_id="run", epoch=1, version=0, parent_version=-1, parent_digest="", layout=layout, step=0,
        info=info, payloads=(),
    )  # fmt: skip
    cursor = Cursor(
        run_id="run", step=0, step_id="s", version=0, parent_version=-1, lineage_version=-1,
        state_root=info.to_root, manifest=manifest_to_bytes(manifest), consumed=(), reports=(),
    )  # fmt: skip
    backend = directory / "state" / "checkpoints" / "writing" / "backend"
    store = CheckpointStore(directory / "state" / "checkpoints")
    backend.mkdir(parents=True)
    (backend / "state.json").write_text("{}")
    begun = Begun(version=0, directory=backend.parent, save=lambda: None)
    store.write(cursor, begun=begun, arena=_LaidOut(layout), snapshot=path)
    return layout.num_elements


def _memory(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) << 10


def _export(directory: Path) -> int:
    export_model(
        model_dir=directory / "model", source=directory / "state", out_dir=directory / "out", max_shard_size="64MB"
    )
    return sum(path.stat().st_size for path in (directory / "out").glob("*.safetensors"))


def main() -> None:
    root = Path(sys.argv[1])
    for name, shape in (("small", (256, 1, 20_000)), ("large", (768, 10, 20_000))):
        (root / name).mkdir()
        hidden, layers, vocabulary = shape
        num_elements = _checkpoint(root / name, hidden=hidden, layers=layers, vocabulary=vocabulary)
        before = _memory("VmRSS")
        # Lets the kernel count the peak anew.
        Path("/proc/self/clear_refs").write_text("5")
        written = _export(root / name)
        above = _memory("VmHWM") - before
        shutil.rmtree(root / name)
    sys.stdout.write(json.dumps({"num_elements": num_elements, "written": written, "above": above}) + "\n")


if __name__ == "__main__":
    main()
