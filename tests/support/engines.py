"""Engines under the same settings, arenas to swap between, and the slow truth about their log-probs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from heterorl.common.generation.hf_engine import HfEngine
from heterorl.common.generation.inference_engine import Completion
from heterorl.common.generation.tiny_model import build_tokenizer
from heterorl.common.model import tensors
from heterorl.common.model.contract import ALL_WEIGHTS, LoraConfig
from heterorl.common.types.common import Float32Array, Int32Array, LogprobMode, SamplingSemantics
from heterorl.common.weights.arena import Arena

EOS = 1
PROMPTS = [np.array(ids, np.int32) for ids in ([2, 3, 12, 4], [5], [6, 7, 8, 9, 10, 12, 2], [3, 3])]


def semantics(**changes: Any) -> SamplingSemantics:
    values = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 12, "logprob_mode": LogprobMode.PROCESSED}
    return SamplingSemantics(**{**values, **changes})


def write_model(directory: Path, *, family: str = "Qwen3", is_tied: bool = True, **settings: Any) -> Path:
    """A random model of 90 thousand parameters; heads of 32, the least that vLLM's attention takes on a CPU.

    `settings` go into its configuration.
    """
    import transformers

    tokenizer = build_tokenizer()
    values = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256,
        "tie_word_embeddings": is_tied, "eos_token_id": EOS, "pad_token_id": 0, "bos_token_id": None,
        "initializer_range": 0.15, **settings,
    }  # fmt: skip
    config = getattr(transformers, f"{family}Config")(**values)
    torch.manual_seed(0)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def hf_engine(model_dir: Path, **changes: Any) -> HfEngine:
    values = {"compute_dtype": "fp32", "device": "cpu", "batch_rows": 32, "end_token_ids": (EOS,),
              **changes.pop("engine", {})}  # fmt: skip
    return HfEngine(model_dir=str(model_dir), published_dtype="fp32", sampling=semantics(**changes), **values)


def passes_of(engine: HfEngine, name: str) -> list[tuple[int, ...]]:
    """Rows and columns of the input `name` in every pass from now on."""
    seen: list[tuple[int, ...]] = []
    engine.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(tuple(kwargs[name].shape)), with_kwargs=True
    )
    return seen


def vllm_engine(model_dir: Path, weights_dir: Path, **changes: Any) -> Any:
    from heterorl.sampler.sampler_config import VllmEngineConfig
    from heterorl.sampler.vllm.vllm_engine import VllmEngine

    values = {"compute_dtype": "fp32", "batch_rows": 32, "kv_cache_bytes": 32 << 20, **changes.pop("engine", {})}
    ends = values.pop("end_token_ids", (EOS,))
    source = vllm_source(model_dir, weights_dir, lora=values.pop("lora", ALL_WEIGHTS), **changes)

    class Alone(VllmEngine):
        """An engine that owns its source."""

        base, lora = source.base, source.lora

        def close(self) -> None:
            super().close()
            source.close()

    return Alone(source, end_token_ids=ends, settings=VllmEngineConfig(**values))


def vllm_source(model_dir: Path, weights_dir: Path, *, lora: LoraConfig = ALL_WEIGHTS, **changes: Any) -> Any:
    from heterorl.sampler.vllm.shared_model import SharedModel

    return SharedModel(
        model_dir=str(model_dir), published_dtype="fp32", sampling=semantics(**changes), weights_dir=weights_dir,
        lora=lora,
    )  # fmt: skip


def disturbed(arena: Arena, *, seed: int, scale: float = 0.2) -> Arena:
    """The arena with every fp32 weight multiplied by 1 + scale x N(0, 1)."""
    rng = np.random.default_rng(seed)
    result = arena.copy()
    for spec in result.layout.specs:
        if not spec.alias_of:
            values = result.view(spec.name).view(np.float32)
            values *= 1 + scale * rng.standard_normal(values.shape).astype(np.float32)
    return result


class Truth:
    """A full float32 forward of prompt and completion, without cache or batch."""

    def __init__(self, model_dir: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    def logprobs(self, arena: Arena, prompt: Int32Array, row: Completion, sampling: SamplingSemantics) -> Float32Array:
        """Log-probs of the completion's tokens under the arena's weights, in the contract's semantics."""
        tensors.load(arena, self._model)
        whole = torch.tensor([[*prompt.tolist(), *row.token_ids.tolist()]])
        with torch.no_grad():
            logits = self._model(input_ids=whole).logits[0, prompt.size - 1 : -1]
        if sampling.logprob_mode is LogprobMode.PROCESSED:
            logits = logits / sampling.temperature
        result: Float32Array = logits.log_softmax(-1).gather(1, whole[0, prompt.size :, None])[:, 0].numpy()
        return result

    def mixed(
        self, arenas: dict[int, Arena], prompt: Int32Array, row: Completion, sampling: SamplingSemantics
    ) -> Float32Array:
        """The same for a completion over several versions, whose keys and values each are of the version that read them.

        The last token drawn under a version is read by the next one: it is what that draws its first token from.
        """
        cache, result = None, []
        with torch.no_grad():
            for number, span in enumerate(row.spans):
                tensors.load(arenas[span.version], self._model)
                start = span.start - 1
                read = [*prompt.tolist(), *row.token_ids[: span.end - 1].tolist()][
                    prompt.size + start if number else 0 :
                ]
                output = self._model(input_ids=torch.tensor([read]), past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                logits = output.logits[0, -(span.end - span.start) :]
                if sampling.logprob_mode is LogprobMode.PROCESSED:
                    logits = logits / sampling.temperature
                drawn = torch.tensor(row.token_ids[span.start : span.end].astype(np.int64))
                result.append(logits.log_softmax(-1).gather(1, drawn[:, None])[:, 0].numpy())
        return np.concatenate(result)

    def difference(self, arena: Arena, groups: list[list[Completion]], sampling: SamplingSemantics) -> float:
        """Largest difference of any token of completions of PROMPTS."""
        return max(
            float(np.abs(row.logprobs - self.logprobs(arena, prompt, row, sampling)).max())
            for prompt, rows in zip(PROMPTS, groups, strict=True)
            for row in rows
        )
