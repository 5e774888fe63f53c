"""Share of routing in the difference of two engines, over a mixture of experts: log-probs of the same tokens.

Random Qwen3 models with weights as published in bf16, mixtures and their dense counterpart (as many active weights),
and a mixture that was trained on the text: a Markov chain with eight successors of each token. Differences are
|log-prob - log-prob| of 1,520 tokens, nats. `agree` is the mean of tokens for which both chose the same experts in
every layer, `differ` that of the others, `differing` their share. `replayed` is the mean where the second engine's
experts are taken by the first (heterorl.common.model.router_replay).

    hf bf16 - hf fp32       rounding alone
    hf bf16 - vllm bf16     a learner that computes in bf16 beside its sampler
    hf fp32 - vllm bf16     a canary beside its sampler
    hf fp32 - vllm fp32

    python -m benchmarks.routing --out benchmarks/results/routing.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from heterorl.common.model.router_replay import RoutedTokens, RouterRecorder, RouterReplay

VOCABULARY, NUM_TEXTS, TEXT_TOKENS, WIDTH, EXPERT_WIDTH = 512, 16, 96, 64, 48
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PAIRS = (("hf bf16", "hf fp32"), ("hf bf16", "vllm bf16"), ("hf fp32", "vllm bf16"), ("hf fp32", "vllm fp32"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model: no experts is a dense one."""

    num_experts: int
    num_active: int
    num_layers: int
    train_steps: int = 0

    @property
    def name(self) -> str:
        """For people."""
        kind = f"{self.num_active} of {self.num_experts} experts" if self.num_experts else "dense"
        return f"{kind}, {self.num_layers} layers" + (", trained" if self.train_steps else "")


