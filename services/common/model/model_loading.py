"""Model loading: one at a time, context-window limits, fixed rotary positions.

One loads at a time in a process, with rotary positions that other texts do not change.

While transformers builds a model it replaces functions of `torch.nn.init`, and the learner one of `nn.Module`. Two
threads at once would restore each other's replacement for good, and `normal_` would not write into a parameter. So a
thread that builds a model holds BUILDING.

transformers chooses some rotary positions by the longest position of a pass:

    longrope    short or long factors, depending on whether the pass exceeds the window of the first training
    dynamic     a base that grows with the longest position, and stays as an earlier pass needed it

So a text's log-probs would depend on the other texts of its pass. A completion that leaves the window would have keys
of two kinds. Within the window both equal a model without such positions.

Guarantees: after `hold_positions` every length has the positions of the window; a prompt without room for a completion
is refused before generation.
"""

import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from heterorl.common.errors import ConfigError, PromptRefused, PromptTooLong
from heterorl.common.model.model_directory import first_line
from heterorl.common.types.common import Int32Array

_LOG = logging.getLogger(__name__)
_HELD = "held"
_NUM_TRIED = 8
_FAR = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimits:
    """A model's vocabulary and context length.

    `positions` bounds a prompt with its completion, 0 is no bound. `key` of the configuration sets `positions`.
    """

    vocab_size: int
    positions: int
    key: str = "model_dir"

    def check_length(self, max_new_tokens: int, *, key: str = "sampling.max_new_tokens") -> None:
        """Raise ConfigError for completions that leave no room for any prompt."""
        if 0 < self.positions <= max_new_tokens:
            problem = f"{max_new_tokens} new tokens leave no room for a prompt: {self.key} has {self.positions} tokens"
            raise ConfigError(key, problem, action="lower it")

    def check(self, prompt: Int32Array, max_new_tokens: int) -> None:
        """Refuse a prompt that the model cannot compute.

        Raises:
            ConfigError: such completions leave no room for any prompt.
            PromptTooLong: this prompt has none.
            PromptRefused: one of its tokens is outside the vocabulary.
        """
        self.check_length(max_new_tokens, key="max_new_tokens")
        if self.positions and prompt.size + max_new_tokens > self.positions:
            raise PromptTooLong(
                self.key,
                f"{self.positions} tokens hold no prompt of {prompt.size} and {max_new_tokens} new ones",
                action="leave such rows out (task.data.max_prompt_tokens), or lower sampling.max_new_tokens",
            )
        if prompt.size and not 0 <= prompt.min() <= prompt.max() < self.vocab_size:
            raise PromptRefused(
                "model_dir",
                f"the tokenizer writes token {prompt.max()}, and the model has {self.vocab_size}",
                action="take the tokenizer and the model from one directory",
            )


def token_limits_at(model_dir: str) -> TokenLimits:
    """Token limits of a model, without its weights; raises ConfigError if unreadable."""
    from transformers import AutoConfig

    try:
        return token_limits_of(AutoConfig.from_pretrained(model_dir))
    except (OSError, ValueError) as error:
        raise ConfigError(
            "model_dir",
            f"cannot read config.json of {model_dir}: {first_line(error)}",
            action="name a directory with config.json, weights and tokenizer of a transformers model",
        ) from error


def token_limits_of(config: Any) -> TokenLimits:
    """Token limits of a model's configuration, of a multimodal one's text model."""
    text, window = config.get_text_config(), window_of(config)
    positions = int(getattr(text, "max_position_embeddings", None) or 0)
    return TokenLimits(vocab_size=int(text.vocab_size), positions=window.tokens if window else max(0, positions))


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Tokens up to which a kind's positions are equal in every pass."""

    kind: str
    tokens: int

    def __str__(self) -> str:
        return f"rotary positions of type {self.kind} depend on the longest text of a pass beyond {self.tokens} tokens"


def window_of(config: Any) -> Window | None:
    """The smallest window of a model's configuration; None if positions are fixed."""
    config = config.get_text_config()
    parameters, positions = getattr(config, "rope_parameters", None), getattr(config, "max_position_embeddings", 0)
    return min(_windows(parameters or {}, positions), key=lambda window: window.tokens, default=None)


def hold_positions(model: nn.Module) -> None:
    """Give a model short texts' rotary positions, in place; raises ConfigError."""
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and _is_by_length(kinds):
            module.rope_type = _HELD  # type: ignore[assignment]
            _check_held(module, kinds, {})
        elif isinstance(kinds, dict):
            for layer_type, kind in kinds.items():
                if _is_by_length(kind):
                    kinds[layer_type] = _HELD
                    _check_held(module, kind, {"layer_type": layer_type})


