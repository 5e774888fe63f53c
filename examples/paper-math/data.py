"""Data of the paper's setting: MATH of the levels 3 to 5 to train on, and four sets of held-out problems.

    python examples/paper-math/data.py --revision train=COMMIT --revision amc23=COMMIT ...     # extra `data`
    python examples/paper-math/data.py --local train=train.parquet --local amc23=amc23.jsonl ...

Each set is a data set of the hub at a commit that you name, or a file (JSONL or Parquet) of this machine. The authors
read local directories and name no commit, so none stands here. What is written has a `prompt` and an `answer`;
training problems that stand in a held-out set are left out, and every count is said. `data/sources.json` keeps where
each set came from.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a set lies on the hub, and what its columns are called."""

    place: str
    split: str
    question: str
    answer: str = "answer"
    files: str = ""


SOURCES = {
    "train": Source(
        place="hkust-nlp/SimpleRL-Zoo-Data", files="simplelr_qwen_level3to5/train.parquet", split="train",
        question="question",
    ),
    "amc23": Source(place="math-ai/amc23", split="test", question="question"),
    "aime24": Source(place="HuggingFaceH4/aime_2024", split="train", question="problem"),
    "aime25": Source(place="yentinglin/aime_2025", split="train", question="problem"),
    "math500": Source(place="HuggingFaceH4/MATH-500", split="test", question="problem"),
}  # fmt: skip


def local_rows(path: Path) -> Iterable[dict[str, Any]]:
    """The rows of a JSONL or Parquet file."""
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        return rows
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def hub_rows(source: Source, revision: str) -> Iterable[dict[str, Any]]:
    """The rows of a set at a commit."""
    from datasets import load_dataset

    files = {source.split: source.files} if source.files else None
    return load_dataset(  # type: ignore[no-any-return]
        source.place, split=source.split, revision=revision, data_files=files
    )


def write(
    path: Path, rows: Iterable[dict[str, Any]], source: Source, *, without: frozenset[str] = frozenset()
) -> frozenset[str]:
    """Write problems and say how many were left out; the prompts that were written.

    Raises:
        KeyError: the rows have no such columns.
    """
    written: dict[str, str] = {}
    num_read = 0
    for row in rows:
        num_read += 1
        prompt, answer = str(row[source.question]).strip(), str(row[source.answer]).strip()
        if prompt and answer and prompt not in without:
            written.setdefault(prompt, answer)
    lines = (json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in written.items())
    path.write_text("".join(lines), encoding="utf-8")
    Console().print(f"{path}: {len(written)} problems, {num_read - len(written)} rows left out", soft_wrap=True)
    return frozenset(written)


def _named(values: list[str], parser: argparse.ArgumentParser) -> dict[str, str]:
    found = dict(value.partition("=")[::2] for value in values)
    if unknown := sorted(found.keys() - SOURCES.keys()):
        parser.error(f"no set is called {unknown[0]}; the sets are {', '.join(SOURCES)}")
    return found


def main() -> None:
    """Write a JSONL file for each set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--revision", action="append", default=[], metavar="SET=COMMIT", help="of the hub")
    parser.add_argument("--local", action="append", default=[], metavar="SET=FILE", help="a file in its place")
    parser.add_argument("--out", type=Path, default=HERE / "data", help="where the files go")
    arguments = parser.parse_args()
    revisions, files = _named(arguments.revision, parser), _named(arguments.local, parser)
    if missing := [name for name in SOURCES if name not in revisions and name not in files]:
        parser.error(f"{missing[0]} has neither --revision nor --local")
    arguments.out.mkdir(parents=True, exist_ok=True)
    held_out: frozenset[str] = frozenset()
    # The training set last: it must not hold what the others ask.
    for name in sorted(SOURCES, key="train".__eq__):
        rows = local_rows(Path(files[name])) if name in files else hub_rows(SOURCES[name], revisions[name])
        written = write(arguments.out / f"{name}.jsonl", rows, SOURCES[name], without=held_out)
        held_out |= written
    used = {
        name: {"file": files[name]} if name in files else {**asdict(source), "revision": revisions[name]}
        for name, source in SOURCES.items()
    }
    (arguments.out / "sources.json").write_text(json.dumps(used, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
