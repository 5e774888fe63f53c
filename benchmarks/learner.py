"""Throughput and memory of one GRPO optimizer step: this learner against TRL's GRPOTrainer, on the same rollouts.

Both train the same Qwen3-architecture model in fp32 by GRPO with AdamW and read the same tokens, padded, in one pass;
generation is in neither. Each system runs in a process of its own, because the peak of resident memory belongs to a
process; what the process held before the first step is subtracted in `step_memory_mb`. Tokens are completion tokens.
`tokens_per_s` counts processor seconds of one thread, since neighbours on the machine stretch wall-clock time;
`tokens_per_wall_s` is what the clock said. The step is the fastest of those measured after a warm-up.

    python -m benchmarks.learner --out benchmarks/results/learner.json

With `--device cuda` both compute in bf16 (TRL by autocast), memory is the GPU's, and every rate is by the clock;
`heterorl` is backend torch, `fsdp2` is backend fsdp2 with one rank. `--compile` changes both, `--liger` fsdp2 alone.
Half a billion random weights, a pass of 16,384 tokens at most:

    python -m benchmarks.learner --device cuda --systems heterorl fsdp2 trl --hidden-size 1280 --layers 24 --groups 4 \\
      --max-tokens 1024 --out learner-gpu.json
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

VOCAB_SIZE = 32_000
SYSTEMS = ("heterorl", "fsdp2", "trl")


def write_model(directory: Path, *, hidden_size: int, layers: int) -> int:
    """A random model with a vocabulary of 32 000 and the smallest tokenizer; returns the number of parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from heterorl.common.generation.tiny_model import build_tokenizer

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=hidden_size,
            intermediate_size=3 * hidden_size,
            num_hidden_layers=layers,
            num_attention_heads=hidden_size // 64,
            num_key_value_heads=max(1, hidden_size // 128),
            head_dim=64,
            tie_word_embeddings=True,
            eos_token_id=1,
            pad_token_id=0,
            bos_token_id=None,
        )
    )
    model.save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def rollouts(options: dict[str, Any]) -> list[list[tuple[np.ndarray, np.ndarray, float]]]:
    """Per group: token ids, sampler log-probs and reward of each rollout; lengths from a half to all of the longest."""
    rng = np.random.default_rng(0)
    groups = []
    for _ in range(options["groups"]):
        members = []
        for member in range(options["group_size"]):
            length = int(rng.integers(options["max_tokens"] // 2, options["max_tokens"] + 1))
            tokens = rng.integers(2, VOCAB_SIZE, length).astype(np.int32)
            members.append((tokens, np.full(length, -np.log(VOCAB_SIZE), np.float32), float(member % 2)))
        groups.append(members)
    return groups


PROMPT = np.arange(2, 18, dtype=np.int32)


def queued_groups(options: dict[str, Any]) -> list[Any]:
    """The rollouts as a learner gets them."""
    from heterorl.common.types.common import Digest, SiteId
    from heterorl.common.types.rollout import FinishReason, Group, GroupId, QueuedGroup, Rollout, Span

    return [
        QueuedGroup(
            group=Group(
                id=GroupId(site=SiteId("a"), incarnation="a", sequence=number + 1),
                assignment=number,
                prompt_index=number,
                prompt_token_ids=PROMPT,
                rollouts=tuple(
                    Rollout(
                        token_ids=tokens,
                        sampler_logprobs=logprobs,
                        spans=(Span(version=0, start=0, end=tokens.size),),
                        reward=reward,
                        reward_parts=(),
                        finish_reason=FinishReason.EOS,
                    )
                    for tokens, logprobs, reward in members
                ),
                oldest_version=0,
                state_root=Digest("0" * 64),
                generation_s=0.0,
            ),
            policy_age_s=0.0,
            queue_age_s=0.0,
        )
        for number, members in enumerate(rollouts(options))
    ]


def learner_config(kind: str, model_dir: Path, options: dict[str, Any]) -> Any:
    """Of a learner with one process."""
    from heterorl.learner.learner_config import LearnerConfig

    is_gpu = options["device"] == "cuda"
    return LearnerConfig.model_validate(
        {
            "model_dir": str(model_dir),
            "sampling": {"max_new_tokens": options["max_tokens"]},
            "loss": {"kind": "grpo"},
            "backend": {
                "kind": kind,
                "lr": 1e-5,
                "device": options["device"],
                "compute_dtype": "bf16" if is_gpu else "fp32",
                "threads": 0 if is_gpu else 1,
                # On the CPU one pass, as TRL takes.
                "micro_batch_tokens": 16_384 if is_gpu else 1 << 30,
                "gradient_checkpointing": options["checkpointing"],
                "compile": options["compile"],
                "liger": options["liger"] and kind == "fsdp2",
            },
        }
    )


def heterorl_step(model_dir: Path, options: dict[str, Any]) -> Callable[[], object]:
    """A step of the torch backend."""
    from heterorl.learner.backends.torch_backend import TorchBackend

    config, groups = learner_config("torch", model_dir, options), queued_groups(options)
    sampling = config.sampling.semantics()
    backend = TorchBackend(model_dir=model_dir, config=config.backend, loss=config.loss, sampling=sampling)
    return lambda: backend.train_step(groups, head_version=0, step=1)


def fsdp2_step(model_dir: Path, options: dict[str, Any]) -> Callable[[], object]:
    """A step of backend fsdp2 with one rank."""
    from heterorl.learner.backends.ranks.rank_env import local_rank_env
    from heterorl.learner.backends.ranks.rank_group import RankGroup
    from heterorl.learner.learner_parts import build_divided

    config, groups = learner_config("fsdp2", model_dir, options), queued_groups(options)
    with tempfile.TemporaryDirectory() as directory:
        rank_group = RankGroup(local_rank_env(0, num_ranks=1, file=Path(directory) / "rendezvous"))
        backend = build_divided(config, rank_group.join(config))
    return lambda: backend.train_step(groups, head_version=0, step=1)


def trl_step(model_dir: Path, options: dict[str, Any]) -> Callable[[], object]:
    """The loss of a real GRPOTrainer on prepared inputs, its backward pass, clipping and AdamW."""
    import datasets
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[attr-defined]

    count = options["groups"] * options["group_size"]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=str(model_dir / "trl"),
            use_cpu=options["device"] == "cpu",
            report_to=[],
            bf16=options["device"] == "cuda",
            per_device_train_batch_size=count,
            num_generations=options["group_size"],
            max_completion_length=options["max_tokens"],
            beta=0.0,
            loss_type="grpo",
            gradient_checkpointing=options["checkpointing"],
        ),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["1+1="] * count}),
        processing_class=AutoTokenizer.from_pretrained(model_dir),
    )
    trainer.current_gradient_accumulation_steps = 1
    model: Any = trainer.model
    model.to(options["device"]).train()
    if options["checkpointing"]:
        # The trainer does so where its own loop begins, and not before.
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    members = [entry for group in rollouts(options) for entry in group]
    longest = max(tokens.size for tokens, _, _ in members)
    ids = torch.zeros(count, longest, dtype=torch.long)
    mask, old = torch.zeros(count, longest, dtype=torch.long), torch.zeros(count, longest)
    for row, (tokens, logprobs, _) in enumerate(members):
        ids[row, : tokens.size] = torch.from_numpy(tokens.astype(np.int64))
        mask[row, : tokens.size] = 1
        old[row, : tokens.size] = torch.from_numpy(logprobs)
    rewards = torch.tensor([reward for _, _, reward in members]).view(options["groups"], -1)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    inputs = {
        "prompt_ids": torch.from_numpy(PROMPT.astype(np.int64)).repeat(count, 1),
        "prompt_mask": torch.ones(count, PROMPT.size, dtype=torch.long),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": advantages.flatten(),
        "old_per_token_logps": old,
        "num_items_in_batch": mask.sum(),
    }

    inputs = {name: value.to(options["device"]) for name, value in inputs.items()}

    def step() -> object:
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(model, inputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def measure(system: str, model_dir: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Take the steps, in this process."""
    import torch

    is_gpu = options["device"] == "cuda"
    if not is_gpu:
        torch.set_num_threads(1)
    take = {"heterorl": heterorl_step, "fsdp2": fsdp2_step, "trl": trl_step}[system](model_dir, options)

    def step() -> None:
        take()
        if is_gpu:
            torch.cuda.synchronize()

    tokens = sum(entry[0].size for group in rollouts(options) for entry in group)
    before_mb = torch.cuda.memory_allocated() / (1 << 20) if is_gpu else _resident_mb()
    step()
    seconds, wall = [], []
    for _ in range(options["steps"]):
        started, started_wall = time.process_time(), time.perf_counter()
        step()
        seconds.append(time.process_time() - started)
        wall.append(time.perf_counter() - started_wall)
    if is_gpu:
        peak_mb = torch.cuda.max_memory_allocated() / (1 << 20)
    else:
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "system": system,
        "device": torch.cuda.get_device_name() if is_gpu else "cpu",
        "vocab": VOCAB_SIZE,
        "tokens": tokens,
        "gradient_checkpointing": options["checkpointing"],
        "compile": options["compile"] and system != "trl",
        "liger": options["liger"] and system == "fsdp2",
        "tokens_per_s": round(tokens / min(wall if is_gpu else seconds), 1),
        "tokens_per_wall_s": round(tokens / min(wall), 1),
        "peak_memory_mb": round(peak_mb),
        "step_memory_mb": round(peak_mb - before_mb),
    }


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / (1 << 20)


def main() -> None:
    """Run every system in a child and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/learner.json"))
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compile", action="store_true", help="of heterorl and fsdp2")
    parser.add_argument("--liger", action="store_true", help="of fsdp2")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=["heterorl", "trl"])
    parser.add_argument("--system", choices=SYSTEMS, help="measure one system in this process, of --model-dir")
    parser.add_argument("--model-dir", type=Path)
    arguments = parser.parse_args()
    options = {key: value for key, value in vars(arguments).items() if isinstance(value, int) or key == "device"}
    if arguments.system:
        sys.stdout.write("ROW " + json.dumps(measure(arguments.system, arguments.model_dir, options)) + "\n")
        return
    with tempfile.TemporaryDirectory() as name:
        num_parameters = write_model(Path(name), hidden_size=arguments.hidden_size, layers=arguments.layers)
        rows = []
        for system in arguments.systems:
            command = [
                sys.executable,
                "-m",
                "benchmarks.learner",
                *sys.argv[1:],
                "--system",
                system,
                "--model-dir",
                name,
            ]
            answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            line = next(line for line in answer.stdout.splitlines() if line.startswith("ROW "))
            rows.append({"model": f"qwen3-{num_parameters / 1e6:.1f}M", **json.loads(line.removeprefix("ROW "))})
            print(json.dumps(rows[-1]))
    import torch
    import transformers
    import trl

    report = {
        "machine": {"processor": platform.machine(), "threads": 1},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__},
        "options": options,
        "rows": rows,
    }
    arguments.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
