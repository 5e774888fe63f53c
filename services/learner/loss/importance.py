"""Importance weights as logarithms, and masks of rollouts and tokens.

Guarantees: gradient reaches the learner's log-probs only; finite for finite log-probs; every function except
`within_second_moment` is separable over rollouts, so splits do not matter. Suffixes: B sequences, T completion tokens,
N tokens of the whole step.
"""

import math

import torch

from heterorl.learner.loss.group import masked_mean


def defensive_log_denominators(
    log_denominators_B: torch.Tensor, learner_log_probs_B: torch.Tensor, *, fraction: float
) -> torch.Tensor:
    """Defensive mixture: log((1 - a) D + a sg(p)) with a = `fraction`.
    Source: Hesterberg 1995. p / D is at most 1 / a."""
    return torch.logaddexp(
        log_denominators_B + math.log1p(-fraction), learner_log_probs_B.detach() + math.log(fraction)
    )


def mixture_log_denominators(
    learner_BT: torch.Tensor, sampler_BT: torch.Tensor, staleness_BT: torch.Tensor, *, age: float, slope: float
) -> torch.Tensor:
    """log(a p + (1 - a) q), whose share a falls with staleness.

    a = 1 / (1 + exp(slope (staleness - age))); the result is [B, T]. MoIS of the published code of arXiv 2508.17850,
    with age 8 and slope 1. p / D never exceeds 1 / a. Detach `learner_BT` for a constant denominator. `age`, in
    versions, is where a is one half; `slope` is per version and positive.
    """
    logits_BT = slope * (age - staleness_BT)
    logsigmoid = torch.nn.functional.logsigmoid
    return torch.logaddexp(logsigmoid(logits_BT) + learner_BT, logsigmoid(-logits_BT) + sampler_BT)


def v_trace_log_weights(
    log_ratios_BT: torch.Tensor, mask_BT: torch.Tensor, *, rho_cap: float, c_cap: float
) -> torch.Tensor:
    """Log of V-trace's factor of A grad log p_t; [B, T].

    The result is a constant; the only reward is at the end. arXiv 1802.01561 equation 1 and section 4.2 with discount 1
    and the group's mean reward as value of every state. All temporal differences except the last vanish; the last is
    rho_T A. So the weight of token t is rho_t (prod_(t < j < T) c_j) rho_T, of the last rho_T, with rho = min(rho_cap,
    r) and c = min(c_cap, r). Completion tokens stand at the left of a row.
    """
    ratios_BT = torch.where(mask_BT, log_ratios_BT.detach(), 0.0)
    positions = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    is_last_BT = mask_BT & (positions == mask_BT.sum(1, keepdim=True) - 1)
    rho_BT = ratios_BT.clamp(max=math.log(rho_cap))
    backwards_BT = torch.where(is_last_BT, rho_BT, torch.where(mask_BT, ratios_BT.clamp(max=math.log(c_cap)), 0.0))
    later_BT = torch.nn.functional.pad(backwards_BT.flip(1).cumsum(1).flip(1)[:, 1:], (0, 1))
    return rho_BT + later_BT


def proximal_logprobs(
    learner_BT: torch.Tensor, sampler_BT: torch.Tensor, staleness_BT: torch.Tensor, *, is_exact: bool
) -> torch.Tensor:
    """Token log-probs of the proximal policy of decoupled PPO; [B, T].

    Decoupled PPO clips around this policy; the result is a constant. Exact: the policy at the start of the step, which
    with one optimizer step per batch is the learner itself. Otherwise log q + alpha (log p - log q) with alpha =
    (v_prox - v_q) / (v - v_q) and v_prox = v - 1: the estimate of A-3PO, arXiv 2512.06547. Tokens of the current
    version have alpha 0. `staleness_BT` is v - v_q of each token, at least 0.
    """
    learner_BT = learner_BT.detach()
    if is_exact:
        return learner_BT
    alpha_BT = (staleness_BT - 1.0).clamp(min=0.0) / staleness_BT.clamp(min=1.0)
    return sampler_BT + alpha_BT * (learner_BT - sampler_BT)


def clip_token_log_ratios(
    log_ratios_BT: torch.Tensor, advantages_B: torch.Tensor, *, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """GMPO's one-sided clip of token log ratios.

    arXiv 2507.20673 equation 4: from above if A > 0, below if A < 0. Returns the clipped log ratios, without gradient
    where the clip acted, and where it acted; both [B, T].
    """
    advantages_B1 = advantages_B[:, None]
    ratios = log_ratios_BT.detach()
    is_clipped_BT = ((advantages_B1 > 0) & (ratios > high)) | ((advantages_B1 < 0) & (ratios < low))
    return torch.where(is_clipped_BT, ratios.clamp(low, high), log_ratios_BT), is_clipped_BT


def has_not_drifted(
    learner_BT: torch.Tensor,
    sampler_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    advantages_B: torch.Tensor,
    *,
    limit: float,
    is_total: bool = False,
) -> torch.Tensor:
    """Off-policy sequence mask of DeepSeek-V3.2; bool [B].

    False where A < 0 and mean_t(log q - log p) > limit, nats. With `is_total` the sum over the completion takes the
    mean's place.
    """
    drift_BT = torch.where(mask_BT, sampler_BT.detach() - learner_BT.detach(), 0.0)
    drift_B = drift_BT.sum(1) if is_total else masked_mean(drift_BT, mask_BT)
    return ~((advantages_B < 0) & (drift_B > limit))


def within_second_moment(log_ratios_N: torch.Tensor, advantages_N: torch.Tensor, *, budget: float) -> torch.Tensor:
    """M2PO's token selection over a whole step; bool [N].

    Source: arXiv 2510.01161 section 4. Harmful tokens have A > 0 with r > 1, or A < 0 with r < 1. They are left out
    from the largest (log r)^2 down. That ends when the mean of (log r)^2 over the remaining ones is at most the budget.
    All others stay. The selection is exact, so it needs all of the step's tokens. The earlier token of two equal
    squares stays.
    """
    assert log_ratios_N.dim() == 1
    assert log_ratios_N.shape == advantages_N.shape
    is_kept_N = torch.ones_like(log_ratios_N, dtype=torch.bool)
    harmful = torch.nonzero(log_ratios_N * advantages_N > 0)[:, 0]
    squares, order = torch.sort(log_ratios_N[harmful].double() ** 2, stable=True)
    means = torch.cumsum(squares, 0) / torch.arange(1, squares.numel() + 1, device=squares.device)
    # Ascending squares have ascending means, so those within the budget are a prefix.
    is_kept_N[harmful[order[means > budget]]] = False
    return is_kept_N
