"""The language of pages, help texts, docstrings and comments of deployment: banned words, lengths, budgets."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.import_graph import modules

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path
    for pattern in ("*.md", "docs/*.md", "deploy/**/*.md", "examples/**/*.md", "benchmarks/*.md", "protos/**/*.md")
    for path in sorted(ROOT.glob(pattern))
}
BANNED = re.compile(
    r"\b(?:whoever|whatever|whichever|nobody|nothing\s+but|anew|under\s+way|beside|that\s+of|those\s+of|as\s+far\s+as"
    r"|but\s+for|at\s+hand|comes\s+of)\b",
    re.IGNORECASE,
)
COMMENTED = [
    path.relative_to(ROOT).as_posix()
    for pattern in (
        "Makefile", ".ci/run", ".github/workflows/*.yml", "requirements/vllm_lock.sh", "services/launch/units/*",
        "deploy/Dockerfile", "deploy/config/*.toml", "deploy/slurm/*.sbatch", "deploy/prometheus/targets/*",
        "deploy/**/*.yaml", "deploy/**/*.yml", "deploy/**/*.sh",
    )
    for path in sorted(ROOT.glob(pattern))
]  # fmt: skip
"""Files whose comments are read; other scripts of `requirements` are part of an environment's name."""
INVERTED = re.compile(r"(?:What|Of|Where) (?!.*\?$)")
"""Beginnings that put a clause before the subject; a question may have them."""
MOST_WORDS_OF_A_SENTENCE, MOST_WORDS_OF_A_FIRST_LINE, MOST_WORDS_OF_A_PAGE = 25, 12, 1000
MOST_DECISIONS = 25
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
BUDGETS = {
    "ARCHITECTURE.md": 2835,
    "CHANGELOG.md": 335,
    "CONTRIBUTING.md": 1060,
    "DECISIONS.md": 1440,
    "README.md": 795,
    "SECURITY.md": 300,
    "benchmarks/README.md": 3310,
    "deploy/README.md": 1320,
    "deploy/runbook.md": 1750,
    "docs/concepts.md": 995,
    "docs/configuration.md": 6170,
    "docs/environments.md": 1915,
    "docs/evaluation.md": 595,
    "docs/gpu.md": 530,
    "docs/index.md": 205,
    "docs/launch.md": 640,
    "docs/losses.md": 1575,
    "docs/machines.md": 850,
    "docs/map.md": 950,
    "docs/models.md": 820,
    "docs/operate.md": 3005,
    "docs/own-losses.md": 630,
    "docs/peers.md": 675,
    "docs/plan.md": 495,
    "docs/quickstart.md": 680,
    "docs/recipes.md": 1440,
    "docs/relay.md": 375,
    "docs/results.md": 645,
    "docs/rewards.md": 1485,
    "docs/scale.md": 760,
    "docs/security.md": 875,
    "docs/signatures.md": 495,
    "docs/trackers.md": 420,
    "docs/two-sites.md": 785,
    "docs/untrusted.md": 900,
    "docs/variants.md": 210,
    "docs/view.md": 345,
    "examples/README.md": 360,
    "examples/agent-program/README.md": 170,
    "examples/code-sandbox/README.md": 285,
    "examples/first-run/README.md": 185,
    "examples/gsm8k/README.md": 215,
    "examples/guess/README.md": 175,
    "examples/own-loss/README.md": 120,
    "examples/own-reward/README.md": 190,
    "examples/paper-math/README.md": 470,
    "examples/smollm2-sums/README.md": 395,
}
"""Words that a page may have, tables and code included, where that is not MOST_WORDS_OF_A_PAGE."""


def words(text: str) -> int:
    """The number of words: of what is between spaces, all that have a letter or a digit."""
    return sum(1 for word in text.split() if any(sign.isalnum() for sign in word))


