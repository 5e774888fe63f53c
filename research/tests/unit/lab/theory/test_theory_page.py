"""The page: whole, self-contained and the same bytes for the same seed."""

from __future__ import annotations

import inspect
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from heterorl_research.lab.theory.claims import find
from heterorl_research.lab.theory.page import main, write_page

NEVER_CLOSED = {"meta", "img", "br"}


class Balance(HTMLParser):
    """Fails on a closing tag that does not match, and keeps what is left open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in NEVER_CLOSED:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(tmp_path_factory.mktemp("theory"), seed=3, num_trials=600)


def test_page_is_balanced_html_without_holes(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    parser = Balance()

    parser.feed(text)

    assert parser.open == []
    assert "http" not in text
    assert not re.search(r"\b(nan|inf|None)\b", text)
    assert not re.search(r"[{}]", text.split("</style>")[1])


def test_table_names_every_claim_and_its_verdict(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    rows = json.loads((page.parent / "theory.json").read_text(encoding="utf-8"))["claims"]

    verdicts = [row["verdict"] for row in rows]
    assert sum(verdict.startswith("false") for verdict in verdicts) == 7
    assert sum(verdict.startswith("holds") for verdict in verdicts) == 6
    assert len(rows) == 13
    for row in rows:
        assert row["statement"] in text
        assert row["evidence"] in text


def test_same_seed_gives_the_same_bytes(page: Path, tmp_path: Path) -> None:
    write_page(tmp_path, seed=3, num_trials=600)

    names = sorted(path.name for path in page.parent.iterdir())
    assert names == sorted(path.name for path in tmp_path.iterdir())
    for name in names:
        assert (page.parent / name).read_bytes() == (tmp_path / name).read_bytes(), name


def test_every_check_depends_on_the_seed() -> None:
    one, two = find(seed=3, num_trials=600), find(seed=4, num_trials=600)

    assert one.first != two.first
    assert one.second != two.second
    assert one.third != two.third
    assert one.softmax.forward.tolist() != two.softmax.forward.tolist()


def test_page_reports_the_checks_of_its_seed(page: Path) -> None:
    numbers = json.loads((page.parent / "theory.json").read_text(encoding="utf-8"))
    first = find(seed=3, num_trials=600).first

    assert numbers["theorem_1"]["worst"] == first.worst
    assert f"{first.worst:.4f}" in page.read_text(encoding="utf-8")


def test_too_few_trials_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 100"):
        write_page(tmp_path, seed=0, num_trials=99)


def test_main_takes_a_folder_and_a_seed() -> None:
    assert list(inspect.signature(main).parameters) == ["out", "seed"]
