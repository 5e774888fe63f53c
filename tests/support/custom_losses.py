"""Losses of a user's own, for tests."""

from __future__ import annotations

from heterorl.learner.loss.custom import LossBatch, LossOutput


def normalised(batch: LossBatch, step: LossBatch) -> LossOutput:
    """GSPO without clip, its weights over their mean in the step, which is a constant; tokens of age 0 count double."""
    weights_B = _log_weights(batch).exp()
    mean = _log_weights(step).exp().mean()
    losses_BT = -(weights_B / mean * batch.advantages_B)[:, None] * (1.0 + (batch.ages_BT == 0))
    weight_of_row = _log_weights(step).exp()[batch.rows_B]
    return LossOutput(losses=losses_BT, metrics={"row_gap": weight_of_row - weights_B, "age": batch.ages_BT})


def _log_weights(batch: LossBatch):
    return (batch.learner_BT.sum(1) / batch.lengths_B - batch.sampler_means_B).clamp(max=batch.max_log_weight)


def by_turn(batch: LossBatch) -> LossOutput:
    """The ratio of each whole turn; a metric shows the turns."""
    zeros_BK = batch.learner_BT.new_zeros(len(batch.turns_BT), int(batch.turns_BT.max()) + 1)
    sums_BK = zeros_BK.scatter_add(1, batch.turns_BT, batch.learner_BT - batch.sampler_BT)
    weights_BT = sums_BK.clamp(max=batch.max_log_weight).exp().gather(1, batch.turns_BT)
    return LossOutput(losses=-weights_BT * batch.advantages_B[:, None], metrics={"turn": batch.turns_BT.double()})


def over_the_sampler(batch: LossBatch) -> LossOutput:
    """Sound, and not a number in padding, where it divides 0 by 0."""
    return LossOutput(losses=batch.learner_BT / batch.sampler_BT * batch.advantages_B[:, None])


def near_the_reference(batch: LossBatch, step: LossBatch, *, beta: float = 1.0) -> LossOutput:
    """Half the squared distance of whole rollouts from the reference, over its mean in the step; rewards do not count."""
    assert batch.reference_BT is not None
    assert step.reference_BT is not None
    gaps_B = (batch.learner_BT - batch.reference_BT).sum(1)
    scale = (step.learner_BT - step.reference_BT).sum(1).square().mean().clamp(min=1.0)
    return LossOutput(losses=beta * gaps_B.square() / scale / 2)


def of_the_pass(batch: LossBatch) -> LossOutput:
    """Wrong: divides by the mean weight of the rollouts that share the pass."""
    weights_B = _log_weights(batch).exp()
    return LossOutput(losses=-weights_B / weights_B.mean() * batch.advantages_B)


def metric_of_the_pass(batch: LossBatch) -> LossOutput:
    """Wrong in its metric."""
    losses_BT = -batch.learner_BT * batch.advantages_B[:, None]
    return LossOutput(losses=losses_BT, metrics={"least": batch.learner_BT.detach().min() + 0.0 * batch.lengths_B})


def in_place(batch: LossBatch) -> LossOutput:
    """Wrong: writes into its input."""
    batch.sampler_BT.clamp_(min=-1.0)
    return LossOutput(losses=-batch.learner_BT * batch.advantages_B[:, None])


def raising(batch: LossBatch, *, when_rows: int = 0) -> LossOutput:
    """Raises on passes of more rollouts."""
    if batch.lengths_B.numel() > when_rows:
        raise LookupError("no such rollout")
    return LossOutput(losses=-batch.learner_BT * batch.advantages_B[:, None])


def raising_on_age(batch: LossBatch, *, age: int) -> LossOutput:
    """Raises on passes with a token of this age."""
    if (batch.ages_BT == age).any():
        raise LookupError("no such rollout")
    return LossOutput(losses=-batch.learner_BT * batch.advantages_B[:, None])


def returning(batch: LossBatch, *, what: str) -> object:
    """Returns what is no loss, or one that leads nowhere."""
    good_BT = -batch.learner_BT * batch.advantages_B[:, None]
    return {
        "a tensor": good_BT,
        "a scalar": LossOutput(losses=good_BT.sum()),
        "constants": LossOutput(losses=good_BT.detach()),
        "nan": LossOutput(losses=good_BT * float("nan")),
        "a steep root": LossOutput(losses=(good_BT * 0.0).sqrt()),
        "metrics without names": LossOutput(losses=good_BT, metrics=[good_BT]),  # type: ignore[arg-type]
        "a number as metric": LossOutput(losses=good_BT, metrics={"drift": 0.5}),  # type: ignore[dict-item]
        "a metric of one number": LossOutput(losses=good_BT, metrics={"drift": good_BT.mean()}),
        "a nan metric": LossOutput(losses=good_BT, metrics={"drift": good_BT * float("nan")}),
        "a name with a space": LossOutput(losses=good_BT, metrics={"my drift": good_BT}),
        "many metrics": LossOutput(losses=good_BT, metrics={f"m{number}": good_BT for number in range(17)}),
        "wrong weights": LossOutput(losses=good_BT, weights=good_BT[:, :1]),
        "clips as numbers": LossOutput(losses=good_BT, is_clipped=good_BT),
    }[what]


def endless(batch: LossBatch) -> LossOutput:
    """Infinite, with a finite gradient."""
    return LossOutput(losses=batch.learner_BT + float("inf"))


def by_inverse_ratio(batch: LossBatch) -> LossOutput:
    """Beyond 709 nats of drift its value is infinite."""
    drift_B = ((batch.sampler_BT - batch.learner_BT) * batch.mask_BT).sum(1)
    return LossOutput(losses=batch.advantages_B * drift_B.exp())
