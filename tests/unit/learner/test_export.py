import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from heterorl.common.errors import ConfigError, CorruptStore, StateMismatch
from heterorl.common.model import tensors
from heterorl.common.weights.arena import Arena
from heterorl.learner.backends.torch import TorchBackend
from heterorl.learner.export import export_model
from heterorl.learner.loss.config import GepoConfig
from heterorl.learner.publish.checkpoint import CheckpointStore
from heterorl.learner.publish.cursor import Cursor
from heterorl.learner.publish.encode import Position, encode_version
from heterorl.learner.train.config import TorchBackendConfig
from tests.support.training import SAMPLING, tiny_model


def _write_base(directory, *, is_tied=True, seed=0):
    """A model directory with a word-level tokenizer."""
    from tokenizers import Tokenizer, models

    tiny_model(is_tied=is_tied, seed=seed).save_pretrained(directory)
    vocabulary = {"<eos>": 0, **{str(number): number for number in range(1, 50)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(directory)
    return directory


def _checkpoint(state_dir, base, *, dtype="bf16", scale=1.5, published=None):
    """A checkpoint of the base model with all its weights scaled; returns its published arena."""
    config = TorchBackendConfig(published_dtype=dtype)
    backend = TorchBackend(model_dir=base, config=config, loss=GepoConfig(), sampling=SAMPLING)
    with torch.no_grad():
        for parameter in backend.torch_model.parameters():
            parameter.mul_(scale)
    arena = Arena(backend.layout)
    backend.store(arena)
    position = Position(head_version=-1, lineage_version=-1, lineage_digest="", shadow=None)
    (state_dir / "payloads").mkdir(parents=True)
    encoded = encode_version(
        position, arena, directory=state_dir / "payloads", run_id="run", epoch=1, step=0, with_snapshot=False
    )
    cursor = Cursor(
        run_id="run",
        step=0,
        step_id="s",
        version=0,
        parent_version=-1,
        lineage_version=-1,
        state_root=encoded.manifest.state_root,
        manifest=encoded.manifest_bytes,
        consumed=(),
        reports=(),
    )
    store = CheckpointStore(state_dir / "checkpoints")
    path = store.write(cursor, begun=store.begin(0, backend), arena=published or arena, snapshot=None)
    return path, arena


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_exported_model_has_the_published_bits(tmp_path, is_tied, dtype):
    base = _write_base(tmp_path / "base", is_tied=is_tied)
    _, published = _checkpoint(tmp_path / "state", base, dtype=dtype)

    export_model(model_dir=base, source=tmp_path / "state", out_dir=tmp_path / "out")

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype is tensors.TORCH_DTYPE[dtype]
    arena = Arena(tensors.layout_of(model, dtype))
    tensors.store(model, arena)
    assert arena.layout.layout_id == published.layout.layout_id
    assert arena.state_root() == published.state_root()
    shares = model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    assert shares is is_tied


def test_export_takes_a_checkpoint_or_an_arena(tmp_path):
    base = _write_base(tmp_path / "base")
    path, published = _checkpoint(tmp_path / "state", base)

    export_model(model_dir=base, source=path, out_dir=tmp_path / "one")
    export_model(model_dir=base, source=published, out_dir=tmp_path / "two")

    name = "model.safetensors"
    assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_export_keeps_the_tokenizer_as_it_is(tmp_path):
    base = _write_base(tmp_path / "base")
    _checkpoint(tmp_path / "state", base)

    export_model(model_dir=base, source=tmp_path / "state", out_dir=tmp_path / "out")

    name = "tokenizer.json"
    assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes()
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token_id == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "qwen3"
    assert (tmp_path / "out" / "generation_config.json").exists()


def test_export_refuses_a_directory_in_use(tmp_path):
    base = _write_base(tmp_path / "base")

    with pytest.raises(ConfigError, match="not empty"):
        export_model(model_dir=base, source=tmp_path / "state", out_dir=base)


def test_export_refuses_another_model(tmp_path):
    base, other = _write_base(tmp_path / "base"), _write_base(tmp_path / "other", is_tied=False)
    _checkpoint(tmp_path / "state", base)

    with pytest.raises(ConfigError, match="other tensors"):
        export_model(model_dir=other, source=tmp_path / "state", out_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_export_says_so_when_there_is_no_checkpoint(tmp_path):
    base = _write_base(tmp_path / "base")

    with pytest.raises(CorruptStore, match="no valid checkpoint"):
        export_model(model_dir=base, source=tmp_path / "state", out_dir=tmp_path / "out")


def test_export_refuses_weights_that_the_manifest_does_not_name(tmp_path):
    base = _write_base(tmp_path / "base")
    _, other = _checkpoint(tmp_path / "other", base, scale=2.0)
    _checkpoint(tmp_path / "state", base, published=other)

    with pytest.raises(StateMismatch):
        export_model(model_dir=base, source=tmp_path / "state", out_dir=tmp_path / "out")
