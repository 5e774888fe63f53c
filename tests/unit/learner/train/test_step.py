"""One step: the same gradient however the batch is laid out, and nothing at all when a number is not finite."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heterorl.common.errors import ConfigError
from heterorl.learner.backends.ranks.passes import alone
from heterorl.learner.loss.loss_config import CustomLossConfig, GepoConfig, GrpoConfig, GspoConfig
from heterorl.learner.train.batch import build_batch
from heterorl.learner.train.model import check_forward, prepare
from heterorl.learner.train.step import apply_gradients
from tests.support.training import is_identical, random_groups, tiny_model, weights

REFERENCE = tiny_model(seed=5, dtype=torch.float64)


def _gradients(model, groups, loss, *, micro_batch_tokens, batching="padded", temperature=0.9):
    model.zero_grad(set_to_none=True)
    passes = alone(
        model,
        loss=loss,
        temperature=temperature,
        max_new_tokens=16,
        micro_batch_tokens=micro_batch_tokens,
        batching=batching,
        reference=REFERENCE,
    )
    samples = passes.accumulate(build_batch([queued.group for queued in groups], loss=loss, head_version=7))
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return sum(sample.loss for sample in samples), gradients, len(samples)


@pytest.mark.parametrize(
    ("family", "loss"),
    [
        ("Llama", GepoConfig()),
        ("Qwen3", GepoConfig()),
        ("Qwen3", GspoConfig(aggregation="max_length")),
        ("Qwen3", GrpoConfig(aggregation="token_mean")),
        ("Qwen3", GrpoConfig(reference_kl=0.5)),
    ],
)
def test_gradient_does_not_depend_on_split_padding_or_packing(family, loss):
    """test_trajectories.py has every loss, over rollouts of several turns."""
    model = tiny_model(dtype=torch.float64, family=family)
    groups = random_groups(4, seed=2)

    value, gradients, _ = _gradients(model, groups, loss, micro_batch_tokens=9999)

    for batching, micro_batch_tokens in (("padded", 1), ("padded", 60), ("packed", 45), ("packed", 9999)):
        other_value, other_gradients, num_parts = _gradients(
            model, groups, loss, micro_batch_tokens=micro_batch_tokens, batching=batching
        )
        assert (num_parts > 1) == (micro_batch_tokens < 9999)
        assert other_value == pytest.approx(value, abs=1e-12)
        for name, gradient in gradients.items():
            torch.testing.assert_close(other_gradients[name], gradient, rtol=0, atol=1e-12)
            assert gradient.abs().max() > 1e-6


def _near_policy(model, groups):
    """The same groups with sampler log-probs close to the model's, so that weights are near 1."""
    rng = np.random.default_rng(1)
    result = []
    for queued in groups:
        members = []
        for member in queued.group.rollouts:
            ids = torch.from_numpy(np.concatenate([queued.group.prompt_token_ids, member.token_ids]).astype(np.int64))
            with torch.no_grad():
                table = torch.log_softmax(model(ids[None]).logits[0] / 0.9, -1)
            own = table[:-1].gather(1, ids[1:, None])[-member.token_ids.size :, 0].numpy()
            noisy = np.minimum(own + 0.2 * rng.standard_normal(own.size), -1e-3).astype(np.float32)
            members.append(dataclasses.replace(member, sampler_logprobs=noisy, reward=float(rng.integers(0, 3)) / 2))
        group = dataclasses.replace(queued.group, rollouts=tuple(members))
        result.append(dataclasses.replace(queued, group=group))
    return result


def test_denominator_of_the_micro_batch_depends_on_the_micro_batch():
    # The published code's scope, kept for reproduction: the same step, cut differently, is another loss.
    model = tiny_model(dtype=torch.float64)
    groups = _near_policy(model, random_groups(3, seed=3))
    loss = GepoConfig(scope="microbatch")

    whole, _, _ = _gradients(model, groups, loss, micro_batch_tokens=9999)
    parts, _, _ = _gradients(model, groups, loss, micro_batch_tokens=60)
    single, _, _ = _gradients(model, groups[:1], loss, micro_batch_tokens=9999)
    exact, _, _ = _gradients(model, groups[:1], GepoConfig(), micro_batch_tokens=9999)

    assert abs(whole - parts) > 1e-6
    assert single == pytest.approx(exact, abs=1e-12)


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 1000), micro_batch_tokens=st.integers(1, 200), batching=st.sampled_from(["padded", "packed"])
)
def test_loss_does_not_depend_on_the_layout_for_any_groups(seed, micro_batch_tokens, batching):
    model = tiny_model(dtype=torch.float64)
    groups = random_groups(3, group_size=3, seed=seed)

    value, _, _ = _gradients(model, groups, GepoConfig(), micro_batch_tokens=9999)
    other, _, _ = _gradients(model, groups, GepoConfig(), micro_batch_tokens=micro_batch_tokens, batching=batching)

    assert other == pytest.approx(value, abs=1e-12)


