"""What a list shows: filters, a search and a place in it, read from a URL and written to one."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode

from heterorl.common.errors import OperatorError
from heterorl.common.types.rollout import DropReason
from heterorl.common.types.sample import CONSUMED, EVALUATED

MAX_TEXT = 200
"""Characters of a search."""
MAX_FIELDS = 20
MAX_FIELD = 500
LARGEST = (1 << 63) - 1
"""What SQLite's integers hold."""
ANY_DROP = "dropped"
"""Whatever was not trained on, for any reason."""
FATES = (CONSUMED, EVALUATED, ANY_DROP, *(reason.value for reason in DropReason))
_WORDS = {CONSUMED: "trained on", EVALUATED: "held-out", ANY_DROP: "dropped, any reason"}


class BadQuery(OperatorError):
    """A part of a URL cannot be used; `name` is its field."""

    def __init__(self, name: str, problem: str, *, action: str) -> None:
        self.name = name
        super().__init__(f"{name}: {problem}", action=action)


def fate_words(fate: str) -> str:
    """A fate as people say it.

    Example: fate_words("reward_mismatch") is "reward mismatch".
    """
    return _WORDS.get(fate, fate.replace("_", " "))


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Which samples are wanted, and where in their list; what is empty or None excludes nothing.

    A reward range means samples with a completion of at least `reward_from` and one of at most `reward_to`.

    Example: Query(text="wait", site="eu-1", fate="dropped", truncated=True)
    """

    text: str = ""
    """Part of a prompt or of a completion; large and small letters are the same."""
    site: str = ""
    fate: str = ""
    """One of FATES."""
    version_from: int | None = None
    version_to: int | None = None
    reward_from: float | None = None
    reward_to: float | None = None
    truncated: bool | None = None
    """Whether a completion reached the length limit."""
    lost: bool | None = None
    """Whether a member of the group was lost."""
    before: int = 0
    """Samples with smaller ids only, the largest first; 0: all."""
    after: int = 0
    """Samples with larger ids only, the nearest ones; 0: all."""

    @property
    def is_filtered(self) -> bool:
        """Whether anything is excluded."""
        return self.at() != Query()

    def at(self, *, before: int = 0, after: int = 0) -> Query:
        """The same samples from another place."""
        return dataclasses.replace(self, before=before, after=after)

    def url(self, path: str = "/") -> str:
        """The address of the page at `path` that keeps this query."""
        said = {name: value for name, value in dataclasses.asdict(self).items() if value != _DEFAULTS[name]}
        pairs = {name: ("yes" if value else "no") if isinstance(value, bool) else value for name, value in said.items()}
        return f"{path}?{urlencode(pairs)}" if pairs else path


_DEFAULTS = dataclasses.asdict(Query())


def parse_query(text: str) -> Query:
    """Read the part of a URL behind its question mark; fields that are unknown are ignored.

    Raises:
        BadQuery: a field has a value that it cannot have.
    """
    try:
        fields = dict(parse_qsl(text, max_num_fields=MAX_FIELDS))
    except ValueError:
        raise BadQuery("URL", f"more than {MAX_FIELDS} fields", action="start again from the list") from None
    for name, value in fields.items():
        if len(value) > (MAX_TEXT if name == "text" else MAX_FIELD):
            raise BadQuery(name[:MAX_FIELD], "too long", action=f"a search has at most {MAX_TEXT} characters")
    fate = fields.get("fate", "")
    if fate and fate not in FATES:
        raise BadQuery("fate", "unknown", action=f"one of {', '.join(FATES)}")
    return Query(
        text=fields.get("text", "").encode("utf-8", "replace").decode("utf-8"),
        site=fields.get("site", "").encode("utf-8", "replace").decode("utf-8"),
        fate=fate,
        version_from=_whole(fields, "version_from"),
        version_to=_whole(fields, "version_to"),
        reward_from=_number(fields, "reward_from"),
        reward_to=_number(fields, "reward_to"),
        truncated=_choice(fields, "truncated"),
        lost=_choice(fields, "lost"),
        before=_whole(fields, "before") or 0,
        after=_whole(fields, "after") or 0,
    )


def _choice(fields: dict[str, str], name: str) -> bool | None:
    text = fields.get(name, "")
    if text not in ("", "yes", "no"):
        raise BadQuery(name, "unknown", action="yes, no or empty")
    return {"yes": True, "no": False}.get(text)


def _whole(fields: dict[str, str], name: str) -> int | None:
    text = fields.get(name, "").strip()
    if not text:
        return None
    try:
        value = int(text) if len(text) <= 20 and text.isascii() else LARGEST + 1
    except ValueError:
        value = LARGEST + 1
    if not 0 <= value <= LARGEST:
        raise BadQuery(name, "no whole number from 0", action="for example 120")
    return value


def _number(fields: dict[str, str], name: str) -> float | None:
    text = fields.get(name, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadQuery(name, "no number", action="for example 0.5")
    return value
