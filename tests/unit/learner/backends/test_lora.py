"""Adapters: what is trained, published, saved and exported; what a node with others is told."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from heterorl.common.errors import ConfigError, CorruptStore
from heterorl.common.generation.hf_engine import HfEngine
from heterorl.common.model import tensors
from heterorl.common.model.adapters import LoraLinear, base_digest, has_adapters
from heterorl.common.model.contract import LoraConfig
from heterorl.common.types.common import LoraSettings
from heterorl.common.weights.arena import Arena
from heterorl.coordinator.versions.lineage import contract_difference
from heterorl.learner.backends.torch_backend import TorchBackend
from heterorl.learner.checks.replay import Replayer
from heterorl.learner.loss.loss_config import GepoConfig
from heterorl.learner.train.backend_config import TorchBackendConfig
from heterorl.learner.train.model import load_reference
from tests.support.adapters import merged
from tests.support.families import write_family
from tests.support.learner_world import make_contract
from tests.support.training import SAMPLING, random_groups, tiny_model

LORA = LoraConfig(rank=3, alpha=6.0, target_modules=("q_proj", "down_proj"))
# Two layers, each with q (32 -> 32) and down (48 -> 32).
NUM_ADAPTER = 2 * 3 * ((32 + 32) + (48 + 32))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(directory)
    return directory


def backend_of(model_dir, lora=LORA, **changes):
    config = TorchBackendConfig(lr=1e-2, **changes)
    return TorchBackend(model_dir=model_dir, config=config, loss=GepoConfig(), sampling=SAMPLING, lora=lora)


def stored(backend):
    arena = Arena(backend.layout)
    backend.store(arena)
    return arena


def test_only_adapters_are_published_and_trained(model_dir):
    backend = backend_of(model_dir, weight_decay=0.1)
    before = {name: tensor.clone() for name, tensor in backend.torch_model.state_dict().items()}

    for step in (1, 2):
        backend.train_step(random_groups(seed=step), head_version=1, step=step)

    after = backend.torch_model.state_dict()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert backend.layout.num_elements == NUM_ADAPTER
    assert changed == set(backend.layout.by_name)
    assert all(name.endswith((".lora_a", ".lora_b")) for name in changed)


def test_recomputed_activations_give_adapters_the_same_gradient(model_dir):
    plain, recomputed = backend_of(model_dir), backend_of(model_dir, gradient_checkpointing=True)
    for backend in (plain, recomputed):
        backend.train_step(random_groups(seed=1), head_version=1, step=1)

    assert stored(plain).state_root() == stored(recomputed).state_root()
    assert stored(plain).state_root() != stored(backend_of(model_dir)).state_root()


def test_untrained_adapters_change_nothing_and_trained_ones_add_what_they_say(model_dir):
    plain = AutoModelForCausalLM.from_pretrained(model_dir)
    backend = backend_of(model_dir, published_dtype="fp32")
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        assert torch.equal(backend.torch_model(input_ids=ids).logits, plain(input_ids=ids).logits)

    layer = next(module for module in backend.torch_model.modules() if isinstance(module, LoraLinear))
    with torch.no_grad():
        layer.lora_b.normal_(generator=torch.Generator().manual_seed(1))
        x = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(2))
        expected = x @ (layer.weight + 6.0 / 3 * layer.lora_b @ layer.lora_a).T
        torch.testing.assert_close(layer(x), expected)
        torch.testing.assert_close(merged(layer)(x), expected)


def test_every_node_begins_with_the_same_adapters(model_dir):
    assert stored(backend_of(model_dir)).state_root() == stored(backend_of(model_dir)).state_root()
    values = stored(backend_of(model_dir)).view("model.layers.0.self_attn.q_proj.lora_a")
    other = stored(backend_of(model_dir)).view("model.layers.1.self_attn.q_proj.lora_a")
    assert not np.array_equal(values, other)
    # Written down once: nodes of two builds must not begin with different adapters.
    weights = torch.from_numpy(values).view(torch.bfloat16).float()
    assert weights[0, :2].tolist() == [-0.017578125, -0.040771484375]


def test_state_is_adapter_sized_and_training_goes_on_bit_for_bit(model_dir, tmp_path):
    backend = backend_of(model_dir)
    backend.train_step(random_groups(seed=1), head_version=1, step=1)
    backend.freeze(tmp_path)()
    resumed = backend_of(model_dir)
    resumed.restore(tmp_path)
    for one in (backend, resumed):
        one.train_step(random_groups(seed=2), head_version=1, step=2)

    assert stored(backend).state_root() == stored(resumed).state_root()
    assert sum(tensor.numel() for tensor in load_file(tmp_path / "weights.safetensors").values()) == NUM_ADAPTER
    with pytest.raises(CorruptStore, match="another model"):
        backend_of(model_dir, LORA.model_copy(update={"rank": 4})).restore(tmp_path)


@pytest.mark.parametrize(
    ("targets", "problem"),
    [
        (
            ("q_proj", "c_attn"),
            r"no linear layer c_attn \(name some of down_proj, gate_proj, k_proj, o_proj, q_proj, up",
        ),
        (("lm_head",), "output embedding"),
    ],
)
def test_layers_that_cannot_be_adapted_are_refused(model_dir, targets, problem):
    with pytest.raises(ConfigError, match=problem) as caught:
        backend_of(model_dir, LoraConfig(rank=2, target_modules=targets))

    assert "lora.target_modules" in str(caught.value)


def test_what_reads_images_has_no_adapters(tmp_path):
    """Texts give them no gradient, and each would be published as it began."""
    backend = backend_of(write_family("gemma3-vision", tmp_path), LoraConfig(rank=2))

    backend.train_step(random_groups(seed=1), head_version=1, step=1)

    arena = stored(backend)
    trained = [name for name in arena.layout.by_name if name.endswith("lora_b")]
    # Two layers of seven.
    assert len(trained) == 14
    assert [name for name in trained if not arena.view(name).any()] == []


@pytest.mark.parametrize("published", ["bf16", "fp32"])
def test_base_under_adapters_has_the_published_type_on_every_node(model_dir, published):
    """Engines in bf16 load a base stored in fp32 as bf16; the digest of the base cannot tell."""
    dtype = tensors.TORCH_DTYPE[published]
    base = {name: tensor.to(dtype).float() for name, tensor in tiny_model().state_dict().items()}
    assert (published == "fp32") == all(torch.equal(base[name], it) for name, it in tiny_model().state_dict().items())

    backend = backend_of(model_dir, published_dtype=published, forward_weights="masters")
    config = TorchBackendConfig(published_dtype=published, forward_weights="masters")
    reference = load_reference(str(model_dir), config, learner=backend.torch_model, layout=backend.layout)
    common = {"model_dir": str(model_dir), "published_dtype": published, "device": "cpu", "sampling": SAMPLING}
    engine = HfEngine(**common, compute_dtype="fp32", batch_rows=1, end_token_ids=[0], lora=LORA)
    replayer = Replayer(**common, lora=backend.lora)

    for model in (backend.torch_model, reference, engine.model, replayer._model):
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in base.items())


def test_base_digest_sees_any_weight_but_not_the_type_or_the_adapters(model_dir, tmp_path):
    model = tiny_model()
    digest = base_digest(model)

    assert backend_of(model_dir).lora.base_digest == digest
    assert base_digest(model.to(torch.bfloat16)) == digest
    with torch.no_grad():
        model.model.norm.weight[3] += 0.5
    assert base_digest(model) != digest
    assert not has_adapters(model)


SETTINGS = LoraSettings(rank=8, alpha=16.0, target_modules=("q_proj",), base_digest="a" * 64)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rank": 4}, "lora.rank: the run has 8, this node 4"),
        ({"alpha": 8.0}, "lora.alpha: the run has 16.0, this node 8.0"),
        ({"target_modules": ("k_proj",)}, "lora.target_modules: the run has"),
        ({"base_digest": "b" * 64}, "model_dir (the base model under the adapters): the run has aaaa"),
    ],
)
def test_a_node_with_other_adapters_is_told_the_key(changes, expected):
    values = {"rank": 8, "alpha": 16.0, "target_modules": ("q_proj",), "base_digest": "a" * 64}
    mine = make_contract(lora=SETTINGS)
    # Another rank is another layout too; the key that the operator can change is named first.
    theirs = make_contract(lora=LoraSettings(**{**values, **changes}), layout_id="c" * 64)

    assert contract_difference(mine, theirs).startswith(expected)
    assert contract_difference(mine, make_contract()).startswith("lora.rank: the run has 8, this node 0")
    assert contract_difference(mine, make_contract(lora=SETTINGS)) == ""


def test_settings_do_not_depend_on_the_order_of_names():
    one = LoraConfig(rank=2, target_modules=("b", "a", "a")).settings("d")

    assert one == LoraConfig(rank=2, target_modules=("a", "b")).settings("d")
    assert LoraConfig().settings("d") == LoraSettings()


def test_tensors_of_a_model_with_adapters_are_these_alone(model_dir):
    backend = backend_of(model_dir)
    backend.train_step(random_groups(seed=1), head_version=1, step=1)
    arena, other = stored(backend), backend_of(model_dir)
    frozen = other.torch_model.model.norm.weight.clone()

    tensors.load(arena, other.torch_model)

    assert stored(other).state_root() == arena.state_root()
    assert torch.equal(other.torch_model.model.norm.weight, frozen)
    assert json.loads(json.dumps(sorted(arena.layout.by_name))) == sorted(backend.layout.by_name)