def test_loss_is_that_of_plain_log_softmax():
    # A slow reference: one forward pass per rollout with the model's own logits, losses written out.
    model = tiny_model(dtype=torch.float64)
    groups = [queued.group for queued in random_groups(2, seed=5)]
    total = 0.0
    for group in groups:
        means = np.array([member.sampler_logprobs.astype(np.float64).mean() for member in group.rollouts])
        expectation = (np.exp(means) ** 2).sum() / np.exp(means).sum()
        rewards = np.array([member.reward for member in group.rollouts])
        for member, reward in zip(group.rollouts, rewards, strict=True):
            ids = torch.from_numpy(np.concatenate([group.prompt_token_ids, member.token_ids]).astype(np.int64))[None]
            logprobs = torch.log_softmax(model(ids).logits[0] / 0.9, -1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
            learner = logprobs[group.prompt_token_ids.size - 1 :].detach().numpy()
            weight, advantage = np.exp(learner.mean()) / expectation, reward - rewards.mean()
            log_ratio = learner - member.sampler_logprobs
            total -= min(weight * advantage, np.clip(weight, 0.8, 1.2) * advantage)
            total += 0.005 * (np.exp(log_ratio) - 1 - log_ratio).mean()

    value, _, _ = _gradients(model, random_groups(2, seed=5), GepoConfig(), micro_batch_tokens=40)

    assert value == pytest.approx(total / 8, abs=1e-12)


def _apply(model, optimizer, loss, **changes):
    return apply_gradients(model.parameters(), optimizer, **{"loss": loss, "lr": 0.1, "grad_clip": 1.0, **changes})


def _after_one_step():
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    loss, _, _ = _gradients(model, random_groups(seed=1), GepoConfig(), micro_batch_tokens=99)
    assert _apply(model, optimizer, loss)[0]
    return model, optimizer


def _moments(optimizer):
    return {
        f"{number}/{key}": value.clone()
        for number, state in enumerate(optimizer.state.values())
        for key, value in state.items()
    }


@pytest.mark.parametrize(("loss", "gradient"), [(float("nan"), 1.0), (1.0, float("nan")), (1.0, float("inf"))])
def test_step_changes_nothing_when_a_number_is_not_finite(loss, gradient):
    model, optimizer = _after_one_step()
    before, moments = weights(model), _moments(optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    next(model.parameters()).grad.view(-1)[0] = gradient

    is_applied, _ = _apply(model, optimizer, loss)

    assert not is_applied
    assert is_identical(weights(model), before)
    assert is_identical(_moments(optimizer), moments)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("micro_batch_tokens", [60, 9999])
def test_gradient_of_a_loss_that_is_not_finite_is_not_finite_either(micro_batch_tokens):
    """Engines that look at the gradient alone skip the step too."""
    loss = CustomLossConfig(function="tests.support.custom_losses:endless")

    value, gradients, _ = _gradients(
        tiny_model(dtype=torch.float64), random_groups(4, seed=2), loss, micro_batch_tokens=micro_batch_tokens
    )

    assert value == float("inf")
    assert not any(gradient.isfinite().all() for gradient in gradients.values())


def test_step_is_not_applied_without_any_gradient():
    model, optimizer = _after_one_step()
    before = weights(model)

    is_applied, norm = _apply(model, optimizer, 0.0)

    assert not is_applied
    assert norm == 0.0
    assert is_identical(weights(model), before)


def test_step_scales_a_long_gradient_down_and_reports_its_length():
    # Adam is blind to scale on its first step, so plain gradient descent shows the clipped length.
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])

    is_applied, norm = apply_gradients(
        [parameter], torch.optim.SGD([parameter], lr=9.0), loss=0.0, lr=1.0, grad_clip=1.0
    )

    assert is_applied
    assert norm == 5.0
    assert parameter.tolist() == pytest.approx([-0.6, -0.8], abs=1e-5)


@pytest.mark.parametrize("batching", ["padded", "packed"])
@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
def test_check_accepts_models_whose_sequences_stay_apart(family, batching):
    check_forward(tiny_model(family=family), batching=batching)


