"""A check of a custom loss on made-up rollouts."""

import dataclasses
import random
from collections.abc import Sequence

import numpy as np
import torch

from heterorl.common.types.common import Digest, SiteId
from heterorl.common.types.rollout import GIVEN, FinishReason, Group, GroupId, Rollout, Span
from heterorl.learner.loss.custom import CustomLoss
from heterorl.learner.loss.loss_config import CustomLossConfig, LossConfig
from heterorl.learner.loss.loss_spec import LossSpec, loss_spec_of
from heterorl.learner.loss.policy_loss import policy_loss
from heterorl.learner.train.batch import Batch, build_batch, collate
from heterorl.learner.train.step import step_coefficients, with_first_pass
from heterorl.learner.train.step_report import summed

_LENGTHS = ((6, 2, 5, 1), (3, 4, 2, 3), (1, 1, 2, 4))
_REWARDS = (1.0, 0.0, 0.5, 0.0)
_HEAD = 8
_PIECES = ((0, 3, 5, 10), (9, 1, 2, 4, 11), (7, 6, 8))
"""Members of one group lie in several pieces, and their longest rollouts differ, so padding does too."""
_TOLERANCE = 1e-9


def check_custom_loss(config: LossConfig) -> None:
    """Import a custom loss and call it on 12 short rollouts.

    Other kinds pass unchecked. Raises ConfigError if it cannot be loaded, raises, is not finite, gives no gradient, or
    depends on how a step is divided.
    """
    if not isinstance(config, CustomLossConfig):
        return
    spec = loss_spec_of(config)
    assert spec.custom is not None
    batch = build_batch([_group(number) for number in range(len(_LENGTHS))], loss=config, head_version=_HEAD)
    rng = random.Random(1)
    logprobs = [
        torch.tensor([min(x + rng.gauss(0.0, 0.2), 0.0) for x in sequence.sampler_logprobs.tolist()]).double()
        for sequence in batch.sequences
    ]
    if spec.needs_reference:
        references = [each.sampler_logprobs.astype(np.float64) - 0.3 * rng.random() for each in batch.sequences]
        pairs = zip(batch.sequences, references, strict=True)
        batch = Batch(sequences=tuple(dataclasses.replace(one, reference_logprobs=given) for one, given in pairs))
    if spec.needs_first_pass:
        batch = with_first_pass(spec, batch, logprobs, max_new_tokens=max(map(max, _LENGTHS)))
    whole, pieces = (
        _outcome(spec, batch, logprobs, parts) for parts in ((tuple(range(len(batch.sequences))),), _PIECES)
    )
    _judge(spec.custom, whole, pieces)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Outcome:
    loss: float
    gradients_N: torch.Tensor
    metrics: dict[str, torch.Tensor]


def _outcome(
    spec: LossSpec, batch: Batch, logprobs: Sequence[torch.Tensor], parts: Sequence[Sequence[int]]
) -> _Outcome:
    loss = 0.0
    gradients = [torch.zeros(0)] * len(logprobs)
    metrics: dict[str, torch.Tensor] = {}
    for part in parts:
        inputs = collate([batch.sequences[position] for position in part], batching="padded").loss_inputs
        rows = [logprobs[position].clone().requires_grad_() for position in part]
        learner_BT = inputs.padded(torch.cat(rows))
        coefficients_BT = step_coefficients(spec, inputs.mask_BT, batch, max_new_tokens=max(map(max, _LENGTHS)))
        terms = policy_loss(spec, inputs, learner_BT, coefficients_BT=coefficients_BT, step=batch.whole)
        total = terms.contributions_B.sum()
        found = torch.autograd.grad(total, rows)
        loss += total.item()
        for position, gradient in zip(part, found, strict=True):
            gradients[position] = gradient
        for name, values in terms.metrics.items():
            both = summed(values, inputs.mask_BT)
            metrics[name] = metrics.get(name, torch.zeros_like(both)) + both
    return _Outcome(loss=loss, gradients_N=torch.cat(gradients), metrics=metrics)


def _judge(custom: CustomLoss, whole: _Outcome, pieces: _Outcome) -> None:
    if not (torch.tensor(whole.loss).isfinite() and whole.gradients_N.isfinite().all()):
        raise custom.error(f"gives a loss of {whole.loss:g} or a gradient that is not finite on 12 short rollouts")
    if not whole.gradients_N.any():
        raise custom.error("gives no gradient by batch.learner_BT on 12 short rollouts: its losses must depend on it")
    if bad := [name for name, both in whole.metrics.items() if not both.isfinite().all()]:
        raise custom.error(f"gives a metric {bad[0]} that is not finite on 12 short rollouts")
    differing = [
        ("losses", torch.tensor(whole.loss), torch.tensor(pieces.loss)),
        ("gradients", whole.gradients_N, pieces.gradients_N),
        *((f"metric {name}", both, pieces.metrics.get(name, both * 0.0)) for name, both in whole.metrics.items()),
    ]
    for what, one, other in differing:
        if not torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE):
            raise custom.error(
                f"gives other {what} when 12 rollouts are computed in three passes than in one: what it returns of a"
                " rollout may depend on that rollout and on `step`, not on the others of the batch"
            )


def _group(number: int) -> Group:
    rng = random.Random(number)
    version = _HEAD - 3 * number
    members = [
        Rollout(
            token_ids=np.ones(spans[-1].end, np.int32),
            sampler_logprobs=np.array([-2.0 * rng.random() - 0.05 for _ in range(length)], np.float32),
            spans=spans,
            reward=reward,
            reward_parts=(),
            finish_reason=FinishReason.EOS,
        )
        for length, reward in zip(_LENGTHS[number], _REWARDS, strict=True)
        for spans in [_spans(version, length)]
    ]
    return Group(
        id=GroupId(site=SiteId("trial"), incarnation="trial", sequence=number + 1),
        assignment=number + 1,
        prompt_index=number,
        prompt_token_ids=np.array([1, number + 2], np.int32),
        rollouts=tuple(members),
        oldest_version=version,
        state_root=Digest("0" * 64),
        generation_s=1.0,
    )


def _spans(version: int, length: int) -> tuple[Span, ...]:
    """Two turns where there are more than two tokens, else one."""
    if length <= 2:
        return (Span(version=version, start=0, end=length),)
    first, given = Span(version=version, start=0, end=2), Span(version=GIVEN, start=2, end=3)
    return first, given, Span(version=version, start=3, end=length + 1)
