"""What is read by name is what transformers loads, bit for bit; what cannot be is read whole."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from heterorl.common.errors import ConfigError
from heterorl.common.model import tensors
from heterorl.common.model.model_loading import load_pretrained
from heterorl.common.weights.arena import Arena
from heterorl.learner.backends import loading
from heterorl.learner.backends.loading import fill, open_model, replace_parameters
from heterorl.learner.train.model import load_model
from tests.support.families import write_family
from tests.support.training import tiny_model

FAMILIES = ["Qwen3", "Llama", "Olmo2", "Qwen2"]


def _saved(directory, *, dtype=torch.float32, max_shard_size="1GB", **settings):
    tiny_model(**settings).to(dtype).save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


def _assert_same(actual, expected):
    layout = tensors.layout_of(expected, "fp32")
    assert tensors.layout_of(actual, "fp32").layout_id == layout.layout_id
    for method in ("named_parameters", "named_buffers"):
        own, other = dict(getattr(actual, method)()), dict(getattr(expected, method)())
        assert own.keys() == other.keys()
        for name, tensor in other.items():
            assert own[name].dtype == tensor.dtype, name
            assert torch.equal(own[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name
    roots = []
    for model in (actual, expected):
        arena = Arena(tensors.layout_of(model, "bf16"))
        tensors.store(model, arena)
        roots.append(arena.state_root())
    assert roots[0] == roots[1]


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_by_name_are_those_that_transformers_loads(tmp_path, family, is_tied):
    directory = _saved(tmp_path, family=family, is_tied=is_tied)

    opened = open_model(directory)

    assert not opened.is_held
    assert all(parameter.is_meta for parameter in opened.model.parameters())
    expected = load_model(directory)
    assert tensors.layout_of(opened.model, "bf16").layout_id == tensors.layout_of(expected, "bf16").layout_id
    _assert_same(fill(opened), expected)
    assert opened.model.training == expected.training


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_weights_in_several_files_become_exact_masters(tmp_path, dtype):
    directory = _saved(tmp_path, dtype=dtype, max_shard_size=8000)
    assert len(list(directory.glob("*.safetensors"))) > 2

    opened = open_model(directory)

    assert not opened.is_held
    assert opened.flat("lm_head.weight").dtype == dtype
    _assert_same(fill(opened), load_model(directory))


def test_masters_are_memory_of_their_own(tmp_path):
    directory = _saved(tmp_path)
    before = (directory / "model.safetensors").read_bytes()
    opened = open_model(directory)

    with torch.no_grad():
        for parameter in fill(opened).parameters():
            parameter.zero_()

    assert (directory / "model.safetensors").read_bytes() == before
    assert opened.flat("model.norm.weight").any()


def test_reading_leaves_the_random_state_alone(tmp_path):
    directory = _saved(tmp_path)
    torch.manual_seed(7)
    before = torch.get_rng_state()

    fill(open_model(directory))

    assert torch.equal(torch.get_rng_state(), before)


def _change(directory, change):
    path = directory / "model.safetensors"
    values = change(load_file(path))
    save_file(values, path, metadata={"format": "pt"})


def _drop(name):
    return lambda values: {key: value for key, value in values.items() if key != name}


def _head(scale):
    return lambda values: values | {"lm_head.weight": values["model.embed_tokens.weight"] * scale}


def test_tied_weights_may_be_there_twice_under_either_name(tmp_path):
    directory = _saved(tmp_path)
    _change(directory, _head(1.0))
    assert not open_model(directory).is_held
    _assert_same(fill(open_model(directory)), load_model(directory))
    _change(directory, _drop("model.embed_tokens.weight"))

    opened = open_model(directory)

    assert not opened.is_held
    _assert_same(fill(opened), load_model(directory))


def _whole(directory):
    return load_pretrained(str(directory), dtype=torch.float32)


@pytest.mark.parametrize("read", [open_model, _whole])
def test_tensors_of_the_files_that_the_model_does_not_have_are_named(tmp_path, caplog, read):
    directory = _saved(tmp_path)
    read(directory)
    assert "not in the model" not in caplog.text
    # A layer that predicts further tokens, and the head of a reward model.
    others = {"model.layers.9.self_attn.q_proj.weight": torch.ones(2, 2), "score.weight": torch.ones(2, 2)}
    _change(directory, lambda values: values | others)

    read(directory)

    text = (
        f"2 tensors in the files of {tmp_path} are not in the model, neither trained nor exported, such as model.layer"
    )
    assert [text in record.getMessage() for record in caplog.records if record.name.startswith("heterorl")] == [True]


@pytest.mark.parametrize("read", [open_model, _whole])
def test_files_with_a_bias_that_the_model_does_not_have_are_refused(tmp_path, read):
    """Qwen2's files under Llama's name would be computed, trained and exported without."""
    directory = _saved(tmp_path, family="Qwen2")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))

    with pytest.raises(
        ConfigError, match=r"model_dir: model\.layers\.0\.self_attn\.k_proj\.bias is in the files"
    ) as caught:
        read(directory)
    assert caught.value.action == "correct config.json (model_type, attention_bias)"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_head(2.0), "tied and differ"),
        (lambda values: {name: value.double() for name, value in values.items()}, "float64"),
    ],
    ids=["tied-differ", "double"],
)
def test_files_that_are_not_the_model_by_name_are_left_to_transformers(tmp_path, caplog, change, reason):
    directory = _saved(tmp_path)
    _change(directory, change)

    with caplog.at_level(logging.WARNING, logger="heterorl"):
        torch.manual_seed(0)
        opened = open_model(directory)

    assert opened.is_held
    assert reason in caplog.text
    assert all(parameter.is_meta for parameter in opened.model.parameters())
    torch.manual_seed(0)
    _assert_same(fill(opened), load_model(directory))


def test_buffer_of_another_type_than_fp32_is_left_to_transformers(tmp_path, caplog, monkeypatch):
    directory = _saved(tmp_path)
    _change(directory, lambda values: values | {"counts": torch.ones(2, dtype=torch.bfloat16)})
    empty_model = loading.empty_model

    def with_buffer(model_dir):
        model = empty_model(model_dir)
        model.register_buffer("counts", torch.zeros(2, dtype=torch.bfloat16))
        return model

    monkeypatch.setattr(loading, "empty_model", with_buffer)
    with caplog.at_level(logging.WARNING, logger="heterorl"):
        opened = open_model(directory)

    assert opened.is_held
    assert "counts is torch.bfloat16" in caplog.text


def test_experts_that_transformers_merges_are_left_to_it(tmp_path):
    directory = _saved(tmp_path, family="Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)

    opened = open_model(directory)

    assert opened.is_held
    _assert_same(fill(opened), load_model(directory))


@pytest.mark.parametrize("damage", [lambda data: data[:-5], lambda data: b"", lambda data: b"\xff" * 8 + data[8:]])
def test_broken_file_is_named_with_the_key(tmp_path, damage):
    directory = _saved(tmp_path)
    path = directory / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))

    with pytest.raises(ConfigError, match="model_dir"):
        open_model(directory)


def _renamed_shard(directory, name):
    index = directory / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    old = table["weight_map"]["model.norm.weight"]
    table["weight_map"] = {key: name if value == old else value for key, value in table["weight_map"].items()}
    index.write_text(json.dumps(table))
    return directory / old


def test_file_outside_the_directory_is_not_opened_by_name(tmp_path, caplog):
    directory = _saved(tmp_path / "model", max_shard_size=8000)
    _renamed_shard(directory, "../x.safetensors").rename(tmp_path / "x.safetensors")

    with caplog.at_level(logging.WARNING, logger="heterorl"):
        opened = open_model(directory)

    assert opened.is_held
    assert "names files that are not there" in caplog.text


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_drop("model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight is not in the files"),
        (
            lambda values: {name: value for name, value in values.items() if "layers.1." not in name},
            r"model.layers.1.input_layernorm.weight is not in the files of .*, nor are 10 others",
        ),
        (
            lambda values: values | {"model.norm.weight": torch.ones(31)},
            r"model.norm.weight is \[31\] in the files and \[32\] by config.json",
        ),
    ],
    ids=["missing", "layer", "shape"],
)
def test_tensor_that_is_not_in_the_files_is_never_made_up(tmp_path, change, problem):
    directory = _saved(tmp_path)
    _change(directory, change)
    callers = {
        "learner": lambda: open_model(directory),
        "replayer": lambda: load_model(directory),
        "engine": lambda: load_pretrained(str(directory), dtype=torch.bfloat16),
    }

    for load in callers.values():
        with pytest.raises(ConfigError, match=problem) as caught:
            load()
        assert caught.value.key == "model_dir"
        assert len(str(caught.value).splitlines()) == 1


def test_model_without_its_head_is_refused_unless_the_head_is_tied(tmp_path):
    tied, untied = _saved(tmp_path / "tied"), _saved(tmp_path / "untied", is_tied=False)
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    _change(untied, _drop("lm_head.weight"))

    load_model(tied)
    with pytest.raises(ConfigError, match="lm_head.weight is not in the files"):
        open_model(untied)


def test_missing_file_is_named_with_the_key(tmp_path):
    directory = _saved(tmp_path, max_shard_size=8000)
    _renamed_shard(directory, "gone.safetensors")

    with pytest.raises(ConfigError, match="model_dir"):
        open_model(directory)


def test_directory_without_a_model_is_named_with_the_key(tmp_path):
    with pytest.raises(ConfigError, match="model_dir"):
        open_model(tmp_path)


def test_replaced_parameters_come_one_at_a_time_and_stay_tied():
    model = tiny_model()
    made = []

    coming = replace_parameters(model, lambda name, old: made.append(name) or torch.full_like(old, len(made)))

    assert made == []
    name, first = next(coming)
    assert made == [name] == ["model.embed_tokens.weight"]
    assert model.model.embed_tokens.weight is first
    assert model.lm_head.weight is first
    rest = dict(coming)
    assert dict(model.named_parameters()) == {name: first, **rest}
    assert len(made) == len(set(made)) == len(rest) + 1


def test_a_model_whose_code_needs_values_is_read_whole(tmp_path, monkeypatch):
    directory = _saved(tmp_path)

    def needs_values(*_, **__):
        raise NotImplementedError("Cannot copy out of meta tensor")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_config", needs_values)
    opened = open_model(directory)

    assert opened.is_held
    held = {name: opened.flat(name) for name, _ in opened.model.named_parameters()}
    model = fill(opened)
    # In memory once: what was read is what is trained.
    assert all(parameter.data_ptr() == held[name].data_ptr() for name, parameter in model.named_parameters())


def test_what_the_models_code_freezes_stays_frozen_where_transformers_reads_the_whole(tmp_path):
    write_family("ernie4.5-moe", tmp_path)

    held, empty = open_model(tmp_path), open_model(tmp_path, may_hold=False)

    assert held.is_held
    frozen = {name for name, parameter in empty.model.named_parameters() if not parameter.requires_grad}
    assert len(frozen) == 2
    assert frozen == {name for name, parameter in held.model.named_parameters() if not parameter.requires_grad}
