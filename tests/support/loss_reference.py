"""The losses once more, written from the papers with loops over Python floats: slow, plain, sharing nothing.

`value(..., fixed=...)` evaluates the loss with stop-gradients taken from `fixed`, so central differences of it in
`learner` are the gradient that the loss means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Rows = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Rollouts with the group each belongs to, the age of its tokens, and the limit on completion tokens."""

    sampler: Rows
    rewards: Sequence[float]
    group: Sequence[int]
    staleness: Sequence[int]
    max_tokens: int

    def members(self, i: int) -> list[int]:
        return [j for j in range(len(self.group)) if self.group[j] == self.group[i]]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def clip(x: float, low: float, high: float) -> float:
    return max(low, min(high, x))


def advantage(case: Case, i: int, kind: str) -> float:
    rewards = [case.rewards[j] for j in case.members(i)]
    centred = case.rewards[i] - mean(rewards)
    if kind == "mean":
        return centred
    if kind == "mean_std":
        return centred / (math.sqrt(sum((r - mean(rewards)) ** 2 for r in rewards) / (len(rewards) - 1)) + 1e-4)
    prompts = sorted(set(case.group))
    p = [mean([r for r, g in zip(case.rewards, case.group, strict=True) if g == prompt]) for prompt in prompts]
    m, v = mean(p), sum((x - mean(p)) ** 2 for x in p) / (len(p) - 1)
    a, b = (m * (1 - m) / v - 1) * m, (m * (1 - m) / v - 1) * (1 - m)
    alpha, beta = max(1 + a / 3, 1), max(1 + b / 3, 1)
    x = mean(rewards)
    density = x ** (alpha - 1) * (1 - x) ** (beta - 1) * math.gamma(alpha + beta) / math.gamma(alpha) / math.gamma(beta)
    return centred * min(1 / density, 1e6)


def dual(w: float, a: float, low: float = 0.8, high: float = 1.2, c: float = 1.3) -> float:
    return max(ppo(w, a, low, high), c * a) if a < 0 else ppo(w, a, low, high)


def ppo(w: float, a: float, low: float, high: float) -> float:
    return min(w * a, clip(w, low, high) * a)


Terms = Callable[[int, float], list[float]]


