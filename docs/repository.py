"""A hook of MkDocs: the site also holds the files of the repository that its pages link to.

A page links to a file by its path in the repository, so that the link works where the file is read as text too. A
Markdown file outside docs/ that the navigation names is a page of the site; any other file is copied as it is.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = (
    "ARCHITECTURE.md",
    "benchmarks/README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "DECISIONS.md",
    "SECURITY.md",
    "deploy/README.md",
    "deploy/runbook.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").rglob("README.md")),
    "research/README.md",
    "research/losses/README.md",
    *sorted(f"research/docs/{path.name}" for path in (ROOT / "research" / "docs").glob("*.md")),
)
"""Markdown outside docs/ that is read as a page."""
WIDE = {"research/docs/claims.md", "configuration.md", "losses.md", "map.md", "peers.md", "plan.md", "results.md"}
"""Pages whose tables need the room of the table of contents."""
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)(#[^)\s]*)?(\))")
"""A link of Markdown: what stands before the target, the path, the fragment, the end."""


CELL = re.compile(r"<td.*?</td>", re.DOTALL)
CODE = re.compile(r"<code>.*?</code>", re.DOTALL)
UNIT = re.compile(r"(?<=\d) (?=(?:%|m?s|min|[kMG]B(?:/s)?)[,<])")
"""The space between a number and its unit, which end a cell or stand before a comma."""
NUMBER = re.compile(r"[-+]?\d*\.?\d+\s\+-\s\d*\.?\d+|\d[\d.]*e-\d+")
"""An interval or a number with an exponent: browsers break a line after a hyphen."""
CODE_OR_TAG = re.compile(r"<(pre|code)\b.*?</\1>|<[^>]*>", re.DOTALL)
TOGETHER = re.compile(r"(?<=\d) (?:of|to) (?=[-+]?\d)|(?<=\bworst) (?=[-+]?\d)|(?<=&lt;) (?=\d)")
"""Spaces inside a result in a table: a share, the worst seed, a bound."""
PICTURE = re.compile(r'<p>(<img [^>]*src="([^"]+)"[^>]*>)</p>')
JOINT = re.compile(r"(?<=\w[._/+])(?=\w)")
"""A place in a key or a path where a narrow column may break it."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/, and every file that any page links to."""
    for name in PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for page in list(files.documentation_pages()):
        for _, target, _, _ in LINK.findall(page.content_string):
            name = _name(page.src_uri, target)
            if name is not None and not name.startswith("docs/") and name not in PAGES and name not in files.src_uris:
                files.append(File.generated(config, name, content=_bytes(page.src_uri, name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Rewrite links from places in the repository to places on the site."""
    here = Path(page.file.src_uri).parent
    if page.file.src_uri in WIDE:
        page.meta["hide"] = ["toc"]

    def site(match: re.Match[str]) -> str:
        before, target, fragment, after = match.groups()
        name = _name(page.file.src_uri, target)
        if name is None:
            return match[0]
        place = os.path.relpath(name.removeprefix("docs/"), here)
        return f"{before}{place}{fragment or ''}{after}"

    return LINK.sub(site, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Show a bar in code of a table without the backslash that GitHub needs.

    Long keys in a table may break, a number keeps its unit and its interval, and a picture leads to its full size.
    """

    def shown(cell: re.Match[str]) -> str:
        text = UNIT.sub("&nbsp;", cell[0].replace("\\|", "|"))
        text = TOGETHER.sub(lambda spaces: spaces[0].replace(" ", "&nbsp;"), text)
        return CODE.sub(lambda code: JOINT.sub("<wbr>", code[0]), text)

    return PICTURE.sub(r'<p><a class="picture" href="\2">\1</a></p>', _with_whole_numbers(CELL.sub(shown, html)))


def _with_whole_numbers(html: str) -> str:
    """Mark numbers of the text that no line may break."""
    parts, end = [], 0
    for mark in CODE_OR_TAG.finditer(html):
        parts += [NUMBER.sub(r'<span class="number">\g<0></span>', html[end : mark.start()]), mark[0]]
        end = mark.end()
    return "".join([*parts, html[end:]])


def _name(page: str, target: str) -> str | None:
    """The path in the repository that a page's link means; None for a link to another host."""
    if "://" in target or target.startswith("mailto:"):
        return None
    source = Path(page) if page in PAGES else Path("docs", page)
    return os.path.normpath(source.parent / target)


def _bytes(page: str, name: str) -> bytes:
    path = ROOT / name
    if name.startswith("..") or not path.is_file():
        raise PluginError(f"{page} links to {name}, which is no file of the repository")
    return path.read_bytes()
