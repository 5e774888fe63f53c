"""Pages for users have plain words and short sentences."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{name}.md" for name in (
        "index", "quickstart", "two-sites", "concepts", "recipes", "models", "scale", "rewards", "environments",
        "losses", "own-losses", "evaluation", "view", "trackers", "results", "peers", "glossary",
    )),
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").glob("**/README.md")),
]  # fmt: skip
UNPLAIN = re.compile(
    r"\b(whoever|whatever|whichever|nobody|nothing but|anew|under way|beside|that of|those of|as far as|but for"
    r"|at hand|comes of)\b",
    re.IGNORECASE,
)
MOST_WORDS = 28
"""Of a sentence. Code, tables and links' addresses do not count."""


def _prose(text: str) -> str:
    text = re.sub(r"^```.*?^```|^\|.*$|^#.*$|<!--.*?-->|^!\[.*?\]\(.*?\)", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"\]\([^)]*\)", "]", text)


def _sentences(text: str) -> list[str]:
    parts = re.split(r"\n\s*\n|\n(?:- |\d+\. |:   )", _prose(text))
    return [one for part in parts for one in re.split(r"(?<=[.!?:;])\s+", " ".join(part.split())) if one]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_plain_words_and_short_sentences(name):
    text = (ROOT / name).read_text(encoding="utf-8")

    assert UNPLAIN.findall(re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)) == []
    assert [one for one in _sentences(text) if len(one.split()) > MOST_WORDS] == []


@pytest.mark.parametrize("text", ["It stands beside the file.", "word " * 29 + "end."])
def test_words_and_sentences_that_are_not_plain_are_found(text):
    assert UNPLAIN.findall(text) or [one for one in _sentences(text) if len(one.split()) > MOST_WORDS]
