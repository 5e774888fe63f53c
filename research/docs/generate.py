"""Makes the page of claims, and the tables of experiments in pages of this folder, in README.md and in docs/results.md.

python -m research.docs.generate writes them from committed results; tests compare them with what they are made of. What
`heterorl lab claims` writes has to be there first.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from docs.markdown import fill
from heterorl_research.lab.claims.claim import LEVEL, WORTH_FINDING
from heterorl_research.lab.claims.verdicts import markdown
from heterorl_research.lab.protocol.flat import TOLERANCE
from research.docs.fast_tables import FAST
from research.docs.lab_tables import LAB, RESULTS
from research.docs.one_page import ONE_PAGE

CLAIMS = Path(__file__).parent / "claims.md"
DOCUMENTS = (
    "README.md",
    "docs/results.md",
    "research/docs/results.md",
    "research/docs/delays.md",
    "research/docs/lengths.md",
    "research/docs/earlier.md",
    "research/docs/one-side.md",
    "research/docs/whole.md",
    "research/docs/stale-2026.md",
)
TABLES = {**LAB, **FAST, **ONE_PAGE}
"""What a marker of these documents may name, and what is written there."""
_ORDER = ("shown", "contradicted", "suggested", "doubted", "not shown", "not tested")
_CLAIMS_HEAD = f"""# Claims

This page compares claims about algorithms under delay with the lab's results. The claims are of the paper ([arXiv
2508.17850](https://arxiv.org/abs/2508.17850)), of this project's README, and the project's own proposals. `heterorl lab
claims` computes [claims.json](../results/claims.json) from the results next to it, and `make docs` makes this page of
claims.json. The claims and their tests stand in `research/lab/claims/`; no verdict is written by hand.

- *Difference*: a test compares two numbers on the same seeds. The difference is their mean with the 95 % t-interval. A
  claim about a share of the seeds has Wilson's interval instead.
- *p, Holm*: the p of the paired t-test against the border of the claim, or of an exact binomial test of a share. It is
  corrected by Holm over all tests of one question, in all experiments. Tests on exploratory evidence are
  corrected apart.
- *Shown* and *contradicted* need a corrected p below {LEVEL:g} on evidence that is not exploratory. *Suggested* and
  *doubted* are the same on exploratory evidence: a reason for a test, not a result.
- *Not shown* says that neither can be said. *Not tested* says that there are no results.

The evidence of a row is one of three kinds:

- *Protocol*: the runs kept a [protocol](protocol.md). *Relaxed* names each rule of that page that these runs keep in a
  weaker form: fewer seeds, fewer steps for the delay, fewer prompts, or one learning rate for all rules (*one rate*, or
  the rate of another rule) in place of one that was chosen for each. A verdict on relaxed evidence is weaker
  than its p.
- *Confirmation*: the runs are on seeds that are held out for that.
- *Exploratory*: the runs kept no protocol, or are of fewer seeds than their protocol asks for or than five, or the very
  seeds of the test suggested the claim.

A learning rate at an end of its grid is noted. Runs that failed have no number, on either side; their seeds are in no
difference. A run whose loss was not finite has not failed: it has collapsed, and its last accuracy is 0. On the task of
three-digit addition completions have five tokens; a row on another task says so.

The file has more of each row: who says it, the test in symbols, p before correction, and

- the exact sign-flip p, which five seeds cannot bring below 0.0625;
- the power: the chance that so many pairs of this spread find a difference of {WORTH_FINDING:g}, before correction;
- whether both methods, without delay, neither rise nor fall by more than {TOLERANCE:g} over the last quarter of their
  steps, with 95 % confidence. Where they are not flat, the order may still turn.

Some rows are of the same runs and are no second evidence: the upper half of GEPO's clip in `clips` and gepo-1s in
`horizon`; 101 tokens 64 versions behind in `lengths` and in `long`.

The paper's claims were made for larger models and longer outputs.
"""


def render_claims() -> str:
    """The whole page about claims, from the verdicts that are committed."""
    rows = json.loads((RESULTS / "claims.json").read_bytes())
    counts = Counter(row["verdict"] for row in rows)
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in _ORDER)
    decided = [row for row in rows if row["verdict"] in {"shown", "contradicted"}]
    strict = sum(not row["relaxed"] for row in decided)
    flat = sum(row["is_flat_online"] is True for row in rows)
    return (
        f"{_CLAIMS_HEAD}\n{len(rows)} claims: {summary}.\n\n"
        f"- Of the {len(decided)} that are shown or contradicted, {strict} relax no rule of the protocol.\n"
        f"- Rows whose curves without delay are flat at the end: {flat}.\n\n{markdown(rows)}"
    )


if __name__ == "__main__":
    CLAIMS.write_text(render_claims(), encoding="utf-8")
    fill(DOCUMENTS, TABLES)
