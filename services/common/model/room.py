"""What a model can be asked for, as its configuration says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from heterorl.common.errors import ConfigError, PromptRefused, PromptTooLong
from heterorl.common.model.directory import first_line
from heterorl.common.model.positions import window_of
from heterorl.common.types.common import Int32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Tokens that a model knows; `positions` bounds a prompt with its completion, 0 is no bound.

    `key` of the configuration sets `positions`.
    """

    vocab_size: int
    positions: int
    key: str = "model_dir"

    def check_length(self, max_new_tokens: int, *, key: str = "sampling.max_new_tokens") -> None:
        """Refuse completions that leave no room for any prompt.

        Args:
            max_new_tokens: of a completion.
            key: of the configuration, which sets it.

        Raises:
            ConfigError: names the key.
        """
        if 0 < self.positions <= max_new_tokens:
            problem = f"{max_new_tokens} new tokens leave no room for a prompt: {self.key} has {self.positions} tokens"
            raise ConfigError(key, problem, action="lower it")

    def check(self, prompt: Int32Array, max_new_tokens: int) -> None:
        """Refuse what the model cannot compute, before it is among what others wait for.

        Args:
            prompt: token ids.
            max_new_tokens: of its completion.

        Raises:
            ConfigError: no prompt has room beside such a completion.
            PromptTooLong: this prompt has none.
            PromptRefused: it has a token that is none of the model's.
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


def room_at(model_dir: str) -> Room:
    """The room of the model in a directory or on the hub, without its weights.

    Raises:
        ConfigError: its configuration cannot be read.
    """
    from transformers import AutoConfig

    try:
        return room_of(AutoConfig.from_pretrained(model_dir))
    except (OSError, ValueError) as error:
        raise ConfigError("model_dir", f"cannot read config.json of {model_dir}: {first_line(error)}") from error


def room_of(config: Any) -> Room:
    """The room of a model's configuration; a model that reads more than text has one of text inside."""
    text, window = config.get_text_config(), window_of(config)
    positions = int(getattr(text, "max_position_embeddings", None) or 0)
    return Room(vocab_size=int(text.vocab_size), positions=window.tokens if window else max(0, positions))