def written(text: str) -> str:
    """A page without code and without the tables that programs make."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"<!-- table: .*?<!-- end of table -->", "", text, flags=re.DOTALL)


def sentences(text: str) -> Iterator[str]:
    """Sentences outside code, tables and headings; a colon and a semicolon end one too."""
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", written(text)):
        lines = [line for line in part.splitlines() if not line.startswith(("|", "#", "    ", "!["))]
        line = re.sub(r"^\s*(?:[-*]|\d+\.) ", "", " ".join(lines))
        line = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(line.split())).replace("**", "")
        yield from filter(None, re.split(r"(?<=[.!?:;])\s+", line))


def problems(text: str) -> list[str]:
    """The rules that a page breaks, each with its place."""
    found = [f"says {word!r}" for word in BANNED.findall(re.sub(r"`[^`\n]*`", "", written(text)))]
    for sentence in sentences(text):
        if INVERTED.match(sentence):
            found.append(f"begins with a clause: {sentence[:60]}")
        if words(sentence) > MOST_WORDS_OF_A_SENTENCE:
            found.append(f"has {words(sentence)} words: {sentence[:60]}")
    return found


def comments(text: str) -> Iterator[str]:
    """Comments, joined over lines, and the sentences of `make help`, units and alerts."""
    yield from (" ".join(re.findall(r"^ *#+ ?(.*)", block, re.MULTILINE)) for block in _blocks(text))
    yield from re.findall(r"^ *[^#\s].*?\s##? (.*)", text, re.MULTILINE)
    yield from re.findall(r"(?:^Description=|\bsummary: )(.*)", text, re.MULTILINE)


def _blocks(text: str) -> list[str]:
    """Runs of lines that are comments."""
    return re.findall(r"(?:^ *#(?!!).*\n)+", text, re.MULTILINE)


def problems_of_comments(text: str) -> list[str]:
    """The rules that a file's comments break."""
    found = []
    for comment in comments(text):
        plain = re.sub(r"`[^`\n]*`", "", comment)
        found += [f"says {word!r}: {comment[:60]}" for word in BANNED.findall(plain)]
        found += [
            f"begins with a clause: {one[:60]}" for one in re.split(r"(?<=[.!?])\s+", comment) if INVERTED.match(one)
        ]
    return found


def _is_command(node: ast.AST) -> bool:
    """Whether it is a function under `@app.command()`, whose docstring is its text of help."""
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and any(
        "command" in ast.unparse(decorator) for decorator in node.decorator_list
    )


def _first_paragraph(docstring: str) -> tuple[str, str]:
    """The first paragraph of a docstring on one line, and its first sentence."""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return paragraph, re.split(r"(?<=[.!?])\s", paragraph)[0]


def problems_of_source(source: str) -> list[str]:
    """The rules that a source's docstrings or its help texts break."""
    tree = ast.parse(source)
    paragraph, first = _first_paragraph(ast.get_docstring(tree) or "")
    helps = [
        node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "help" and isinstance(node.value, ast.Constant)
    ]
    helps += [ast.get_docstring(node) or "" for node in ast.walk(tree) if _is_command(node)]
    found = [f"says {word!r}: {text}" for text in (paragraph, *map(str, helps)) for word in BANNED.findall(text)]
    documented = (node for node in ast.walk(tree) if isinstance(node, DOCUMENTED))
    for docstring in (ast.get_docstring(node) or "" for node in documented):
        lines = {docstring.partition("\n")[0], _first_paragraph(docstring)[1]}
        found += [f"has {words(line)} words: {line}" for line in lines if words(line) > MOST_WORDS_OF_A_FIRST_LINE]
    return found + ([f"begins with a clause: {first}"] if INVERTED.match(first) else [])


def problems_of_folders() -> dict[str, list[str]]:
    """Every folder of `services` with problems."""
    found: dict[str, list[str]] = {}
    for path in modules().values():
        name = path.relative_to(ROOT).as_posix()
        for problem in problems_of_source(path.read_text(encoding="utf-8")):
            found.setdefault(path.parent.relative_to(ROOT).as_posix(), []).append(f"{name}: {problem}")
    return found


@pytest.mark.parametrize("name", PAGES)
def test_a_page_keeps_the_language(name):
    assert problems(PAGES[name].read_text(encoding="utf-8")) == []


