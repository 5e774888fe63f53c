"""What the documents name exists: paths, modules, links, words; and the pages that are made are the sources'."""

import ast
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path, PurePosixPath

import pytest
from typer.main import get_command

from docs import generate, house, reference
from docs.repository import LINK, on_page_content
from heterorl.cli.main import app

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in (".", "docs", "deploy", "examples", "examples/*", "benchmarks", "research", "research/*")
    for path in ROOT.glob(f"{folder}/*.md")
    if path.name not in {"CHANGELOG.md", "configuration.md"}
)
MODULE = re.compile(r"heterorl(?:_research)?(?:\.[A-Za-z_]\w*)+")
PATH = re.compile(r"[\w@.-]*[\w@-]/?(?:/[\w@.-]+)*/?")
SOURCES = (".py", ".proto", ".sh")
OURS = {
    "services",
    "tests",
    "campaigns",
    "docs",
    "deploy",
    "benchmarks",
    "protos",
    "requirements",
    "research",
    "examples",
    "src",
}
ON_A_NODE = {"larger.py", "larger.score", "mytask.rewards"}
"""What a reader's own directories hold, and no folder of the repository."""


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@cache
def _files() -> tuple[PurePosixPath, ...]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    return tuple(PurePosixPath(name) for name in listed if (ROOT / name).exists())


def _ticked(text: str) -> set[str]:
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return {word for span in re.findall(r"`([^`\n]+)`", outside) for word in span.split()}


def _has_module(name: str) -> bool:
    package, *parts = name.split(".")
    place = ROOT / {"heterorl": "services", "heterorl_research": "research"}[package]
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    if parts and (place / f"{parts[0]}.py").is_file():
        place = place / f"{parts.pop(0)}.py"
    elif parts and place.name == "v1":
        return True
    if not parts:
        return True
    source = place / "__init__.py" if place.is_dir() else place
    tree = ast.parse(source.read_text(encoding="utf-8"))
    return bool(parts[1:]) or parts[0] in {
        target.id if isinstance(target, ast.Name) else getattr(node, "name", "")
        for node in tree.body
        for target in (getattr(node, "targets", None) or [getattr(node, "target", node)])
    }


def _problem(word: str) -> str | None:
    """What is wrong with a word in back-ticks; None where it names nothing of ours, or names it rightly."""
    word = word.strip("().,;:")
    if MODULE.fullmatch(word):
        return None if word.endswith(".toml") or _has_module(word) else "no module has this name"
    if not PATH.fullmatch(word) or word in ON_A_NODE:
        return None
    path = PurePosixPath(word)
    is_source = path.suffix in SOURCES
    if not is_source and path.parts[0] not in OURS:
        return None
    if not is_source and len(path.parts) == 1 and not word.endswith("/"):
        return None
    if (ROOT / path).exists():
        return None
    found = [file for file in _files() if file.parts[-len(path.parts) :] == path.parts]
    if len(found) == 1 or (is_source and path.parts[0] == "common" and len(found) == 1):
        return None
    return "no file has this name" if not found else f"{len(found)} files have this name: {', '.join(map(str, found))}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_path_and_module_in_back_ticks_exists(name):
    here = (ROOT / name).parent
    # A page of an example may name the files beside it.
    wrong = {
        word: problem
        for word in _ticked(_text(name))
        if (problem := _problem(word)) and not (here / word.strip("().,;:")).is_file()
    }

    assert wrong == {}


@pytest.mark.parametrize(
    ("word", "is_wrong"),
    [
        ("coordinator/core.py", False),
        ("heterorl.coordinator.core", False),
        ("heterorl.coordinator.core.Coordinator", False),
        ("heterorl_research.lab.cell.Cell", False),
        ("examples/first-run", False),
        ("coordinator.toml", False),
        ("runs/demo/report.html", False),
        ("coordinator/servicer.py", True),
        ("data.py", True),
        ("heterorl.coordinator.shelf", True),
        ("heterorl.coordinator.core.Shelf", True),
        ("examples/second-run", True),
    ],
)
def test_the_check_of_names_sees_what_is_wrong(word, is_wrong):
    assert (_problem(word) is not None) == is_wrong


