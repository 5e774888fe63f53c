"""Questions of the recipe: GSM8K of the hub at a commit, or files of the same shape on this machine.

    python examples/gsm8k/data.py                                          # openai/gsm8k; extra `data`
    python examples/gsm8k/data.py --train my-train.jsonl --test my-test.jsonl

A line of the source has a `question` and an `answer` that ends in "#### 72", as GSM8K's has. What is written has a
`prompt` and the number alone, so that a reward compares numbers and not prose. Rows without such an end, and test
questions among the training ones, are left out and counted.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

HERE = Path(__file__).parent
NAME, REVISION, SUBSET = "openai/gsm8k", "740312add88f781978c0658806c59bc2815b9866", "main"
_NUMBER = re.compile(r"####\s*(-?[\d,]*\.?\d+)\s*$")


def question_of(row: dict[str, Any]) -> dict[str, str] | None:
    """Prompt and number of a row; None where its answer does not end in one."""
    number = _NUMBER.search(str(row.get("answer", "")))
    prompt = str(row.get("question", "")).strip()
    if number is None or not prompt:
        return None
    return {"prompt": prompt, "answer": number[1].replace(",", "")}


def local_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file, one a line."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.strip():
                yield json.loads(line)


def hub_rows(split: str) -> Iterable[dict[str, Any]]:
    """The rows of GSM8K at the commit that the recipe was written with."""
    from datasets import load_dataset

    return load_dataset(NAME, SUBSET, split=split, revision=REVISION)  # type: ignore[no-any-return]


def write(path: Path, rows: Iterable[dict[str, Any]], *, without: frozenset[str] = frozenset()) -> frozenset[str]:
    """Write questions and say how many were left out; the prompts that were written."""
    written: dict[str, dict[str, str]] = {}
    num_read = 0
    for row in rows:
        num_read += 1
        question = question_of(row)
        if question is not None and question["prompt"] not in without:
            written.setdefault(question["prompt"], question)
    path.write_text("".join(json.dumps(question) + "\n" for question in written.values()), encoding="utf-8")
    Console().print(f"{path}: {len(written)} questions, {num_read - len(written)} rows left out", soft_wrap=True)
    return frozenset(written)


def main() -> None:
    """Write `train.jsonl` and `test.jsonl`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, help="JSONL of training questions; default: the hub's")
    parser.add_argument("--test", type=Path, help="JSONL of held-out questions; default: the hub's")
    parser.add_argument("--out", type=Path, default=HERE, help="where the files go")
    arguments = parser.parse_args()
    if (arguments.train is None) != (arguments.test is None):
        parser.error("name both --train and --test, or neither")
    test, train = (
        (local_rows(arguments.test), local_rows(arguments.train)) if arguments.train
        else (hub_rows("test"), hub_rows("train"))
    )  # fmt: skip
    arguments.out.mkdir(parents=True, exist_ok=True)
    held_out = write(arguments.out / "test.jsonl", test)
    write(arguments.out / "train.jsonl", train, without=held_out)


if __name__ == "__main__":
    main()