@torch.no_grad()
def _check_held(module: nn.Module, kind: str, options: Mapping[str, Any]) -> None:
    near = torch.arange(_NUM_TRIED)[None]
    far = torch.cat([near, torch.full((1, 1), _FAR)], 1)
    one, other = (module(torch.zeros(1), positions, **options) for positions in (near, far))
    if not all(torch.equal(part, whole[:, :_NUM_TRIED]) for part, whole in zip(one, other, strict=True)):
        problem = f"rotary positions of type {kind} depend on the longest text of a pass in {type(module).__name__}"
        raise ConfigError("model_dir", problem, action="name a model with other positions")


def _windows(parameters: Mapping[str, Any], max_positions: int) -> list[Window]:
    """Windows of all layers; several kinds have a table each."""
    tables = [value for value in parameters.values() if isinstance(value, Mapping)]
    found = [window for table in tables for window in _windows(table, max_positions)]
    kind = str(parameters.get("rope_type") or parameters.get("type") or "")
    if _is_by_length(kind):
        tokens = parameters.get("original_max_position_embeddings") if kind == "longrope" else None
        found.append(Window(kind=kind, tokens=int(tokens or max_positions)))
    return found


def _is_by_length(kind: object) -> bool:
    return isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind)


BUILDING = threading.RLock()
"""Held by a thread while it builds a model or adds modules to one."""


def warn_of_idle_gpus(key: str, device: str) -> None:
    """Warn where a model goes to the CPU although torch sees GPUs."""
    if device == "cpu" and torch.cuda.is_available():
        _LOG.warning('%s is "cpu", but torch sees %d GPUs: set it to "cuda"', key, torch.cuda.device_count())


def choose_kernels() -> None:
    """Disable two CUDA features in this process: TF32 products and cuDNN attention.

    TF32, which some images preset, keeps 10 bits of fp32 factors. cuDNN plans attention again for each new length. On
    an H100 with half a billion weights, engine hf drew 3,200 tokens/s with it and 10,200 without. A step of new lengths
    took 410 ms with it and 325 without.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.enable_cudnn_sdp(False)


def load_pretrained(model_dir: str, *, dtype: torch.dtype) -> Any:
    """A causal language model with all its weights; raises ConfigError otherwise."""
    from transformers import AutoModelForCausalLM

    choose_kernels()
    # With this option mismatched shapes are reported by name.
    options = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        with BUILDING:
            loader: Any = AutoModelForCausalLM
            model, found = loader.from_pretrained(model_dir, dtype=dtype, **options)
    except Exception as error:
        action = "name a directory with config.json and safetensors of a causal language model, or copy it again"
        raise ConfigError("model_dir", f"cannot load {model_dir}: {first_line(error)}", action=action) from error
    _check_quantised(model_dir, model, found)
    _check_found(model_dir, found)
    check_unread(model_dir, found["unexpected_keys"], model.state_dict())
    hold_positions(model)
    return model


def _check_quantised(model_dir: str, model: Any, found: Mapping[str, Any]) -> None:
    """Refuse quantised weights, whose numbers have no meaning without their scales.

    transformers removes `quantization_config` where it dequantises. It reads over scales of a form that it does not
    know.
    """
    names = {name for name, _ in model.named_parameters()}
    has_scales = any(name.rpartition("_scale")[0] in names for name in found["unexpected_keys"])
    if has_scales or getattr(model.config, "quantization_config", None) is not None:
        problem = f"the weights of {model_dir} are quantised, and neither trained nor published"
        raise ConfigError("model_dir", problem, action="name a directory of the same model in bf16, fp16 or fp32")


def _check_found(model_dir: str, found: Mapping[str, Any]) -> None:
    """Refuse missing and mismatched tensors, which transformers would make up at random."""
    if mismatched := sorted(found["mismatched_keys"]):
        name, in_files, in_model = mismatched[0]
        problem = f"{name} is {list(in_files)} in the files and {list(in_model)} by config.json"
    elif missing := sorted(found["missing_keys"]):
        others = f", nor are {len(missing) - 1} others" if len(missing) > 1 else ""
        problem = f"{missing[0]} is not in the files of {model_dir}{others}"
    else:
        return
    raise ConfigError("model_dir", problem, action="copy the directory again, or name a whole causal language model")


def check_unread(model_dir: str, unread: Iterable[str], names: Iterable[str]) -> None:
    """Warn of tensors in the files that the model does not have.

    `names` are its own. Raises ConfigError for a weight or bias of a module that the model has without it.
    """
    unread, modules = sorted(unread), {name.rpartition(".")[0] for name in names}
    for name in unread:
        module, _, part = name.rpartition(".")
        if part in ("weight", "bias") and module in modules:
            problem = f"{name} is in the files of {model_dir}, and not in the model by config.json"
            raise ConfigError("model_dir", problem, action="correct config.json (model_type, attention_bias)")
    if unread:
        message = "%d tensors in the files of %s are not in the model, neither trained nor exported, such as %s"
        _LOG.warning(message, len(unread), model_dir, unread[0])