class Reference:
    """Objectives per token of every rollout, by algorithm."""

    def __init__(self, case: Case, learner: Rows, fixed: Rows) -> None:
        self.case, self.lp, self.sg, self.lq = case, learner, fixed, case.sampler

    def p(self, i: int) -> float:
        return math.exp(mean(self.lp[i]))

    def sp(self, i: int) -> float:
        return math.exp(mean(self.sg[i]))

    def q(self, i: int) -> float:
        return math.exp(mean(self.lq[i]))

    def group_mean(self, i: int, kind: str) -> float:
        q = [self.q(j) for j in self.case.members(i)]
        if kind == "arithmetic":
            return mean(q)
        if kind == "geometric":
            return math.prod(q) ** (1 / len(q))
        return sum(x * x for x in q) / sum(q)

    def rows(self, i: int, value: float) -> list[float]:
        return [value] * len(self.lq[i])

    def gepo(self, i: int, a: float, kind: str = "contraharmonic") -> list[float]:
        return self.rows(i, ppo(self.p(i) / self.group_mean(i, kind), a, 0.8, 1.2))

    def gepo_others(self, i: int, a: float) -> list[float]:
        q = [self.q(j) for j in self.case.members(i) if j != i]
        return self.rows(i, ppo(self.p(i) / (sum(x * x for x in q) / sum(q)), a, 0.8, 1.2))

    def gepo_dual(self, i: int, a: float) -> list[float]:
        return self.rows(i, dual(self.p(i) / self.group_mean(i, ""), a))

    def gepo_1s(self, i: int, a: float) -> list[float]:
        return self.rows(i, ppo(self.p(i) / self.group_mean(i, ""), a, 0.8, math.inf))

    def gepo_with_bad(self, i: int, a: float, weight: float) -> list[float]:
        return self.gepo_1s(i, a) if a >= 0 else [weight * a * lp for lp in self.lp[i]]

    def product(self, i: int) -> float:
        return math.prod(self.fixed_ratios(i))

    def gepo_product(self, i: int, a: float) -> list[float]:
        return self.gepo_with_bad(i, a, min(1.0, self.product(i)))

    def gepo_whole(self, i: int, a: float) -> list[float]:
        """A bad rollout takes part as long as all of it is at least e^-.1 times as likely as it was."""
        return self.rows(i, 0.0) if a < 0 and self.product(i) < math.exp(-0.1) else self.gepo_1s(i, a)

    def gepo_raw(self, i: int, a: float) -> list[float]:
        q = [math.exp(sum(self.lq[j])) for j in self.case.members(i)]
        return self.rows(i, ppo(math.exp(sum(self.lp[i])) / (sum(x * x for x in q) / sum(q)), a, 0.8, 1.2))

    def gepo_preserving(self, i: int, a: float) -> list[float]:
        w = self.p(i) / self.group_mean(i, "contraharmonic")
        fixed = self.sp(i) / self.group_mean(i, "contraharmonic")
        if (a > 0 and fixed > 1.2) or (a < 0 and fixed < 0.8):
            return self.rows(i, clip(fixed, 0.8, 1.2) * self.p(i) / self.sp(i) * a)
        return self.rows(i, w * a)

    def decided_by(self, i: int, a: float, own: float, other: float) -> list[float]:
        if (a > 0 and other > 1.2) or (a < 0 and other < 0.8):
            return self.rows(i, clip(other, 0.8, 1.2) * a)
        return self.rows(i, own * a)

    def gepo_on_gspo(self, i: int, a: float) -> list[float]:
        return self.decided_by(i, a, self.p(i) / self.group_mean(i, ""), self.sp(i) / self.q(i))

    def gspo_on_gepo(self, i: int, a: float) -> list[float]:
        return self.decided_by(i, a, self.p(i) / self.q(i), self.sp(i) / self.group_mean(i, ""))

    def gepo_spread(self, i: int, a: float) -> list[float]:
        w = self.sp(i) / self.group_mean(i, "")
        return [
            ppo(w * math.exp(lp - sg), a, 0.8, 1.2) if clip(w, 0.8, 1.2) == w or ppo(w, a, 0.8, 1.2) == w * a
            else clip(w, 0.8, 1.2) * a
            for lp, sg in zip(self.lp[i], self.sg[i], strict=True)
        ]  # fmt: skip

    def gepo_topr(self, i: int, a: float) -> list[float]:
        return [a * lp for lp in self.lp[i]] if a >= 0 else self.gepo(i, a)

    def gepo_topr_clipped(self, i: int, a: float) -> list[float]:
        is_dropped = self.sp(i) / self.group_mean(i, "") > 1.2
        return self.rows(i, 1.2 * a) if a > 0 and is_dropped else self.gepo_topr(i, a)

    def gepo_plus(self, i: int, a: float) -> list[float]:
        d = [sg - lq for sg, lq in zip(self.sg[i], self.lq[i], strict=True)]
        kl = mean([math.exp(x) - 1 - x for x in d])
        return self.rows(i, ppo(self.p(i) / (self.q(i) if kl < 0.05 else self.group_mean(i, "")), a, 0.8, 1.2))

    def eqp(self, i: int, a: float) -> list[float]:
        members = self.case.members(i)
        total = sum(self.q(j) for j in members)
        return self.rows(i, ppo(self.p(i) / sum(self.q(j) / total * self.p(j) for j in members), a, 0.8, 1.2))

    def gspo(self, i: int, a: float) -> list[float]:
        return self.rows(i, ppo(self.p(i) / self.q(i), a, 0.8, 1.2))

    def normalised(self, i: int, a: float) -> list[float]:
        mean_weight = mean([self.sp(j) / self.q(j) for j in range(len(self.lq))])
        return self.rows(i, self.p(i) / self.q(i) / mean_weight * a * (2.0 if self.case.staleness[i] == 0 else 1.0))

    def gspo_unclipped(self, i: int, a: float) -> list[float]:
        return self.rows(i, self.p(i) / self.q(i) * a)

    def ds_gspo(self, i: int, a: float) -> list[float]:
        return self.rows(i, ppo(self.p(i) / (0.8 * self.q(i) + 0.2 * self.sp(i)), a, 0.8, 1.2))

    def gmpo(self, i: int, a: float) -> list[float]:
        sign = 1.0 if a > 0 else -1.0
        d = [lp - lq for lp, lq in zip(self.lp[i], self.lq[i], strict=True)]
        return self.rows(i, a * math.exp(mean([sign * min(sign * x, sign * clip(x, -0.2, 0.2)) for x in d])))

    def ratios(self, i: int) -> list[float]:
        return [math.exp(lp - lq) for lp, lq in zip(self.lp[i], self.lq[i], strict=True)]

    def fixed_ratios(self, i: int) -> list[float]:
        return [math.exp(sg - lq) for sg, lq in zip(self.sg[i], self.lq[i], strict=True)]

    def grpo(self, i: int, a: float, low: float = 0.8, high: float = 1.2) -> list[float]:
        return [ppo(r, a, low, high) for r in self.ratios(i)]

    def grpo_dual(self, i: int, a: float) -> list[float]:
        return [dual(r, a) for r in self.ratios(i)]

    def mois(self, i: int, a: float, is_full: bool, eps: float) -> list[float]:
        share = 1 / (1 + math.exp(self.case.staleness[i] - 1))
        result = []
        for lp, sg, lq in zip(self.lp[i], self.sg[i], self.lq[i], strict=True):
            denominator = share * math.exp(lp if is_full else sg) + (1 - share) * math.exp(lq)
            result.append(ppo(math.exp(lp) / denominator, a, 1 - eps, 1 + eps))
        return result

    def reinforce(self, i: int, a: float) -> list[float]:
        return [a * lp for lp in self.lp[i]]

    def impala(self, i: int, a: float, rho_cap: float, c_cap: float) -> list[float]:
        """V-trace as its paper writes it: targets v by recursion, with a value of .3 in every state but the end."""
        ratios, value = self.fixed_ratios(i), 0.3
        rewards = [0.0] * (len(ratios) - 1) + [a + value]
        next_target, next_value, terms = 0.0, 0.0, []
        for r, reward, lp in reversed(list(zip(ratios, rewards, self.lp[i], strict=True))):
            rho = min(rho_cap, r)
            terms.append(rho * (reward + next_target - value) * lp)
            delta = rho * (reward + next_value - value)
            next_target = value + delta + min(c_cap, r) * (next_target - next_value)
            next_value = value
        return terms[::-1]

    def dapo(self, i: int, a: float) -> list[float]:
        return self.grpo(i, a, 0.8, 1.28)

    def unclipped(self, i: int, a: float) -> list[float]:
        return [r * a for r in self.ratios(i)]

    def truncated(self, i: int, a: float, high: float) -> list[float]:
        return [min(r, high) * a * lp for r, lp in zip(self.fixed_ratios(i), self.lp[i], strict=True)]

    def topr(self, i: int, a: float) -> list[float]:
        weight = 1.0 if a >= 0 else clip(math.prod(self.fixed_ratios(i)), 0, 1)
        return [weight * a * lp for lp in self.lp[i]]

    def tis_sequence(self, i: int, a: float) -> list[float]:
        w = min(math.prod(self.fixed_ratios(i)), 1.2)
        return [w * a * lp for lp in self.lp[i]]

    def mis(self, i: int, a: float) -> list[float]:
        w = math.prod(self.fixed_ratios(i))
        return [(w if 0.5 <= w <= 1.3 else 0.0) * a * lp for lp in self.lp[i]]

    def mis_token(self, i: int, a: float) -> list[float]:
        pairs = zip(self.fixed_ratios(i), self.lp[i], strict=True)
        return [(r if 0.7 <= r <= 1.3 else 0.0) * a * lp for r, lp in pairs]

    def mis_geometric(self, i: int, a: float) -> list[float]:
        w = self.sp(i) / self.q(i)
        return [(w if 0.9 <= w <= 1.05 else 0.0) * a * lp for lp in self.lp[i]]

    def decoupled(
        self, i: int, a: float, is_exact: bool, eps: float, cap: float = 1.1, most: float = math.inf
    ) -> list[float]:
        age = self.case.staleness[i]
        alpha = 1.0 if is_exact else max(age - 1, 0) / max(age, 1)
        result = []
        for lp, sg, lq in zip(self.lp[i], self.sg[i], self.lq[i], strict=True):
            proximal = lq + alpha * (sg - lq)
            behaviour = min(math.exp(proximal - lq), cap, most)
            ratio = min(math.exp(lp - proximal), most / max(behaviour, 1.0))
            result.append(behaviour * ppo(ratio, a, 1 - eps, 1 + eps))
        return result


def drifted(case: Case, fixed: Rows, i: int, a: float, limit: float) -> bool:
    return a < 0 and mean([lq - sg for lq, sg in zip(case.sampler[i], fixed[i], strict=True)]) > limit


def second_moment_kept(case: Case, fixed: Rows, advantages: Sequence[float], budget: float) -> set[tuple[int, int]]:
    """Remove the harmful token with the largest square, one at a time, until the mean is within the budget."""
    squares, free = {}, set()
    for i, row in enumerate(fixed):
        for t, sg in enumerate(row):
            d = sg - case.sampler[i][t]
            if (advantages[i] > 0 and d > 0) or (advantages[i] < 0 and d < 0):
                squares[(i, t)] = d * d
            else:
                free.add((i, t))
    while squares and sum(squares.values()) / len(squares) > budget:
        del squares[max(squares, key=lambda key: squares[key])]
    return free | set(squares)