def test_check_refuses_a_model_that_mixes_packed_sequences(monkeypatch):
    model = tiny_model()
    forward = model.base_model.forward
    # Positions that run on make neighbours look like one sequence.
    monkeypatch.setattr(model.base_model, "forward", lambda **inputs: forward(**{**inputs, "position_ids": None}))

    with pytest.raises(ConfigError, match="packed layout differ") as caught:
        check_forward(model, batching="packed")
    assert caught.value.key == "backend.batching"


def test_check_refuses_a_model_that_changes_its_logits():
    model = tiny_model(is_tied=False)
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(0.0, 1.0, 50))

    for batching in ("padded", "packed"):
        with pytest.raises(ConfigError, match="changes its logits") as caught:
            check_forward(model, batching=batching)
        assert caught.value.key == "model_dir"


def test_check_refuses_softcapping_that_small_logits_do_not_show():
    model = tiny_model(is_tied=False)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.1)
    model.lm_head.register_forward_hook(lambda _module, _inputs, logits: 30 * torch.tanh(logits / 30))
    assert model(input_ids=torch.arange(9)[None]).logits.abs().max() < 2

    with pytest.raises(ConfigError, match="changes its logits"):
        check_forward(model, batching="padded")


def test_check_names_a_weight_that_is_not_finite():
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = torch.nan

    with pytest.raises(ConfigError, match=r"model.layers.1.mlp.up_proj.weight is not finite") as caught:
        check_forward(model, batching="packed")
    assert caught.value.key == "model_dir"


@pytest.mark.parametrize(("is_training", "key"), [(True, "backend.gradient_checkpointing"), (False, "model_dir")])
def test_check_refuses_a_model_whose_functions_drop_out(monkeypatch, is_training, key):
    model = tiny_model()
    model.train(is_training)
    forward = model.base_model.norm.forward
    monkeypatch.setattr(
        model.base_model.norm, "forward", lambda hidden: torch.nn.functional.dropout(forward(hidden), 0.1)
    )

    with pytest.raises(ConfigError, match="other log-probs each time") as caught:
        check_forward(model, batching="packed")
    assert caught.value.key == key


@pytest.mark.parametrize("error", [AttributeError("no positions"), TypeError("unexpected"), RuntimeError("sizes")])
def test_check_says_in_one_line_what_a_models_own_code_raises(monkeypatch, error):
    model = tiny_model()

    def fail(**_):
        raise error

    monkeypatch.setattr(model.base_model, "forward", fail)

    with pytest.raises(ConfigError, match=f"Qwen3ForCausalLM gives no log-probs: {type(error).__name__}: {error}"):
        check_forward(model, batching="padded")


def test_checkpointing_that_a_model_has_not_is_refused_by_its_key():
    model = tiny_model()
    model.supports_gradient_checkpointing = False

    with pytest.raises(ConfigError, match="does not support activation checkpointing") as caught:
        prepare(model, gradient_checkpointing=True)
    assert caught.value.key == "backend.gradient_checkpointing"


def test_gradient_ignores_nothing_of_a_group_with_equal_rewards_but_its_advantage():
    # Such groups stay in the denominator, so the others' gradient does not depend on how many of them came along.
    model = tiny_model(dtype=torch.float64)
    loss = GepoConfig(sampler_kl=0.0)
    varied, flat = random_groups(2, seed=6)
    members = tuple(dataclasses.replace(member, reward=1.0) for member in flat.group.rollouts)
    flat = dataclasses.replace(flat, group=dataclasses.replace(flat.group, rollouts=members))

    _, alone, _ = _gradients(model, [varied], loss, micro_batch_tokens=99)
    _, together, _ = _gradients(model, [varied, flat], loss, micro_batch_tokens=99)

    for name, gradient in alone.items():
        torch.testing.assert_close(2.0 * together[name], gradient, rtol=0, atol=1e-12)


def test_the_reported_kl_has_no_cap_of_the_loss():
    # Half of the tokens at a ratio of e^5: k3 = e^5 - 1 - 5, of which a cap of 3 nats would leave e^3 - 1 - 3.
    model = tiny_model(dtype=torch.float64)
    groups = _near_policy(model, random_groups(2, seed=4))
    loss = GepoConfig(max_log_weight=3.0)

    def reported(shift):
        for queued in groups:
            for member in queued.group.rollouts:
                member.sampler_logprobs[0] -= shift
        passes = alone(
            model, loss=loss, temperature=0.9, max_new_tokens=16, micro_batch_tokens=9999, batching="padded",
        )  # fmt: skip
        return passes.accumulate(build_batch([queued.group for queued in groups], loss=loss, head_version=7))

    before = torch.cat([sample.kl_B for sample in reported(0.0)])
    after = torch.cat([sample.kl_B for sample in reported(5.0)])

    assert ((after - before) > math.exp(4.0)).all()
