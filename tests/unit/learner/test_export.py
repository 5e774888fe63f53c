import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from heterorl.common.errors import ConfigError, CorruptStore, DiskFull, StateMismatch
from heterorl.common.model import tensors
from heterorl.common.model.adapters import attach
from heterorl.common.model.contract import LoraConfig
from heterorl.common.text.prompter import Prompter
from heterorl.common.weights.arena import Arena
from heterorl.learner import export
from heterorl.learner.backends.optimizer_state import read_lora
from heterorl.learner.backends.torch_backend import TorchBackend
from heterorl.learner.export import export_model
from heterorl.learner.loss.loss_config import GepoConfig
from heterorl.learner.publish.checkpoint_store import CheckpointStore, Cursor
from heterorl.learner.publish.version_payloads import PublishedHead, encode_version
from heterorl.learner.train.backend_config import TorchBackendConfig
from tests.support.adapters import merge
from tests.support.families import write_family
from tests.support.training import SAMPLING, tiny_model


def _write_base(directory, *, is_tied=True, seed=0):
    """A model directory with a word-level tokenizer."""
    from tokenizers import Tokenizer, models

    tiny_model(is_tied=is_tied, seed=seed).save_pretrained(directory)
    vocabulary = {"<eos>": 0, **{str(number): number for number in range(1, 50)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(directory)
    return directory


def _checkpoint(state_dir, base, *, dtype="bf16", scale=1.5, published=None, lora=None):
    """A checkpoint of the base model with all that is trained scaled; returns its published arena."""
    config = TorchBackendConfig(published_dtype=dtype)
    backend = TorchBackend(
        model_dir=base, config=config, loss=GepoConfig(), sampling=SAMPLING, lora=lora or LoraConfig()
    )
    with torch.no_grad():
        for parameter in backend.torch_model.parameters():
            if parameter.requires_grad:
                parameter.mul_(scale)
                parameter.add_(0.01 if lora else 0)
    arena = Arena(backend.layout)
    backend.store(arena)
    position = PublishedHead(head_version=-1, lineage_version=-1, lineage_digest="", shadow=None)
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


@pytest.mark.parametrize("dtype", [None, "fp16", "fp32"])
def test_exported_model_keeps_in_fp32_what_it_was_published_in(tmp_path, dtype):
    base = _write_base(tmp_path / "base")
    write_family("glm4-moe", base)
    _, published = _checkpoint(tmp_path / "state", base)

    export_model(model_dir=base, source=tmp_path / "state", out_dir=tmp_path / "out", dtype=dtype)

    kept = {spec.name for spec in published.layout.specs if spec.dtype == "fp32"}
    assert len(kept) == 2
    files = load_file(tmp_path / "out" / "model.safetensors")
    narrow = tensors.TORCH_DTYPE[dtype or "bf16"]
    assert all(tensor.dtype is (torch.float32 if name in kept else narrow) for name, tensor in files.items())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    arena = Arena(tensors.layout_of(model, "bf16"))
    tensors.store(model, arena)
    assert arena.state_root() == published.state_root()


def test_export_takes_a_checkpoint_or_a_state_directory(tmp_path):
    base = _write_base(tmp_path / "base")
    path, _ = _checkpoint(tmp_path / "state", base)

    export_model(model_dir=base, source=path, out_dir=tmp_path / "one")
    export_model(model_dir=base, source=tmp_path / "state", out_dir=tmp_path / "two")

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
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1
    assert (tmp_path / "out" / "generation_config.json").exists()


@pytest.mark.parametrize("adapter_only", [False, True])
def test_export_copies_what_engines_read_with_the_weights(tmp_path, adapter_only):
    base = _write_base(tmp_path / "base")
    lora = LoraConfig(rank=4, alpha=8.0, target_modules=("q_proj", "down_proj")) if adapter_only else None
    _checkpoint(tmp_path / "state", base, lora=lora)
    names = [
        "generation_config.json", "preprocessor_config.json", "processor_config.json", "tekken.json",
        "chat_template.jinja", "additional_chat_templates/tool_use.jinja",
    ]  # fmt: skip
    (base / "additional_chat_templates").mkdir()
    for name in names:
        # transformers knows no such key of a generation config, and would drop it.
        (base / name).write_text(f'{{"temperature": 0.6, "name": "{name}"}}')

    export_model(model_dir=base, source=tmp_path / "state", out_dir=tmp_path / "out", adapter_only=adapter_only)

    assert [(tmp_path / "out" / name).read_text() for name in names] == [(base / name).read_text() for name in names]


def test_exported_base_model_ends_its_answers_where_the_template_does(tmp_path):
    base = _write_base(tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": ["49"]})
    tokenizer.chat_template = "{% for each in messages %}{{ each.content }} 49 {% endfor %}"
    tokenizer.save_pretrained(base)
    (base / "generation_config.json").write_text('{"eos_token_id": 0, "temperature": 0.6}')
    _checkpoint(tmp_path / "state", base)

    export_model(model_dir=base, source=tmp_path / "state", out_dir=tmp_path / "out")

    ends = Prompter(str(base), use_chat_template=True).end_token_ids
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {
        "eos_token_id": [0, 49], "temperature": 0.6,
    }  # fmt: skip
    assert ends == (0, 49) == Prompter(str(tmp_path / "out"), use_chat_template=False).end_token_ids
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config.eos_token_id == [0, 49]


def _config(directory):
    return json.loads((directory / "config.json").read_text())


def _exported_config(directory, changed):
    """What config.json of a start model becomes."""
    (directory / "base" / "config.json").write_text(json.dumps(changed))
    _checkpoint(directory / "state", directory / "base")
    export_model(model_dir=directory / "base", source=directory / "state", out_dir=directory / "out")
    return _config(directory / "out")


def test_exported_config_keeps_the_keys_that_transformers_4_reads(tmp_path):
    config = _config(_write_base(tmp_path / "base"))
    del config["rope_parameters"], config["dtype"], config["tie_word_embeddings"]
    old = {"rope_theta": 1e6, "transformers_version": "4.43.1", "architectures": None}
    # Code that is not copied, and scales that the exported files do not have.
    gone = {"auto_map": {"AutoModel": "code.Model"}, "quantization_config": {"quant_method": "fp8"}}

    exported = _exported_config(tmp_path, config | old | gone | {"tie_word_embeddings": True})

    own = {"architectures": ["Qwen3ForCausalLM"], "torch_dtype": "bfloat16", "tie_word_embeddings": True}
    assert exported == config | old | own
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.rope_parameters["rope_theta"] == 1e6


def test_exported_config_says_that_tensors_which_differ_are_not_tied(tmp_path):
    """Such a file is two tensors to transformers 5; to vLLM and transformers 4 it would be one."""
    config = _config(_write_base(tmp_path / "base", is_tied=False))

    exported = _exported_config(tmp_path, config | {"tie_word_embeddings": True})

    assert exported == config | {"dtype": "bfloat16"}
    assert exported["tie_word_embeddings"] is False


def test_exported_config_keeps_what_reads_images(tmp_path):
    config = _config(write_family("gemma3-vision", _write_base(tmp_path / "base")))
    text, vision = config["text_config"], config["vision_config"]
    assert config["tie_word_embeddings"] is True
    changed = {
        "text_config": text | {"tie_word_embeddings": False},
        "vision_config": vision | {"torch_dtype": "float32"},
    }

    exported = _exported_config(tmp_path, config | changed)

    own = {"text_config": text | {"tie_word_embeddings": True}, "vision_config": vision | {"torch_dtype": "bfloat16"}}
    assert exported == config | own | {"dtype": "bfloat16"}


def test_exported_config_is_the_text_models_where_only_it_was_opened(tmp_path):
    config = _config(write_family("llama4", _write_base(tmp_path / "base")))

    exported = _exported_config(tmp_path, {"model_type": "llama4", "text_config": config, "dtype": "float32"})

    assert exported == config | {"dtype": "bfloat16"}
    assert exported["architectures"] == ["Llama4ForCausalLM"]


def test_export_refuses_a_directory_in_use(tmp_path):
    base = _write_base(tmp_path / "base")

    with pytest.raises(ConfigError, match="not empty"):
        export_model(model_dir=base, source=tmp_path / "state", out_dir=base)


def test_export_goes_where_a_link_leads(tmp_path):
    base = _write_base(tmp_path / "base")
    _checkpoint(tmp_path / "state", base)
    (tmp_path / "large").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "large")

    export_model(model_dir=base, source=tmp_path / "state", out_dir=tmp_path / "link")

    assert (tmp_path / "large" / "model.safetensors").exists()


@pytest.mark.parametrize("kind", ["is mounted", "is the working directory"])
def test_export_refuses_a_directory_that_cannot_be_replaced_before_any_work(tmp_path, monkeypatch, kind):
    """The finished directory takes the place of `out` by a rename."""
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    monkeypatch.setattr(Path, "is_mount", lambda path: kind == "is mounted" and path == tmp_path / "out")

    with pytest.raises(ConfigError, match=f"{kind}.*name a new directory in it"):
        export_model(model_dir=tmp_path / "none", source=tmp_path / "none", out_dir=Path())


def test_export_names_a_full_disk_and_a_directory_that_cannot_be_made(tmp_path, monkeypatch):
    base = _write_base(tmp_path / "base")
    _checkpoint(tmp_path / "state", base)

    def fill(*_, **__):
        # As safetensors says it on a full tmpfs.
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", fill)
    with pytest.raises(DiskFull):
        export_model(model_dir=base, source=tmp_path / "state", out_dir=tmp_path / "out")
    with pytest.raises(ConfigError, match="out: .*no directory that this user can write"):
        export_model(model_dir=base, source=tmp_path / "state", out_dir=base / "config.json" / "out")
    assert not list(tmp_path.glob("out*"))


def test_export_by_a_user_who_may_not_read_the_checkpoint(tmp_path, monkeypatch):
    """safetensors writes files that only the learner's user may read."""
    base = _write_base(tmp_path / "base")
    _checkpoint(tmp_path / "state", base)

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("heterorl.learner.publish.checkpoint_store.file_digest", refuse)

    with pytest.raises(ConfigError, match="checkpoint: .*may not be read.*as the learner's user"):
        export_model(model_dir=base, source=tmp_path / "state", out_dir=tmp_path / "out")


def test_export_refuses_another_model(tmp_path):
    base, other = _write_base(tmp_path / "base"), _write_base(tmp_path / "other", is_tied=False)
    _checkpoint(tmp_path / "state", base)

    with pytest.raises(ConfigError, match="other tensors"):
        export_model(model_dir=other, source=tmp_path / "state", out_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_export_says_so_when_there_is_no_checkpoint(tmp_path):
    base = _write_base(tmp_path / "base")

    with pytest.raises(ConfigError, match="checkpoint: .*state is no checkpoint"):
        export_model(model_dir=base, source=tmp_path / "state", out_dir=tmp_path / "out")
    (tmp_path / "state" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CorruptStore, match="no valid checkpoint"):
        export_model(model_dir=base, source=tmp_path / "state", out_dir=tmp_path / "out")


@pytest.mark.parametrize("has_links", [True, False])
@pytest.mark.parametrize("is_one", [True, False])
def test_export_while_a_learner_removes_the_checkpoint(tmp_path, monkeypatch, has_links, is_one):
    """A learner keeps its newest two; an export of a large model takes longer than two versions."""
    base = _write_base(tmp_path / "base")
    path, _ = _checkpoint(tmp_path / "state", base)
    export_model(model_dir=base, source=tmp_path / "state", out_dir=tmp_path / "expected")
    read = export.read_checkpoint

    def removed_meanwhile(held):
        cursor = read(held)
        reads.append(held)
        if len(reads) == (1 if is_one else 2):
            shutil.rmtree(path)
        return cursor

    reads = []
    monkeypatch.setattr(export, "read_checkpoint", removed_meanwhile)
    source, out = (path if is_one else tmp_path / "state"), tmp_path / "out"
    if has_links:
        export_model(model_dir=base, source=source, out_dir=out)
        assert _weight_files(out) == _weight_files(tmp_path / "expected")
    else:
        monkeypatch.setattr(os, "link", _no_links)
        with pytest.raises(ConfigError, match="was removed while it was read.*run it again"):
            export_model(model_dir=base, source=source, out_dir=out)
    assert not list((tmp_path / "state" / "checkpoints").iterdir())


@pytest.mark.parametrize("is_one", [True, False])
def test_export_says_so_when_a_learner_that_starts_removes_the_links(tmp_path, monkeypatch, is_one):
    base = _write_base(tmp_path / "base")
    path, _ = _checkpoint(tmp_path / "state", base)
    read = export.read_checkpoint

    def removed_meanwhile(held):
        cursor = read(held)
        reads.append(held)
        if len(reads) == (1 if is_one else 2):
            CheckpointStore(path.parent).remove_unfinished()
        return cursor

    reads = []
    monkeypatch.setattr(export, "read_checkpoint", removed_meanwhile)
    with pytest.raises(ConfigError, match="was removed while it was read.*run it again"):
        export_model(model_dir=base, source=path if is_one else tmp_path / "state", out_dir=tmp_path / "out")


def _no_links(_source, _target):
    raise OSError(errno.EPERM, "no links here")


def test_export_refuses_weights_that_the_manifest_does_not_name(tmp_path):
    base = _write_base(tmp_path / "base")
    _, other = _checkpoint(tmp_path / "other", base, scale=2.0)
    _checkpoint(tmp_path / "state", base, published=other)

    with pytest.raises(StateMismatch):
        export_model(model_dir=base, source=tmp_path / "state", out_dir=tmp_path / "out")


def _saved_by_transformers(base, published, directory, *, lora=None, **options):
    """What transformers writes of the whole model in memory."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if lora:
        tensors.round_base(model, tensors.main_type(published.layout))
        attach(model, lora)
    tensors.load(published, model)
    merge(model)
    model.to(torch.bfloat16).save_pretrained(directory, **options)
    return directory


def _weight_files(directory):
    return {path.name: path.read_bytes() for path in directory.glob("model*")}


@pytest.mark.parametrize("kind", ["tied", "untied", "lora", "experts"])
@pytest.mark.parametrize("max_shard_size", ["50GB", "20KB"])
def test_files_are_those_of_transformers_byte_for_byte(tmp_path, kind, max_shard_size):
    base = _write_base(tmp_path / "base", is_tied=kind != "untied")
    if kind == "experts":
        experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        tiny_model(family="Qwen3Moe", **experts).save_pretrained(base)
    lora = LoraConfig(rank=4, alpha=8.0, target_modules=("q_proj", "down_proj")) if kind == "lora" else None
    path, published = _checkpoint(tmp_path / "state", base, lora=lora)
    expected = _saved_by_transformers(
        base, published, tmp_path / "expected", lora=lora and read_lora(path / "backend"), max_shard_size=max_shard_size
    )

    export_model(model_dir=base, source=path, out_dir=tmp_path / "out", max_shard_size=max_shard_size)

    if max_shard_size == "50GB":
        # transformers sorts the tensors of a model that it has loaded: other files, the same tensors.
        assert _weight_files(tmp_path / "out") == _weight_files(expected)
    assert (len(_weight_files(expected)) > 2) is (max_shard_size == "20KB")
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (expected / name).read_bytes()
    one, other = (AutoModelForCausalLM.from_pretrained(path, dtype="auto") for path in (tmp_path / "out", expected))
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())


def test_weights_are_written_in_the_type_that_is_asked_for(tmp_path):
    base = _write_base(tmp_path / "base")
    _checkpoint(tmp_path / "state", base, dtype="fp32")

    for dtype in ("fp32", "bf16"):
        export_model(model_dir=base, source=tmp_path / "state", out_dir=tmp_path / dtype, dtype=dtype)

    wide, narrow = (load_file(tmp_path / dtype / "model.safetensors") for dtype in ("fp32", "bf16"))
    assert all(torch.equal(narrow[name], wide[name].to(torch.bfloat16)) for name in wide)
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["dtype"] == "bfloat16"


def test_weights_that_a_type_cannot_hold_are_refused(tmp_path):
    base = _write_base(tmp_path / "base")
    _checkpoint(tmp_path / "state", base, scale=1e6)

    with pytest.raises(ConfigError, match="not finite as torch.float16"):
        export_model(model_dir=base, source=tmp_path / "state", out_dir=tmp_path / "out", dtype="fp16")
    with pytest.raises(ConfigError, match="max_shard_size"):
        export_model(model_dir=base, source=tmp_path / "state", out_dir=tmp_path / "out", max_shard_size="much")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "state"]


def test_export_that_is_cut_leaves_nothing_and_is_done_again(tmp_path, monkeypatch):
    """Of a killed one `out.writing` is left, under no name that anybody reads."""
    base = _write_base(tmp_path / "base")
    _checkpoint(tmp_path / "state", base)
    (tmp_path / "out.writing").mkdir()
    (tmp_path / "out.writing" / "model-00001-of-00009.safetensors").write_bytes(b"half")

    def cut(_model_dir, directory):
        assert list(_weight_files(directory)) == ["model.safetensors"]
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(export, "copy_files", cut)
        with pytest.raises(KeyboardInterrupt):
            export_model(model_dir=base, source=tmp_path / "state", out_dir=tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "state"]

    (tmp_path / "out").mkdir()
    export_model(model_dir=base, source=tmp_path / "state", out_dir=tmp_path / "out")

    assert list(_weight_files(tmp_path / "out")) == ["model.safetensors"]
    with pytest.raises(ConfigError, match="not empty"):
        export_model(model_dir=base, source=tmp_path / "state", out_dir=tmp_path / "out")
