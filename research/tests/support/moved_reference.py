"""The losses of research/losses once more, with loops over Python floats; see tests/support/loss_reference.py."""

from __future__ import annotations

import math

from tests.support.loss_reference import Reference, Rows, advantage, mean, ppo


class MovedReference(Reference):
    """Their objectives per token of every rollout."""

    def gepo_quantile(self, i: int, a: float) -> list[float]:
        """Leave out the bad rollout of the smallest ratio, one at a time, while the share allows it."""
        bad = [j for j in range(len(self.lq)) if advantage(self.case, j, "mean") < 0]
        w = {j: self.product(j) for j in bad}
        share = max(0.3, sum(w.values()) ** 2 / (len(bad) * sum(x * x for x in w.values())))
        kept = sorted(bad, key=lambda j: w[j])
        while len(kept) - 1 >= share * len(bad):
            kept = kept[1:]
        return self.gepo_with_bad(i, a, 1.0 if i in kept else 0.0)

    def gepo_tempered(self, i: int, a: float) -> list[float]:
        """The exponent by walking down from 1 in ever smaller steps."""
        every = [self.product(j) for j in range(len(self.lq))]
        exponent, step = 1.0, 0.1
        while step > 1e-17:
            w = [x**exponent for x in every]
            if sum(w) ** 2 / (len(w) * sum(x * x for x in w)) >= 0.9:
                if exponent == 1.0:
                    break
                exponent += step
                step /= 10
            exponent -= step
        w = [x**exponent for x in every]
        return self.gepo_with_bad(i, a, min(1.0, w[i] / mean(w)))

    def ds_gepo(self, i: int, a: float) -> list[float]:
        return self.rows(i, ppo(self.p(i) / (0.8 * self.group_mean(i, "") + 0.2 * self.sp(i)), a, 0.8, 1.2))

    def gspo_token(self, i: int, a: float) -> list[float]:
        s = self.sp(i) / self.q(i)
        return [ppo(s * math.exp(lp - sg), a, 0.8, 1.2) for lp, sg in zip(self.lp[i], self.sg[i], strict=True)]

    def vcpo(self, i: int, a: float) -> list[float]:
        members = self.case.members(i)
        # Each rollout's gradient as a mean over its tokens takes it.
        norms = [sum((1 - math.exp(sg)) ** 2 for sg in self.sg[j]) / len(self.sg[j]) ** 2 for j in members]
        w = [self.product(j) ** 2 * norm for j, norm in zip(members, norms, strict=True)]
        others = [advantage(self.case, j, "mean_std") for j in members]
        shift = sum(x * y for x, y in zip(w, others, strict=True)) / sum(w)
        return [min(self.product(i), 1.2) * (a - shift) * lp for lp in self.lp[i]]

    def tba(self, i: int, a: float) -> list[float]:
        """Half of beta times the squared residual of the balance, summed over a rollout; see `Terms` for the sign."""
        beta, members = 0.1, self.case.members(i)

        def gap(j: int, rows: Rows) -> float:
            row = [x - 0.3 * math.cos(2.0 * t) ** 2 for t, x in enumerate(self.lq[j])]
            return sum(rows[j]) - sum(row)

        log_z = mean([self.case.rewards[j] / beta - gap(j, self.sg) for j in members])
        residual = log_z + gap(i, self.lp) - self.case.rewards[i] / beta
        return [-beta / 2 * residual**2 / len(self.lp[i])] * len(self.lp[i])
