"""A run that trains adapters: the real learner, coordinator and sampler in one process, then the export."""

import asyncio
import dataclasses
import json
import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from heterorl.common.errors import ConfigError, ContractMismatch
from heterorl.common.generation.hf_engine import HfEngine
from heterorl.common.generation.inference_engine import generate_all
from heterorl.common.generation.tiny_model import write_tiny_model
from heterorl.common.model import tensors
from heterorl.common.model.contract import LoraConfig
from heterorl.common.process.clock import SystemClock
from heterorl.common.pull.puller import Puller
from heterorl.common.types.run import Registration
from heterorl.common.wire.policy_messages import manifest_from_bytes
from heterorl.learner import learner_app
from heterorl.learner.export import export_model
from heterorl.learner.learner_config import LearnerConfig
from heterorl.learner.learner_parts import Parts
from heterorl.learner.learner_parts import assemble as assemble_learner
from heterorl.sampler import sampler_app
from heterorl.sampler.outbox.outbox import Outbox
from heterorl.sampler.sampler_app import load_components as assemble_sampler
from heterorl.sampler.sampler_config import SamplerConfig
from tests.support.learner_world import open_coordinator, rows

LORA = {"rank": 4, "alpha": 8.0, "target_modules": ("q_proj", "v_proj", "down_proj")}
SHARED = {"group_size": 2, "sampling": {"max_new_tokens": 6}, "lora": LORA}
SMALL = {"hidden_size": 32, "num_layers": 2}


@pytest.mark.slow
async def test_adapters_are_trained_sent_verified_and_exported(tmp_path):
    base = write_tiny_model(tmp_path / "base", seed=0, **SMALL)
    learner_config = LearnerConfig(
        **SHARED, model_dir=str(base), state_dir=tmp_path / "learner", groups_per_step=2, max_steps=3,
        backend={"lr": 1e-2},
    )  # fmt: skip
    sampler_config = SamplerConfig(
        **SHARED,
        model_dir=str(base),
        state_dir=tmp_path / "site",
        site="eu-1",
        engine={"batch_rows": 4},
        heartbeat_s=0.05,
    )
    core = await open_coordinator(tmp_path)
    parts = assemble_learner(learner_config)
    outbox = Outbox(sampler_config.state_dir)
    sampler = sampler_app.build(sampler_config, core, outbox, SystemClock(), random.Random(0))
    learning = learner_app.join(
        learner_config,
        Parts(backend=parts.backend, contract=parts.contract),
        api=core,
        clock=SystemClock(),
        rng=random.Random(0),
    ).run(asyncio.Event())

    result, _ = await asyncio.gather(learning, sampler.run(asyncio.Event()))

    assert result.is_finished
    manifests = [manifest_from_bytes((await core.get_signed_manifest(version=version)).data) for version in range(4)]
    # Two layers: q and v (32 -> 32), down (128 -> 32), rank 4, two bytes each.
    adapter_bytes = 2 * 2 * 4 * (2 * (32 + 32) + (128 + 32))
    assert {manifest.full_bytes for manifest in manifests} == {adapter_bytes}
    assert all(payload.num_bytes < 2 * adapter_bytes for manifest in manifests for payload in manifest.payloads)
    assert len({manifest.state_root for manifest in manifests}) == 4
    seen = {row["version"]: row["state_root"] for row in rows(sampler_config.state_dir / "versions.jsonl")}
    assert seen
    assert seen.items() <= {manifest.version: manifest.state_root for manifest in manifests}.items()
    outbox.close()
    await _generates_the_same(core, parts, sampler_config, manifests, tmp_path)
    await _refuses_others(core, parts, sampler_config, tmp_path)
    await core.close()
    _exports(base, parts, tmp_path)


async def _generates_the_same(core, parts, config, manifests, tmp_path):
    """A joiner pulls the head on top of its own base; greedy tokens are those of the learner's model."""
    sampling = dataclasses.replace(config.sampling.semantics(), top_k=1, max_new_tokens=12)
    engine = HfEngine(
        model_dir=config.model_dir, published_dtype="bf16", compute_dtype="fp32", device="cpu", sampling=sampling,
        batch_rows=4, end_token_ids=(1,), lora=config.lora,
    )  # fmt: skip
    prompt = np.array([2, 3, 12, 4], np.int32)
    assert engine.base().state_root() == manifests[0].state_root
    puller = Puller(
        api=core, spool=tmp_path / "incoming", layout=engine.layout, clock=SystemClock(), base=engine.base
    )  # fmt: skip
    plans = []

    async def admit(plan):
        plans.append(plan)

    pulled = await puller.pull(held=None, want_version=3, admit=admit)

    # Of so few values nearly all change, and a version may go out whole; its size is that of the adapters.
    assert sum(payload.num_bytes for payload in plans[-1].payloads) < 2 * engine.layout.full_bytes
    assert pulled.manifest.state_root == manifests[3].state_root
    before = generate_all(engine, [prompt], seeds=[1], num_per_prompt=1)[0][0]
    engine.load(pulled.arena, 3)
    after = generate_all(engine, [prompt], seeds=[1], num_per_prompt=1)[0][0]
    model = parts.backend.torch_model
    tensors.load(pulled.arena, model)
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    for token in after.token_ids:
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, -1]
        assert int(logits.argmax()) == token
        ids = torch.cat([ids, torch.tensor([[token]])], 1)
    assert not np.array_equal(before.logprobs, after.logprobs[: before.logprobs.size])


async def _refuses_others(core, parts, config, tmp_path):
    other = write_tiny_model(tmp_path / "other", seed=1, **SMALL)
    cases = [
        ({"lora": LoraConfig(**{**LORA, "rank": 8})}, "lora.rank: the run has 4, this node 8"),
        ({"lora": LoraConfig(**{**LORA, "alpha": 4.0})}, "lora.alpha"),
        ({"lora": LoraConfig()}, "lora.rank: the run has 4, this node 0"),
        ({"model_dir": str(other)}, "model_dir"),
    ]
    for changes, problem in cases:
        contract = assemble_sampler(config.model_copy(update=changes)).contract
        registration = Registration(
            site="eu-2", incarnation="c1946ac9", contract=contract, engine="hf", dtype="fp32", max_delay_versions=0
        )
        with pytest.raises(ContractMismatch, match=problem):
            await core.register(registration)


def _exports(base, parts, tmp_path):
    state = tmp_path / "learner"
    export_model(model_dir=base, source=state, out_dir=tmp_path / "merged")
    export_model(model_dir=base, source=state, out_dir=tmp_path / "adapter", adapter_only=True)

    # The backend holds what was published last, see `_generates_the_same`.
    model = parts.backend.torch_model
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    ids = torch.arange(1, 12)[None]
    with torch.no_grad():
        expected, got, unchanged = (each(input_ids=ids).logits for each in (model, merged, plain))
    # bf16 keeps eight bits of a weight; the adapters must show above that.
    assert (got - expected).abs().max() < 0.02 * expected.abs().max()
    assert (got - expected).abs().max() < 0.2 * (unchanged - expected).abs().max()
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    assert (settings["r"], settings["lora_alpha"]) == (4, 8.0)
    assert torch.equal(weights[name].float(), model.model.layers[1].self_attn.q_proj.lora_b)
    assert len(weights) == 2 * 2 * 3
    assert not list((tmp_path / "adapter").glob("model*"))
    with pytest.raises(ConfigError, match="not the model that the adapters were trained on"):
        export_model(model_dir=tmp_path / "other", source=state, out_dir=tmp_path / "wrong")