def test_pages_keep_their_budgets():
    counts = {name: words(path.read_text(encoding="utf-8")) for name, path in PAGES.items()}
    budgets = {name: BUDGETS.get(name, MOST_WORDS_OF_A_PAGE) for name in counts}

    long = [f"{name}: {count} words of {budgets[name]}" for name, count in counts.items() if count > budgets[name]]
    assert long == [], f"shorten them, or raise BUDGETS for a new subject: {'; '.join(long)}"
    assert BUDGETS.keys() - counts.keys() == set()


def test_docstrings_and_help_texts_keep_the_language():
    found = [problem for folder in problems_of_folders().values() for problem in folder]

    # pytest shows a message whole, and of a comparison only the beginning.
    assert found == [], "\n".join(found)


@pytest.mark.parametrize("folder", ["benchmarks", "campaigns"])
def test_first_paragraphs_of_measurements_keep_the_language(folder):
    found = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        text = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n\n")[0]
        if BANNED.search(text) or INVERTED.match(text):
            found[path.relative_to(ROOT).as_posix()] = text

    assert found == {}


@pytest.mark.parametrize("name", COMMENTED)
def test_comments_and_help_sentences_keep_the_language(name):
    assert problems_of_comments((ROOT / name).read_text(encoding="utf-8")) == []


def test_each_decision_has_its_four_parts_in_eight_lines():
    entries = [entry for entry in (ROOT / "DECISIONS.md").read_text("utf-8").split("\n\n") if entry.startswith("**")]

    assert len(entries) <= MOST_DECISIONS
    assert [entry for entry in entries if len(entry.strip().splitlines()) > 8] == []
    for part in ("We chose", "Because:", "Price:", "Would change if:"):
        assert [entry for entry in entries if part not in " ".join(entry.split())] == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("The learner publishes. Why? Because samplers pull.", 0),
        ("What is pulled is verified.", 1),
        ("What is pulled?", 0),
        ("Nobody waits, whatever happens.", 2),
        ("- one\n- Of two, the first.", 1),
        ("word " * 25 + "end.", 1),
        ("```\nnobody\n```\n`beside`", 0),
        ("| beside |\n|---|\n", 1),
        ("<!-- table: a -->\n| beside |\n<!-- end of table -->", 0),
    ],
)
def test_the_check_of_words_sees_what_is_wrong(text, count):
    assert len(problems(text)) == count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("# Two lines\n# of one comment.\n", 0),
        ("# Two lines. What is\n# inverted.\n", 1),
        ("run: $(SETUP)  ## Run it beside a loop\n", 1),
        ("Description=whatever\n    # under way\n", 2),
        ("key = 1  # of nobody\nurl = 'beside#whatever'\n", 1),
    ],
)
def test_the_check_of_comments_sees_what_is_wrong(text, count):
    assert len(problems_of_comments(text)) == count


def test_the_check_of_sources_sees_what_is_wrong():
    assert problems_of_source('"""The queue of groups."""') == []
    assert len(problems_of_source('"""What the queue is."""')) == 1
    assert len(problems_of_source(f'"""{"word " * 13}."""')) == 1
    assert len(problems_of_source(f'"""{"word " * 7}. {"word " * 7}."""')) == 1
    assert len(problems_of_source(f'"""{"word " * 7}.\n\n{"word " * 13}."""')) == 0
    assert len(problems_of_source('"""A."""\nOption(help="Whatever you like.")')) == 1
    for head in ("def f():", "async def f():", "class C:", "class C:\n  def f(self):"):
        assert problems_of_source(f'{head}\n    """{"word " * 12}."""') == []
        assert len(problems_of_source(f'{head}\n    """{"word " * 13}."""')) == 1
        assert len(problems_of_source(f'{head}\n    """{"word " * 7}. {"word " * 7}."""')) == 1
        assert len(problems_of_source(f'{head}\n    """{"word " * 7}\n    {"word " * 7}."""')) == 1
        assert problems_of_source(f'{head}\n    """{"word " * 7}.\n    {"word " * 13}."""') == []
        assert problems_of_source(f'{head}\n    """{"word " * 7}.\n\n    {"word " * 13}."""') == []
    assert problems_of_source("def f():\n    return 1") == []