CASES = (
    Case(num_experts=0, num_active=4, num_layers=4),
    Case(num_experts=4, num_active=2, num_layers=2),
    Case(num_experts=32, num_active=4, num_layers=4),
    Case(num_experts=128, num_active=8, num_layers=4),
    Case(num_experts=32, num_active=4, num_layers=4, train_steps=100),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """Log-probs [texts, tokens - 1], and the experts [texts, tokens, layers, active] of a mixture."""

    logprobs: NDArray[np.float32]
    experts: NDArray[np.int64] | None


def texts(num: int, seed: int) -> torch.Tensor:
    """Token ids [num, TEXT_TOKENS]."""
    draw = torch.Generator().manual_seed(seed)
    successors = torch.randint(2, VOCABULARY, (VOCABULARY, 8), generator=torch.Generator().manual_seed(5))
    shares = torch.tensor([0.4, 0.2, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05])
    columns = [torch.randint(2, VOCABULARY, (num,), generator=draw)]
    for _ in range(TEXT_TOKENS - 1):
        columns.append(successors[columns[-1], torch.multinomial(shares, num, replacement=True, generator=draw)])
    return torch.stack(columns, 1)


def build(case: Case) -> Any:
    """The model, in fp32."""
    import transformers

    kind = "Qwen3Moe" if case.num_experts else "Qwen3"
    sizes: dict[str, Any] = {"intermediate_size": EXPERT_WIDTH * case.num_active}
    if case.num_experts:
        sizes |= {"num_experts": case.num_experts, "num_experts_per_tok": case.num_active, "norm_topk_prob": True,
                  "moe_intermediate_size": EXPERT_WIDTH}  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=case.num_layers, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=256, tie_word_embeddings=True, eos_token_id=1,
        pad_token_id=0, bos_token_id=None, initializer_range=0.02 if case.train_steps else 0.15, **sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(case.train_steps):
        ids = texts(16, 100 + step)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    # As published in bf16: only what is computed with these weights differs.
    return model.to(torch.bfloat16).float().eval()


@torch.no_grad()
def hf_scores(model_dir: Path, ids: torch.Tensor, dtype: str, experts: NDArray[np.int64] | None = None) -> Scores:
    """By transformers; with `experts`, by those."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=DTYPES[dtype]).eval()
    is_mixture = bool(getattr(model.config, "num_experts", 0))
    if experts is not None:
        replay = RouterReplay(model)
        flat = torch.from_numpy(experts).flatten(0, 1)
        record = torch.from_numpy(replay.shape.encode(flat))
        replay.use(RoutedTokens(ids_NC=record, is_recorded_N=torch.ones(len(record), dtype=torch.bool)))
    if not is_mixture:
        return Scores(logprobs=_logprobs(model(input_ids=ids).logits, ids), experts=None)
    with RouterRecorder(model).recording() as layers:
        logits = model(input_ids=ids).logits
    return Scores(
        logprobs=_logprobs(logits, ids), experts=torch.stack(layers, 1).reshape(*ids.shape, len(layers), -1).numpy()
    )


def _logprobs(logits: torch.Tensor, ids: torch.Tensor) -> NDArray[np.float32]:
    shown = logits[:, :-1].float().log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    values: NDArray[np.float32] = shown.numpy()
    return values


def vllm_scores(model_dir: Path, dtype: str) -> Scores:
    """By vLLM in a process of its own."""
    out = model_dir / f"{dtype}.npz"
    words = [sys.executable, "-m", "benchmarks.routing", "--score", str(model_dir), dtype, str(out)]
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCHDYNAMO_DISABLE": "1",
    }  # fmt: skip
    subprocess.run(words, check=True, env={**os.environ, **settings}, timeout=600)
    with np.load(out) as found:
        return Scores(logprobs=found["logprobs"], experts=found.get("experts"))


def score(model_dir: str, dtype: str, out: str) -> None:
    """Score the texts by vLLM, one after another; its routers tell their choices to a hook for such."""
    import vllm
    from vllm.model_executor.layers.fused_moe.router import base_router

    chosen: list[torch.Tensor] = []
    select = base_router.BaseRouter._select_experts

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        weights, experts = select(self, *args, **kwargs)
        chosen.append(experts.clone().long())
        return weights, experts

    base_router.BaseRouter._select_experts = noted
    engine = vllm.LLM(
        model=model_dir, skip_tokenizer_init=True, dtype={"bf16": "bfloat16", "fp32": "float32"}[dtype],
        enforce_eager=True, enable_prefix_caching=False, kv_cache_memory_bytes=64 << 20, max_model_len=256,
        max_num_seqs=1, max_num_batched_tokens=256,
    )  # fmt: skip
    settings = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    logprobs, experts = [], []
    for row in texts(NUM_TEXTS, 9).tolist():
        chosen.clear()
        (answer,) = engine.generate([{"prompt_token_ids": row}], settings, use_tqdm=False)
        logprobs.append(
            [place[token].logprob for token, place in zip(row[1:], answer.prompt_logprobs[1:], strict=True)]
        )
        if chosen:
            # One pass over the whole text: the one token that it draws is not read.
            experts.append(torch.stack(chosen, 1).numpy())
    found = {"logprobs": np.array(logprobs, np.float32)}
    np.savez(out, **found, **({"experts": np.stack(experts)} if experts else {}))


def compare(case: Case, first: str, second: str, scores: dict[str, Scores], model_dir: Path) -> dict[str, Any]:
    """One row of the table."""
    one, other = scores[first], scores[second]
    distance = np.abs(one.logprobs - other.logprobs)
    row: dict[str, Any] = {
        "model": case.name, "pair": f"{first} - {second}", "mean": float(distance.mean()),
        "median": float(np.median(distance)), "p99": float(np.quantile(distance, 0.99)),
    }  # fmt: skip
    if one.experts is None or other.experts is None:
        return row
    differs = (np.sort(one.experts, -1) != np.sort(other.experts, -1)).any((-1, -2))[:, :-1]
    replayed = hf_scores(model_dir, texts(NUM_TEXTS, 9), first.removeprefix("hf "), other.experts)
    distance_replayed = np.abs(replayed.logprobs - other.logprobs)
    return row | {
        "differing": float(differs.mean()),
        "agree": float(distance[~differs].mean()),
        "differ": float(distance[differs].mean()) if differs.any() else 0.0,
        "replayed": float(distance_replayed.mean()),
        "replayed_p99": float(np.quantile(distance_replayed, 0.99)),
    }


def measure() -> list[dict[str, Any]]:
    """All rows."""
    rows = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as directory:
            model_dir, ids = Path(directory), texts(NUM_TEXTS, 9)
            build(case).save_pretrained(model_dir)
            scores = {f"hf {dtype}": hf_scores(model_dir, ids, dtype) for dtype in DTYPES}
            scores |= {f"vllm {dtype}": vllm_scores(model_dir, dtype) for dtype in DTYPES}
            for first, second in PAIRS:
                rows.append(compare(case, first, second, scores, model_dir))
                print(_line(rows[-1]), flush=True)
    return rows


COLUMNS = ("mean", "median", "p99", "differing", "agree", "differ", "replayed", "replayed_p99")


def _line(row: dict[str, Any]) -> str:
    numbers = " | ".join(f"{row[name]:.4f}" if name in row else "" for name in COLUMNS)
    return f"| {row['model']} | {row['pair']} | {numbers} |"


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--score", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.score:
        score(*options.score)
        return
    print(f"| model | pair | {' | '.join(COLUMNS)} |")
    print("|---" * (2 + len(COLUMNS)) + "|")
    rows = measure()
    if options.out:
        machine = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
        cases = [asdict(case) for case in CASES]
        options.out.write_text(json.dumps({**machine, "cases": cases, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
