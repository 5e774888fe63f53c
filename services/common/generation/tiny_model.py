"""A small Qwen3 model and its tokenizer, pretrained on a task.

Reinforcement learning needs some reward to start, so supervised training stops at a sampled accuracy of about a
quarter. The result is cached by its settings.
"""

import json
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import Progress
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from heterorl.common.errors import ConfigError
from heterorl.common.generation.hf_engine import HfEngine
from heterorl.common.generation.inference_engine import generate_all
from heterorl.common.model.model_loading import BUILDING, load_pretrained
from heterorl.common.model.tensors import store
from heterorl.common.process.files import room
from heterorl.common.tasks.task import Task
from heterorl.common.tasks.task_config import TaskConfig, build_task
from heterorl.common.text.prompter import Prompter
from heterorl.common.types.common import LogprobMode, SamplingSemantics
from heterorl.common.types.rollout import total_reward
from heterorl.common.weights.arena import Arena
from heterorl.common.weights.payload import file_digest
from heterorl.common.wire.common_messages import bytes_digest

ALPHABET = "0123456789+-*=() "
EOS = "<eos>"
PAD = "<pad>"
POSITIONS = 256
"""Tokens that a sequence of the model may have; more where a task's answers are longer."""


def build_tokenizer() -> Any:
    """One token a character; other characters become the padding token."""
    from transformers import PreTrainedTokenizerFast

    vocabulary = {text: number for number, text in enumerate([PAD, EOS, *ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, unk_token=PAD)


def write_tiny_model(
    directory: Path,
    *,
    seed: int,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_positions: int = POSITIONS,
    tokenizer: Any = None,
) -> Path:
    """Write a random model and a tokenizer; equal arguments give equal weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = tokenizer or build_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=hidden_size // 4,
        max_position_embeddings=num_positions,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        initializer_range=0.06,
    )
    with BUILDING, torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


DONE = "warm_start.json"
VERSION = 3
_EVALUATE_EVERY = 20
_EVALUATE_OFTEN = 5
"""Once accuracy is above 0, it rises within a few steps."""
_NUM_EVALUATION = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """Settings of the supervised run."""

    digits: int
    seed: int
    task: str = "arithmetic"
    terms: int = 34
    target: float = 0.25
    learning_rate: float = 2e-3
    batch_size: int = 256
    max_steps: int = 4000
    hidden_size: int = 64
    num_layers: int = 2

    def build_task(self) -> Task:
        return build_task(TaskConfig(name=self.task, digits=self.digits, terms=self.terms))


def warm_start(options: WarmStart, *, cache: Path, device: str = "cpu") -> tuple[Path, float]:
    """Model directory and held-out accuracy; trains only without a verified copy."""
    key = bytes_digest(json.dumps([VERSION, torch.__version__, asdict(options)]).encode())[:16]
    directory = cache / f"warm-start-{key}"
    record = _verified(directory)
    if record is not None:
        return directory, float(record["accuracy"])
    cache.mkdir(parents=True, exist_ok=True)
    # A temporary directory: two processes may train at once, and either may be interrupted.
    with room(cache), tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=cache) as name:
        temporary = Path(name) / "model"
        prompt = options.build_task().prompt(0)
        write_tiny_model(
            temporary,
            seed=options.seed,
            hidden_size=options.hidden_size,
            num_layers=options.num_layers,
            num_positions=max(POSITIONS, len(prompt.text) + len(prompt.answer) + 1),
        )
        accuracy = _train(temporary, options, device)
        weights = file_digest(temporary / "model.safetensors")
        made = {"accuracy": accuracy, "weights": weights, "options": asdict(options)}
        (temporary / DONE).write_text(json.dumps(made), encoding="utf-8")
        if _verified(directory) is None:
            shutil.rmtree(directory, ignore_errors=True)
            temporary.rename(directory)
    return directory, accuracy


def _verified(directory: Path) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads((directory / DONE).read_text(encoding="utf-8"))
        return record if file_digest(directory / "model.safetensors") == record["weights"] else None
    except (OSError, ValueError, KeyError):
        return None


def _train(directory: Path, options: WarmStart, device: str) -> float:
    model = load_pretrained(str(directory), dtype=torch.float32).to(device)
    prompter = Prompter(str(directory), use_chat_template=False)
    task = options.build_task()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0)
    random = np.random.default_rng(options.seed)
    accuracy = hope = 0.0
    with Progress(transient=True, disable=not sys.stdout.isatty()) as progress:
        bar = progress.add_task("supervised warm start", total=options.target)
        for step in range(1, options.max_steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = options.learning_rate * min(1.0, step / 100)
            indices = random.integers(0, task.num_prompts, options.batch_size).tolist()
            loss, bound = _loss(model, task, prompter, indices)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            hope = max(0.9 * hope, bound)
            is_last = step == options.max_steps
            if is_last or step % (_EVALUATE_OFTEN if accuracy > 0.02 else _EVALUATE_EVERY) == 0:
                if hope < options.target / 2 and not is_last:
                    # Sampling long answers costs more than the steps between.
                    accuracy = hope
                    continue
                model.save_pretrained(directory)
                accuracy = evaluate(directory, task=task, seed=options.seed, device=device)
                progress.update(bar, completed=min(accuracy, options.target), description=f"warm start, step {step}")
                if accuracy >= options.target:
                    break
    return accuracy


def _loss(model: Any, task: Task, prompter: Prompter, indices: list[int]) -> tuple[torch.Tensor, float]:
    """Cross entropy of right answers, and the sampled reward's upper bound."""
    prompts = [task.prompt(index) for index in indices]
    rows = [[*prompter.encode(prompt.text + prompt.answer).tolist(), prompter.eos_token_id] for prompt in prompts]
    if len({(len(row), len(prompt.answer)) for row, prompt in zip(rows, prompts, strict=True)}) > 1:
        raise ConfigError("task", "a warm start needs prompts and answers of one length")
    input_ids = torch.tensor(rows, device=model.device)
    num_answer = len(prompts[0].answer) + 1
    logits = model(input_ids=input_ids[:, :-1]).logits[:, -num_answer:].reshape(-1, model.config.vocab_size)
    targets = input_ids[:, -num_answer:].reshape(-1)
    with torch.no_grad():
        losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none").view(len(rows), num_answer)
        bound = mean_share(losses)
    return torch.nn.functional.cross_entropy(logits, targets), bound


def mean_share(losses: torch.Tensor) -> float:
    """Mean share of an answer's tokens before the first wrong one.

    `losses` [rows, tokens] are in nats. This is the mean over t and rows of p_1 ... p_t, the probability of t right
    tokens. It bounds the expected share of right terms and of right answers.
    """
    return float(torch.exp(-losses.cumsum(dim=1)).mean())


def evaluate(directory: Path, *, task: Task, seed: int, device: str = "cpu") -> float:
    """Sampled mean reward of held-out prompts at temperature 1, as learners evaluate."""
    prompter = Prompter(str(directory), use_chat_template=False)
    prompts = [task.evaluation_prompt(index) for index in range(min(_NUM_EVALUATION, task.num_evaluation_prompts))]
    longest = max(prompter.encode(prompt.answer).size for prompt in prompts) + 1
    engine = HfEngine(
        model_dir=str(directory),
        published_dtype="bf16",
        compute_dtype="fp32",
        device=device,
        sampling=SamplingSemantics(
            temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=longest, logprob_mode=LogprobMode.PROCESSED
        ),
        batch_rows=_NUM_EVALUATION,
        end_token_ids=prompter.end_token_ids,
    )
    # As published: rounded to bf16, like every version of the run.
    arena = Arena(engine.layout)
    store(engine.model, arena)
    engine.load(arena, 0)
    completions = generate_all(
        engine,
        [prompter.encode(prompt.text) for prompt in prompts],
        seeds=[seed + number for number in range(len(prompts))],
        num_per_prompt=1,
    )
    scores = [
        total_reward(task.score(prompt, prompter.decode(rows[0].token_ids)))
        for prompt, rows in zip(prompts, completions, strict=True)
    ]
    return float(np.mean(scores))
