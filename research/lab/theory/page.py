"""The theory page: what is proved, what is measured and what is false about GEPO's weights, in one HTML file.

Guarantees: made on one core in seconds; the same seed gives the same bytes with the same libraries. Writes only
below `out`: theory.html, and theory.json with its numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from heterorl_research.lab.theory import checks
from heterorl_research.lab.theory.claims import Claim, Findings, claims, find
from heterorl_research.lab.theory.samples import GROUP_SIZE, SoftmaxCases

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; color: #1c2733 }
h1 { margin-bottom: 0 } .lead { color: #51606e; margin-top: .2rem }
table { border-collapse: collapse; width: 100% }
.scroll { overflow-x: auto }
td, th { border-bottom: 1px solid #d8dee4; padding: .5rem .7rem; text-align: left; vertical-align: top }
td.verdict { font-weight: 600; width: 9rem } td.claim { width: 18rem }
td.evidence { font-size: .92rem } .yes { color: #1d7a38 } .no { color: #b3261e }
td.number { text-align: right; font-variant-numeric: tabular-nums }
.formula { background: #f4f6f8; border-radius: .5rem; padding: .6rem 1rem; line-height: 1.9 }
"""

_INTRODUCTION = """
<h1>What is true about GEPO's weights</h1>
<p class="lead">Group Expectation Policy Optimization (arXiv 2508.17850) divides the learner's probability p of an
answer by one number for the whole group, an estimate of E<sub>q</sub>[q], where ordinary importance sampling divides by
the sampler's own q. Everything below is computed in float64, exactly where a closed form exists.</p>
<h2>In short</h2>
<ul>
<li>The shared denominator buys low variance when sampler and learner are <b>far apart</b>; close together, p/q varies
less. The price is bias, also on-policy: confident answers count more.</li>
<li>Of the three theorems, the first is true and too weak to say anything about sequences, the second needs centred
advantages, and the third is false as stated. What protects training is simpler: a length-normalised weight cannot
exceed 1/&Ecirc;.</li>
<li>The group estimate &sum;q<sup>2</sup>/&sum;q is not E<sub>q</sub>[q] but larger; the plain mean is unbiased. With
length normalisation the difference is a few per cent.</li>
</ul>
<h2>The two weights</h2>
<p class="formula">
S = E<sub>q</sub>[q] = &sum; q<sup>2</sup><br>
Var<sub>q</sub>[p/q] = &sum; p<sup>2</sup>/q - 1<br>
Var<sub>q</sub>[p/E<sub>q</sub>q] = ( &sum; p<sup>2</sup>q - (&sum; pq)<sup>2</sup> ) / S<sup>2</sup><br>
E<sub>q</sub>[(p/E<sub>q</sub>q) A] - E<sub>p</sub>[A] = &sum; p (q/S - 1) A<br>
p = N(m, s<sup>2</sup>), q = N(0, 1): S = 1/(2&radic;&pi;);<br>
Var<sub>q</sub>[p/E<sub>q</sub>q] = 2 exp(-m<sup>2</sup>/(2+s<sup>2</sup>)) / (s &radic;(2+s<sup>2</sup>)) -
2 exp(-m<sup>2</sup>/(1+s<sup>2</sup>)) / (1+s<sup>2</sup>)</p>
"""
_SOFTMAX = """
<h2>Random softmax policies</h2>
<p>Pairs of policies over 64 outcomes: logits disturbed and rescaled by a temperature.</p>
"""


def main(out: Path, *, seed: int) -> Path:
    """Write the page; returns its path. `out` is made if missing."""
    return write_page(out, seed=seed, num_trials=200_000)


def write_page(out: Path, *, seed: int, num_trials: int) -> Path:
    """Write the page from `num_trials` trials per theorem; returns its path.

    Raises:
        ValueError: fewer than 100 trials.
    """
    if num_trials < 100:
        raise ValueError("the page needs at least 100 trials")
    out.mkdir(parents=True, exist_ok=True)
    findings = find(seed=seed, num_trials=num_trials)
    table = claims(findings)
    parts = [_INTRODUCTION, "<h2>Claims</h2>", _claims_table(table), _SOFTMAX, _bins_table(findings.softmax)]
    parts.append(
        f'<p class="lead">Seed {seed}; {num_trials:,} trials per theorem, n from '
        f"{min(checks.NUM_OUTCOMES)} to {max(checks.NUM_OUTCOMES)} outcomes, Dirichlet policies of "
        "concentration 0.03 to 30. A rate of violation depends on how the trials are drawn; one violation is enough "
        "to refute, no violation is not a proof.</p>"
    )
    (out / "theory.json").write_text(json.dumps(_numbers(findings, table), indent=2) + "\n", encoding="utf-8")
    path = out / "theory.html"
    path.write_text(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>heterorl theory</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n",
        encoding="utf-8",
    )
    return path


def _claims_table(table: Sequence[Claim]) -> str:
    rows = "".join(
        f'<tr><td class="claim">{claim.statement}</td>'
        f'<td class="verdict {"yes" if claim.verdict.startswith("holds") else "no"}">{claim.verdict}</td>'
        f'<td class="evidence">{claim.evidence}</td></tr>'
        for claim in table
    )
    return f"<div class='scroll'><table><tr><th>claim</th><th>holds?</th><th>evidence</th></tr>{rows}</table></div>"


def _bins_table(cases: SoftmaxCases) -> str:
    heads = (
        "KL(p||q), nats",
        "pairs",
        "median Var<sub>q</sub>[p/q]",
        "median Var<sub>q</sub>[p/E<sub>q</sub>q]",
        "shared varies less",
        f"shared has the smaller error, G = {GROUP_SIZE}",
    )
    rows = [heads] + [
        (
            f"{row.low:g} to {row.high:g}" if math.isfinite(row.high) else f"above {row.low:g}",
            f"{row.num_pairs:,}",
            f"{row.median_ordinary:.2g}",
            f"{row.median_shared:.2g}",
            f"{row.share_varies_less:.0%}",
            f"{row.share_smaller_error:.0%}",
        )
        for row in cases.bins()
    ]
    cells = ("".join(f'<td class="number">{cell}</td>' for cell in row) for row in rows)
    note = (
        "<p>The error is that of (1/G)&sum;wA as an estimate of E<sub>p</sub>[A], bias included, with a reward of 0 or "
        "1 less its mean under q.</p>"
    )
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>{note}"


def _numbers(findings: Findings, table: Sequence[Claim]) -> dict[str, Any]:
    return {
        "claims": [asdict(claim) for claim in table],
        "theorem_1": asdict(findings.first) | {"worst": findings.first.worst},
        "theorem_2": asdict(findings.second),
        "theorem_3": asdict(findings.third),
    }
