"""Plans are right where something real can be counted or measured, and refuse what they do not know."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from heterorl.common.errors import ConfigError
from heterorl.common.model.model_shape import SHAPES, shape_of_directory
from heterorl.common.weights.arena import Arena, Layout, TensorSpec
from heterorl.common.weights.payload import write_delta
from heterorl.learner.backends.fsdp2 import piece_of
from heterorl.learner.backends.torch_backend import TorchBackend
from heterorl.learner.loss.loss_config import GepoConfig
from heterorl.learner.train.backend_config import TorchBackendConfig
from heterorl.plan.assumptions import Assumptions, parse
from heterorl.plan.estimate import MEASURED, Question, changed_by, delta_bytes, drawing, plan, rank_memory
from tests.support.training import SAMPLING, random_groups, tiny_model

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def _on_meta(config):
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen3-8B"])
def test_published_shapes_have_the_parameters_that_transformers_builds(name):
    shape = SHAPES[name]
    config = transformers.Qwen3Config(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, tie_word_embeddings=shape.is_tied,
    )  # fmt: skip

    model = _on_meta(config)

    assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters
    assert sum(parameter.numel() for parameter in model.model.layers[0].parameters()) == shape.block


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Llama", "Mistral"])
def test_directory_has_the_parameters_of_its_model(tmp_path, family, is_tied):
    model = tiny_model(family=family, is_tied=is_tied)
    model.config.save_pretrained(tmp_path)

    assert shape_of_directory(tmp_path).parameters == sum(parameter.numel() for parameter in model.parameters())


def test_state_of_a_real_optimizer_has_the_bytes_of_the_plan(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    backend = TorchBackend(model_dir=tmp_path, config=TorchBackendConfig(), loss=GepoConfig(), sampling=SAMPLING)
    backend.train_step(random_groups(seed=1), head_version=0, step=1)
    held = [*backend.torch_model.parameters()]
    held += [state[key] for state in backend._optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    shape = shape_of_directory(tmp_path)

    memory = rank_memory(shape, shape.parameters, backend="torch", ranks=1, micro_batch_tokens=64, products="fp32")

    assert sum(tensor.numel() * tensor.element_size() for tensor in held) == memory.state


@pytest.mark.parametrize("ranks", [2, 8])
def test_rows_of_the_fullest_rank_are_its_share(ranks):
    shape = SHAPES["Qwen3-0.6B"]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.Qwen3Config(
                vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
                num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
                num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, tie_word_embeddings=True,
            )
        )  # fmt: skip
    rows = sum(piece_of(one.shape, rank=0, world_size=ranks).size for one in model.parameters())

    memory = rank_memory(
        shape, shape.parameters, backend="fsdp2", ranks=ranks, micro_batch_tokens=1024, products="bf16"
    )

    assert 12 * rows == pytest.approx(memory.state, rel=0.001)


@pytest.mark.parametrize("changed", [0.014, 0.1])
def test_delta_that_the_codec_wrote_has_the_bytes_of_the_plan(tmp_path, changed):
    generator = np.random.default_rng(3)
    num_elements = 1 << 20
    layout = Layout.build([TensorSpec(name="w", dtype="bf16", shape=(1024, 1024))])
    old = Arena(layout)
    # Exponents and mantissas as of weights of 0.02; a step of one unit up or down costs one bit.
    weights = torch.from_numpy(generator.normal(0.0, 0.02, num_elements)).to(torch.bfloat16).view(torch.int16)
    old.view("w")[...] = weights.numpy().view(old.view("w").dtype).reshape(1024, 1024)
    new = old.copy()
    chosen = generator.random((1024, 1024)) < changed
    steps = generator.choice(np.array([-1, 1]), size=(1024, 1024)) * chosen
    new.view("w")[...] = (old.view("w").astype(np.int64) + steps).astype(old.view("w").dtype)

    written = write_delta(tmp_path / "delta", old, new).num_bytes

    predicted = delta_bytes(num_elements, changed=float(chosen.mean()), step_bits=1.0)
    assert written == pytest.approx(predicted, rel=0.1)


def test_defaults_that_name_a_result_are_what_it_holds(tmp_path):
    given = Assumptions()
    weights = json.loads((RESULTS / "weights.json").read_bytes())
    [coded] = [
        row for row in weights["rows"] if (row["scheme"], row.get("lr"), row.get("lag_versions")) == ("gapulp", 1e-6, 1)
    ]
    pulled = json.loads((RESULTS / "pull.json").read_bytes())["rows"]
    [group] = [row for row in json.loads((RESULTS / "groups.json").read_bytes())["rows"] if row["tokens"] == 4096]

    predicted = delta_bytes(weights["num_elements"], changed=coded["changed_fraction"], step_bits=given.step_bits)
    assert predicted == pytest.approx(2 * weights["num_elements"] / coded["ratio"], rel=0.01)
    assert Question(parameters=1e9).changed == pytest.approx(coded["changed_fraction"], abs=0.0005)
    assert given.encode_gb_s == pytest.approx(coded["encode_gb_s"], rel=0.03)
    assert given.pull_gb_s == pytest.approx(pulled["delta"]["pull_model_gb_s"], rel=0.01)
    assert given.snapshot_ratio == pytest.approx(pulled["snapshot"]["ratio"], rel=0.01)
    assert given.token_bytes == pytest.approx(group["bytes"] / 8 / 4096, rel=0.01)


def test_small_plan_is_that_of_a_calculation_by_hand():
    shape = SHAPES["Qwen3-8B"]
    asked = Question(
        parameters=8e9, shape=shape, gpus=16, gpus_per_node=8, tokens_per_step=1e6, changed=0.5, rtt_s=0.25,
        given=Assumptions(step_bits=1.0, sequence_tokens=1000, micro_batch_tokens=10000),
    )  # fmt: skip
    found = plan(asked)

    # 4/3 (6 P + 6 L s q) t over 16 GPUs of 346.15 TFLOP/s.
    flops = 4 / 3 * 1e6 * (6 * 8e9 + 6 * 36 * 1000 * 32 * 128)
    assert found.compute_s == pytest.approx(flops / (16 * 989e12 * 0.35))
    # 62500 tokens of a rank are 7 passes; each moves 2 + 2 + 4 bytes a parameter, half of it between the nodes.
    assert found.sharding_s == pytest.approx(7 * 8 * 8e9 * 0.5 / 50e9)
    # Half of the elements: a bit for which, a bit for half of them which way.
    assert found.delta_bytes == pytest.approx(8e9 * 1.5 / 8)
    assert found.send_s == pytest.approx(8e9 * 1.5 / 1e9 + 0.25)
    # Of a rank: 2 GB of masters to its host, 1 GB of rounded weights to the ranks whose chunks they lie in.
    assert found.gather_s == pytest.approx(0.1 + 1.0)
    assert found.encode_s == pytest.approx(16 / 2.7 / 4 / 2)
    # 6 GB of masters and moments of a rank; one disk; 14 bytes a parameter read for digests, and 12 to compare nodes.
    assert found.checkpoint_s == pytest.approx(0.3 + 56.0 + (14 + 12) * 8e9 / 2e9)
    assert found.memory.state == pytest.approx(12 * 8e9 / 16)
    assert found.publication_s > found.send_s
    alone = plan(dataclasses.replace(asked, gpus_per_node=16))
    assert alone.checkpoint_s == pytest.approx(0.3 + 56.0 + 14 * 8e9 / 2e9)
    assert alone.encode_s == pytest.approx(2 * found.encode_s)
    assert alone.host_bytes == pytest.approx(2 * found.host_bytes)


def test_backends_divide_what_they_divide():
    shape = SHAPES["Qwen3-8B"]

    def memory(backend, ranks, products="bf16"):
        return rank_memory(
            shape, shape.parameters, backend=backend, ranks=ranks, micro_batch_tokens=1024, products=products
        )

    totals = [memory(backend, 8).total for backend in ("zero-1", "zero-2", "zero-3", "fsdp2")]
    assert totals == sorted(totals, reverse=True)
    assert memory("torch", 1).state == 8 * memory("fsdp2", 8).state
    # Passes in bf16 gather what is rounded; passes in fp32 round the masters and keep them beside.
    assert memory("fsdp2", 8).rounded == 0
    assert memory("fsdp2", 8, "fp32").rounded == memory("fsdp2", 8).masters
    assert memory("fsdp2", 10**9).total > shape.outside


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"backend": "torch"}, "--backend: torch runs in one process"),
        ({"backend": "fsdp"}, "--backend: 'fsdp' is unknown"),
        ({"gpus": 0}, "--gpus: must be at least 1"),
        ({"changed": 1.5}, "--changed-fraction"),
        ({"parameters": math.nan}, "--params"),
        ({"products": "fp8"}, "--compute-dtype"),
    ],
)
def test_question_without_an_answer_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        plan(dataclasses.replace(Question(parameters=8e9), **changes))


def test_unknown_family_and_missing_file_are_named(tmp_path):
    with pytest.raises(ConfigError, match="config.json cannot be read"):
        shape_of_directory(tmp_path)
    llama = {"model_type": "llama", "num_attention_heads": 0, "vocab_size": 9, "hidden_size": 8}
    llama |= {"intermediate_size": 8, "num_hidden_layers": 1}
    for content in (json.dumps(llama), "[" * 100_000):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigError, match="config.json cannot be read"):
            shape_of_directory(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(ConfigError, match=r"mamba is not supported.*--params"):
        shape_of_directory(tmp_path)


@pytest.mark.parametrize("setting", ["mfu=2", "mfu=0", "mfu=x", "speed=1", "mfu"])
def test_wrong_assumption_is_refused(setting):
    with pytest.raises(ConfigError, match="--set"):
        parse([setting])


def test_share_that_a_step_size_changes_goes_through_what_was_measured():
    def measured(table):
        if isinstance(table, dict):
            if {"lr", "changed_fraction", "lag_versions"} <= table.keys():
                yield table["lr"], table["lag_versions"], table["changed_fraction"]
            table = list(table.values())
        for each in table if isinstance(table, list) else ():
            yield from measured(each)

    known = set(measured(json.loads((RESULTS / "weights.json").read_text())))
    assert {(lr, 1, share) for lr, share in MEASURED} <= known
    assert [changed_by(lr) for lr, _ in MEASURED] == pytest.approx([share for _, share in MEASURED])
    assert changed_by(1e-7) < MEASURED[0][1]
    assert MEASURED[1][1] < changed_by(5e-6) < MEASURED[2][1]
    assert changed_by(1.0) == 1.0


def test_samplers_keep_the_learner_busy_in_whole_engines():
    shape = SHAPES["Qwen3-8B"]
    small = drawing(shape, shape.parameters, given=Assumptions())
    large = drawing(SHAPES["Qwen3-32B"], SHAPES["Qwen3-32B"].parameters, given=Assumptions())

    # Weights and keys fit into what an engine uses; a larger model is divided.
    assert (small.gpus, large.gpus) == (1, 2)
    assert 1 < small.sequences <= 256
    found = plan(Question(parameters=shape.parameters, shape=shape))
    drawn = found.sampler_gpus * small.tokens_per_gpu_s * found.step_s
    assert (
        found.question.tokens_per_step <= drawn < found.question.tokens_per_step + small.tokens_per_gpu_s * found.step_s
    )
    # A day has every version, and each site sends its share of the groups.
    shared = plan(Question(parameters=shape.parameters, shape=shape, sites=4))
    assert shared.day_out_bytes == found.day_out_bytes / 4
    assert shared.day_in_bytes == pytest.approx(86400 / found.step_s * found.delta_bytes)
    assert found.staleness_versions > 1.0


def test_version_of_several_steps_is_published_and_counted_once_for_all_of_them():
    one, four = (plan(Question(parameters=8e9, changed=0.05, steps_per_version=steps)) for steps in (1, 4))

    assert four.version_s == 4 * one.version_s == 4 * one.step_s
    assert four.day_in_bytes == pytest.approx(one.day_in_bytes / 4)
    # Groups are of steps.
    assert four.day_out_bytes == one.day_out_bytes
    assert four.staleness_versions == pytest.approx(one.staleness_versions / 4)
    tight = dataclasses.replace(four, pull_s=3.0 * four.step_s)
    assert tight.is_line_enough
    assert not dataclasses.replace(one, pull_s=tight.pull_s).is_line_enough
    assert four.least_link_bits_per_s < one.least_link_bits_per_s
    with pytest.raises(ConfigError, match="--steps-per-version: must be at least 1"):
        plan(Question(parameters=8e9, steps_per_version=0))


def test_several_steps_change_about_what_was_measured_over_as_many():
    weights = json.loads((RESULTS / "weights.json").read_bytes())
    rows = [row for row in weights["rows"] if row["scheme"] == "gapulp" and row["lag_versions"] > 1]

    assert {row["lag_versions"] for row in rows} == {8, 24}
    for row in rows:
        share = changed_by(row["lr"] * row["lag_versions"])
        assert share == pytest.approx(row["changed_fraction"], rel=0.2)
        if row["lr"] <= 1e-5:
            predicted = delta_bytes(weights["num_elements"], changed=share, step_bits=Assumptions().step_bits)
            assert predicted == pytest.approx(2 * weights["num_elements"] / row["ratio"], rel=0.2)
