"""A trained model as a Hugging Face directory: what samplers generate with, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from services.common.errors import ConfigError, CorruptStore
from services.common.types import Digest
from services.common.weights import tensors
from services.common.weights.arena import Arena, Dtype
from services.common.weights.manifest import verify_state
from services.common.weights.payload import apply_payload
from services.common.wire import manifest_from_bytes
from services.learner.checkpoint import DONE_FILE, PUBLISHED_FILE, CheckpointStore, read_checkpoint

_DTYPES: tuple[Dtype, ...] = ("bf16", "fp16", "fp32")
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.model",
    "*.tiktoken",
)


def export_model(*, model_dir: str | Path, source: Path | Arena, out_dir: Path) -> None:
    """Write safetensors in the published type, config, generation config and tokenizer.

    Args:
        model_dir: the model that the run started from.
        source: published weights; a checkpoint directory; or a state directory, of which the newest valid checkpoint
            is taken.
        out_dir: must not exist, or be empty; appears complete or not at all.

    Raises:
        ConfigError: `out_dir` is in use, or `model_dir` is another model.
        CorruptStore: there is no valid checkpoint.
    """
    from transformers import AutoModelForCausalLM

    if out_dir.exists() and any(out_dir.iterdir()):
        raise ConfigError("out", f"{out_dir} is not empty", action="name a new directory")
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(str(model_dir), dtype="float32")
    except (OSError, ValueError) as error:
        raise ConfigError("model_dir", f"cannot load {model_dir}: {error}") from error
    arena = source if isinstance(source, Arena) else read_published(source, model)
    dtype = next(spec.dtype for spec in arena.layout.specs)
    model = model.to(tensors.TORCH_DTYPE[dtype])
    tensors.load(arena, model)
    temporary = out_dir.with_name(f"{out_dir.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    model.save_pretrained(temporary, safe_serialization=True)
    _copy_tokenizer(str(model_dir), temporary)
    if out_dir.exists():
        out_dir.rmdir()
    temporary.rename(out_dir)


def read_published(source: Path, model: Any) -> Arena:
    """The published weights of a checkpoint, verified against its manifest.

    Raises:
        ConfigError: the checkpoint is of another model.
        CorruptStore: no valid checkpoint is there.
    """
    path = source if (source / DONE_FILE).exists() else _newest(source)
    manifest = manifest_from_bytes(read_checkpoint(path).manifest)
    arena = _arena_for(model, manifest.layout_id)
    apply_payload(path / PUBLISHED_FILE, arena, expected_from_root=None)
    verify_state(manifest, arena)
    return arena


def _newest(state_dir: Path) -> Path:
    root = state_dir / "checkpoints"
    problems = [] if root.is_dir() else [f"{root} does not exist"]
    for path in CheckpointStore(root).paths() if root.is_dir() else []:
        try:
            read_checkpoint(path)
        except CorruptStore as error:
            problems.append(str(error))
        else:
            return path
    raise CorruptStore(f"no valid checkpoint under {state_dir}: {'; '.join(problems) or 'none was written yet'}")


def _arena_for(model: Any, layout_id: Digest) -> Arena:
    # A layout's id covers its type, so the type need not be told.
    for dtype in _DTYPES:
        layout = tensors.layout_of(model, dtype)
        if layout.layout_id == layout_id:
            return Arena(layout)
    raise ConfigError(
        "model_dir", "has other tensors than the checkpoint", action="name the one that the run started from"
    )


def _copy_tokenizer(model_dir: str, out_dir: Path) -> None:
    """Copy the files as they are, so that the tokenizer's digest stays; a hub id goes through transformers."""
    if Path(model_dir).is_dir():
        for pattern in _TOKENIZER_FILES:
            for path in Path(model_dir).glob(pattern):
                if path.is_file():
                    shutil.copyfile(path, out_dir / path.name)
        return
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(model_dir).save_pretrained(out_dir)