def _anchors(text: str) -> set[str]:
    titles = re.findall(
        r"^#+ +(.+?) *$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_link_to_a_file_or_heading_leads_there(name):
    wrong = []
    for _, target, fragment, _ in LINK.findall(_text(name)):
        if "://" in target or target.startswith("mailto:"):
            continue
        file = (ROOT / name).parent / target
        if not file.exists() or (fragment and fragment[1:] not in _anchors(file.read_text(encoding="utf-8"))):
            wrong.append(target + fragment)

    assert wrong == []


def test_readme_fits_on_two_screens_and_is_ascii():
    text = _text("README.md")

    assert len(text.splitlines()) <= 120
    assert text.isascii()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_are_ascii(name):
    assert _text(name).isascii()


def test_map_is_the_packages_own_words():
    assert generate.MAP.read_text(encoding="utf-8") == generate.render_map(), "run make docs"


def test_picture_of_imports_is_of_the_code():
    assert house.PATH.read_text(encoding="utf-8") == house.render(), "run make docs"


def test_a_folder_stands_above_what_it_imports():
    assert house.floors({"a": {"b", "d"}, "b": {"c"}, "c": set(), "d": {"c"}}) == [["c"], ["b", "d"], ["a"]]


def test_map_has_every_package():
    shown = set(re.findall(r"^\| `(services/[\w/]*)` ", generate.render_map(), re.MULTILINE))
    packages = {f"{file.parent}" for file in _files() if file.name == "__init__.py" and file.parts[0] == "services"}

    assert {name.rstrip("/") for name in shown} == packages - {"services/v1"}


def test_words_of_concepts_are_explained_once_and_are_the_codes():
    terms = re.findall(r"\*\*([^*]+)\*\*", _text("docs/concepts.md"))
    code = " ".join((ROOT / file).read_text(encoding="utf-8").lower() for file in _files() if file.suffix == ".py")

    assert len(terms) >= 40
    assert len(terms) == len(set(terms))
    assert [
        term for term in terms if term.lower().replace("-", " ") not in code.replace("-", " ").replace("_", " ")
    ] == []


def _code(text: str) -> str:
    """Blocks and back-ticked words, one a line; a sentence around them is no command."""
    fence = re.compile(r"^```.*?\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
    spans = re.findall(r"`([^`]+)`", fence.sub("", text))
    return "\n".join([*fence.findall(text), *(" ".join(span.split()) for span in spans)])


def _commands() -> dict[str, set[str]]:
    """Each command of the console script, with its group, and its options."""
    found = {}

    def walk(command, name):
        found[name] = {option for parameter in command.params for option in parameter.opts}
        for below, sub in getattr(command, "commands", {}).items():
            walk(sub, f"{name} {below}")

    walk(get_command(app), "heterorl")
    return found


def _wrong_commands(text: str) -> list[str]:
    known = _commands()
    wrong = []
    for line in _code(text).splitlines():
        for words, rest in re.findall(r"(?:^|[\s/(])(heterorl(?: +[a-z][a-z-]+)+)([^#|&<>;`]*)", line):
            command = " ".join(words.split())
            while command not in known:
                command = command.rpartition(" ")[0]
            if command == "heterorl":
                wrong.append(words)
            wrong += [option for option in re.findall(r"--[a-z][a-z-]+", rest) if option not in known[command]]
    return wrong


def _wrong_targets(text: str) -> set[str]:
    targets = set(re.findall(r"^([a-z0-9-]+):.*##", _text("Makefile"), re.MULTILINE))
    commands = re.sub(r"#.*", "", _code(text))
    return set(re.findall(r"(?:^|[\s(])make ([a-z][a-z0-9-]*)", commands, re.MULTILINE)) - targets


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_command_option_and_make_target_exists(name):
    assert _wrong_commands(_text(name)) == []
    assert _wrong_targets(_text(name)) == set()


def test_the_check_of_commands_sees_what_is_wrong():
    assert _wrong_commands("```\nheterorl sights\n```\n`heterorl top --fast`") == ["heterorl sights", "--fast"]
    assert _wrong_commands("`heterorl sites release SITE --reason TEXT`") == []
    assert _wrong_targets("`make demo` and `make cake`") == {"cake"}


def test_keys_beside_those_of_other_libraries_are_keys_of_ours():
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \| [^|]+ \| [^|]+ \| [^|]+ \|$", _text("docs/peers.md"), re.MULTILINE)
    named = {key.split(" ")[0] for cell in rows for key in re.findall(r"`([^`]+)`", cell)}
    # The reference writes a list of tables with single brackets.
    named = {key.replace("[[", "[").replace("]]", "]") for key in named}
    ours = {
        f"{section.path}.{key.name}".lstrip(".")
        for schema in reference.SERVICES.values()
        for section in reference.sections(schema)
        for model in section.models.values()
        for key in reference.keys(model)
    }

    assert named - ours - {"cap"} == set()
    assert len(named) > 30


def test_site_builds_without_a_broken_link(tmp_path):
    mkdocs = Path(sys.executable).parent / "mkdocs"
    if not mkdocs.exists() and shutil.which("mkdocs") is None:
        pytest.skip("mkdocs is not installed here")

    done = subprocess.run(
        [mkdocs, "build", "--strict", "--site-dir", tmp_path / "site"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    # Offline: a page loads scripts, styles and fonts from its own site alone.
    loaded = re.findall(r"""<(?:script|link|img)[^>]+(?:src|href)=["']?(https?:[^"'\s>]+)""", page)
    assert loaded == []


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("<td><code>a.b_c</code></td>", "<td><code>a.<wbr>b_<wbr>c</code></td>"),
        (r"<td><code>a \| b</code></td>", "<td><code>a | b</code></td>"),
        ("<td>0.75 GB/s, 12 %</td>", "<td>0.75&nbsp;GB/s, 12&nbsp;%</td>"),
        (
            "<td>worst -0.1, 3 of 16 (-0.1 to +0.2)</td><td>&lt; 0.001</td><p>3 of 16</p>",
            "<td>worst&nbsp;-0.1, 3&nbsp;of&nbsp;16 (-0.1&nbsp;to&nbsp;+0.2)</td><td>&lt;&nbsp;0.001</td><p>3 of 16</p>",
        ),
        (
            '<p>by +0.21\n+- 0.06, <a href="#1e-6">1e-06</a>, <code>1e-4</code></p>',
            '<p>by <span class="number">+0.21\n+- 0.06</span>, <a href="#1e-6"><span class="number">1e-06</span></a>, '
            "<code>1e-4</code></p>",
        ),
        ("<td>3 sites</td><p><code>a.b</code></p>", "<td>3 sites</td><p><code>a.b</code></p>"),
        (
            '<p><img alt="b" src="a.png" /></p>',
            '<p><a class="picture" href="a.png"><img alt="b" src="a.png" /></a></p>',
        ),
    ],
)
def test_the_site_breaks_keys_keeps_numbers_and_links_pictures(written, shown):
    assert on_page_content(written, page=None, config=None, files=None) == shown


@cache
def _sayings() -> str:
    """Texts of the services; each value that a text is given is a dot."""
    found = []
    for path in (ROOT / "services").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "." for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


@pytest.mark.parametrize(
    ("page", "row"),
    [
        ("signatures.md", r"^\| (`[^|]+) \|"),
        ("operate.md", r"^\| sampler that saw .* \| (`[^`]+`);"),
        ("operate.md", r"logs (`[^`]+`)"),
    ],
)
def test_messages_that_a_page_explains_are_said(page, row):
    rows = re.findall(row, _text(f"docs/{page}"), re.MULTILINE)
    messages = [message for found in rows for message in re.findall(r"`([^`]+)`", found)]

    assert messages
    assert [message for message in messages if re.sub(r"\bN\b|\d+", ".", message) not in _sayings()] == []
