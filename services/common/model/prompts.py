"""Text to token ids and back, the same way on every node: with or without the chat template."""

from __future__ import annotations

from typing import Any

import numpy as np

from heterorl.common.errors import ConfigError
from heterorl.common.model.directory import check_model_dir, first_line
from heterorl.common.model.ending import end_token_ids
from heterorl.common.types.common import Int32Array


class Prompter:
    """A tokenizer and the way prompts go through it."""

    def __init__(self, model_dir: str, *, use_chat_template: bool) -> None:
        check_model_dir(model_dir)
        from transformers import AutoTokenizer

        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
        except (OSError, ValueError) as error:
            raise ConfigError("model_dir", f"cannot load a tokenizer from {model_dir}: {first_line(error)}") from error
        if use_chat_template and not self.tokenizer.chat_template:
            raise ConfigError("use_chat_template", f"the tokenizer of {model_dir} has no chat template")
        if self.tokenizer.eos_token_id is None:
            raise ConfigError("model_dir", f"the tokenizer of {model_dir} has no end-of-sequence token")
        self.use_chat_template = use_chat_template

        self.end_token_ids = end_token_ids(model_dir, self.tokenizer)
        """Ids that end a completion, ascending, as the model's files say."""

    @property
    def eos_token_id(self) -> int:
        """Id that ends a text which is written, not drawn."""
        return int(self.tokenizer.eos_token_id)

    def encode(self, text: str) -> Int32Array:
        """Token ids of a prompt, int32."""
        if self.use_chat_template:
            text = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
        # The template writes its own special tokens.
        ids = self.tokenizer.encode(text, add_special_tokens=not self.use_chat_template)
        return np.array(ids, np.int32)

    def tokens(self, completion: str) -> Int32Array:
        """Token ids of a completion, int32, without its end."""
        return np.array(self.tokenizer.encode(completion, add_special_tokens=False), np.int32)

    def decode(self, token_ids: Int32Array) -> str:
        """Text of a completion, special tokens left out."""
        text: str = self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)
        return text
