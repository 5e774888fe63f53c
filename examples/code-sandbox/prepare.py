"""Tasks and model of the recipe: small functions with their tests, and a tiny model that writes a fifth of them right.

    python examples/code-sandbox/prepare.py

A task is a sentence such as "add 4, then times 7"; its answer is a list of tests of the function f(x) that does so. The
model has 130 thousand parameters and reads single characters. It starts from nothing, so some supervised steps on
right functions come first, until a fifth of its sampled functions passes every test. Held-out tasks are in neither
these steps nor the run. With `--tasks-only` no model is made: for a pretrained one.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
OPERATIONS = {"add": "+", "take": "-", "times": "*"}
NUM_HELD_OUT = 64
ALPHABET = "0123456789+-*=():,. abcdefghijklmnopqrstuvwxyz"
PAD, EOS = "<pad>", "<eos>"


def tasks() -> list[dict[str, Any]]:
    """Two operations with a digit each, all of them in a fixed order; the last `NUM_HELD_OUT` are held out.

    The first test is that the code defines f at all, so that code with a wrong result is worth more than no code.
    """
    chosen = [(*first, *then) for first in _steps() for then in _steps()]
    random.Random(0).shuffle(chosen)
    return [
        {
            "prompt": f"{first} {a}, {then} {b}: ",
            "answer": {"tests": ["f", *(f"assert f({x}) == {_value(x, first, a, then, b)}" for x in (3, 10))]},
            "solution": f"def f(x): return (x{OPERATIONS[first]}{a}){OPERATIONS[then]}{b}",
        }
        for first, a, then, b in chosen
    ]


def _steps() -> list[tuple[str, int]]:
    return [(operation, digit) for operation in OPERATIONS for digit in range(10)]


def _value(x: int, first: str, a: int, then: str, b: int) -> int:
    result = {"add": x + a, "take": x - a, "times": x * a}[first]
    return {"add": result + b, "take": result - b, "times": result * b}[then]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    vocabulary = {text: number for number, text in enumerate([PAD, EOS, *ALPHABET])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=EOS, pad_token=PAD, unk_token=PAD)


def new_model(words: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A small model with random weights, always the same ones."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(words), hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, head_dim=16, max_position_embeddings=128, tie_word_embeddings=True,
            eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id, bos_token_id=None, initializer_range=0.06,
        )
    )  # fmt: skip


@torch.no_grad()
def accuracy(model: Qwen3ForCausalLM, words: PreTrainedTokenizerFast, asked: list[dict[str, Any]]) -> float:
    """Share of sampled functions that are the solution, at temperature 1, four a task."""
    batch = words([task["prompt"] for task in asked for _ in range(4)], return_tensors="pt", padding=True,
                  padding_side="left", return_token_type_ids=False)  # fmt: skip
    torch.manual_seed(0)
    drawn = model.generate(**batch, do_sample=True, temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=26)
    texts = words.batch_decode(drawn[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(text == asked[place // 4]["solution"] for place, text in enumerate(texts)) / len(texts)


def supervise(model: Qwen3ForCausalLM, words: PreTrainedTokenizerFast, *, target: float, max_steps: int) -> list[float]:
    """Train on right functions until `target` of the sampled ones for held-out tasks are right; the accuracies."""
    asked = tasks()
    training, held_out = asked[:-NUM_HELD_OUT], asked[-NUM_HELD_OUT:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    order = random.Random(1)
    measured = [accuracy(model, words, held_out)]
    with Progress() as progress:
        bar = progress.add_task("supervised start", total=target)
        for step in range(1, max_steps + 1):
            rows = [(words(task["prompt"])["input_ids"], words(task["solution"])["input_ids"])
                    for task in order.sample(training, 64)]  # fmt: skip
            longest = max(len(prompt) + len(solution) for prompt, solution in rows) + 1
            tokens = torch.full((len(rows), longest), words.eos_token_id)
            labels = torch.full((len(rows), longest), -100)
            for row, (prompt, solution) in enumerate(rows):
                end = len(prompt) + len(solution)
                tokens[row, :end] = torch.tensor(prompt + solution)
                labels[row, len(prompt) : end + 1] = torch.tensor([*solution, words.eos_token_id])
            logits = model(input_ids=tokens).logits[:, :-1]
            loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % 20 == 0:
                measured.append(accuracy(model, words, held_out))
                progress.update(bar, completed=min(target, measured[-1]), description=f"step {step}")
                if measured[-1] >= target:
                    break
    return measured


def main() -> None:
    """Write `tasks.jsonl`, `held-out.jsonl` and, unless `--tasks-only`, `model/` and `start.json` beside this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE, help="where model and tasks go")
    parser.add_argument("--target", type=float, default=0.2, help="accuracy at which the supervised start ends")
    parser.add_argument("--max-steps", type=int, default=2000, help="most supervised steps")
    parser.add_argument("--tasks-only", action="store_true", help="make no model")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    asked = [{"prompt": task["prompt"], "answer": task["answer"]} for task in tasks()]
    for name, rows in (("tasks", asked[:-NUM_HELD_OUT]), ("held-out", asked[-NUM_HELD_OUT:])):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (out / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    if arguments.tasks_only:
        return
    words = tokenizer()
    model = new_model(words)
    measured = supervise(model, words, target=arguments.target, max_steps=arguments.max_steps)
    model.save_pretrained(out / "model")
    words.save_pretrained(out / "model")
    (out / "start.json").write_text(json.dumps({"accuracy": measured}) + "\n", encoding="utf-8")
    Console().print(f"{out / 'model'}: accuracy {measured[0]:.2f}, after the supervised start {measured[-1]:.2f}")


if __name__ == "__main__":
    main()
