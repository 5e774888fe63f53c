"""What every page about a run shares: head and style, cards of numbers, and what to look for in each picture."""

from __future__ import annotations

HEAD = """<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">"""
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 66rem; margin: 2rem auto; padding: 0 1rem; color: #1c2733 }
h1 { margin-bottom: 0; line-height: 1.2 } .lead, .note { color: #51606e; margin-top: .2rem } .note { font-size: .9rem }
.numbers { display: grid; gap: .8rem; margin: 1.5rem 0 }
.number { border: 1px solid #d8dee4; border-radius: .5rem; padding: .7rem 1rem }
.remark { background: #fff1dc; border-left: .3rem solid #e08a2e; padding: .5rem 1rem }
.number b { display: block; font-size: 1.4rem; line-height: 1.3 } .number span { color: #51606e; font-size: .85rem }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(27rem, 100%), 1fr)); gap: 0 1.5rem }
.pictures h2 { font-size: 1.15rem; margin: 1.2rem 0 .3rem } .pictures .note { margin: .2rem 0 .6rem }
img { width: 100%; border: 1px solid #d8dee4; border-radius: .5rem }
.scroll { overflow-x: auto } table { border-collapse: collapse; margin: .5rem 0 1.5rem }
th, td { padding: .25rem .9rem; text-align: right } th:first-child, td:first-child { text-align: left }
td { border-top: 1px solid #d8dee4 }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(14rem, 1fr)); gap: .3rem 1.5rem }
.facts div { border-top: 1px solid #d8dee4; padding: .25rem 0; overflow-wrap: anywhere }
.facts span { color: #51606e; font-size: .85rem; display: block }
pre { overflow-x: auto; background: #f5f7f9; padding: .7rem 1rem; border-radius: .5rem; font-size: .85rem }
@media (max-width: 40rem) { body { margin: 1rem auto }
  .numbers { grid-template-columns: 1fr 1fr !important; gap: .5rem } .number { padding: .5rem .7rem }
  .number:last-child:nth-child(odd) { grid-column: span 2 } .number b { font-size: 1.15rem }
  th, td { padding: .25rem .5rem } }
"""
CARDS = """<div class="numbers" style="grid-template-columns: repeat({{ columns }}, 1fr)">
{% for label, value in numbers %}<div class="number"><b>{{ value }}</b><span>{{ label }}</span></div>{% endfor %}</div>
"""
PICTURES = """<div class="pictures">{% for title, note, data in pictures %}<section><h2>{{ title }}</h2>
<img alt="{{ title }}" src="data:image/png;base64,{{ data }}"><p class="note">{{ note }}</p></section>
{% endfor %}</div>
"""
NOTES = {
    "accuracy": "Look for a line that rises and stays up. A reward that rises while that of held-out prompts falls is "
    "no progress; a late fall of both is a collapse.",
    "staleness": "Look for a level line below the coordinator's bound (max_staleness_versions): what is older is "
    "dropped. A line that rises means that sites fall behind.",
    "kl": "How far the policies that wrote the answers are from the one that learns. Small and level is good; a climb "
    "without end announces a collapse.",
    "iw_variance": "Of the weights that correct for staleness; their mean is about 1. 0: none was needed. Well above "
    "1: a few answers decide each step.",
    "ess": "1: every answer counts alike. 0.5: half of the batch is wasted. Near 0: single answers decide, and steps "
    "become noise.",
    "bytes": "The gap between the lines is what deltas save on the link. Single peaks are snapshots.",
    "progress": "Straight is steady. A flat part is a pause: an outage, a restart, or no groups to train on.",
    "sites": "Dropped groups were too old, too many, or failed a check: the ledger below says which.",
}
"""Under each picture: what to look for."""


def columns_of(count: int) -> int:
    """Columns in which so many cards leave no single one in the last row; 3 to 5."""
    return min((3, 4, 5), key=lambda columns: (count % columns == 1, (-count) % columns, abs(columns - 4)))
