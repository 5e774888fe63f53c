"""A tiny chat model that has begun to learn the game of `guess.py`.

    python examples/guess/prepare.py

The model has 110 thousand parameters and one token for each number and word of the game. It starts from nothing, so it
first imitates games whose guesses are drawn from the numbers that are left, and stops long before it can do so.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from guess import HIGHEST, Guess
from rich.progress import track
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from heterorl.common.tasks.environments.environment import Action

HERE = Path(__file__).parent
PAD, START, END = "<pad>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MAX_TURNS = 6


def game(order: random.Random) -> list[tuple[str, str]]:
    """What is said and answered in one game."""
    random.seed(order.random())
    played, turns = Guess(), []
    said: str | None = played.reset({}, seed=0)
    low, high = 1, HIGHEST
    while said is not None and len(turns) < MAX_TURNS:
        guess = order.randint(low, high)
        turns.append((said, str(guess)))
        said = played.step(Action(str(guess)))
        if said:
            low, high = (guess + 1, high) if "higher" in said else (low, guess - 1)
    return turns


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, number or sign."""
    sentences = [said for number in range(100) for said, _ in game(random.Random(number))]
    sentences += ["That is no number alone.", "user", "assistant"]
    cut = pre_tokenizers.Split(Regex(r"\d{1,2}| ?[A-Za-z]+|."), behavior="isolated")
    known = {piece for text in sentences for piece, _ in cut.pre_tokenize_str(text)}
    known |= {str(number) for number in range(1, HIGHEST + 1)} | {"\n"}
    inner = Tokenizer(models.WordLevel({text: n for n, text in enumerate([PAD, *sorted(known)])}, unk_token=PAD))
    inner.pre_tokenizer, inner.decoder = cut, decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END, pad_token=PAD, unk_token=PAD)
    made.add_special_tokens({"additional_special_tokens": [START]})
    made.chat_template = TEMPLATE
    return made


def new_model(words: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A small model with random weights, always the same ones."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(words), hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, head_dim=16, max_position_embeddings=512, tie_word_embeddings=True,
            eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id, bos_token_id=None, initializer_range=0.06,
        )
    )  # fmt: skip


def imitate(model: Qwen3ForCausalLM, words: PreTrainedTokenizerFast, *, steps: int) -> None:
    """Train on the guesses of games, 32 games a step."""
    order = random.Random(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in track(range(steps), description="imitate games"):
        rows = []
        for _ in range(32):
            ids: list[int] = []
            drawn: list[int] = []
            for said, answer in game(order):
                given = words.encode(f"{START}user\n{said}{END}\n{START}assistant\n")
                turn = words.encode(f"{answer}{END}")
                # The line end behind a turn is the template's.
                ids += [*([words.encode("\n")[0]] if ids else []), *given]
                drawn += [-100] * (len(ids) - len(drawn)) + turn
                ids += turn
            rows.append((torch.tensor(ids), torch.tensor(drawn)))
        tokens = torch.nn.utils.rnn.pad_sequence([ids for ids, _ in rows], batch_first=True, padding_value=0)
        labels = torch.nn.utils.rnn.pad_sequence([drawn for _, drawn in rows], batch_first=True, padding_value=-100)
        logits = model(input_ids=tokens).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def main() -> None:
    """Write `model/` next to this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "model", help="where the model goes")
    parser.add_argument("--steps", type=int, default=200, help="steps of imitation")
    arguments = parser.parse_args()
    words = tokenizer()
    model = new_model(words)
    imitate(model, words, steps=arguments.steps)
    model.save_pretrained(arguments.out)
    words.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
