"""Text to token ids and back, the same way on every node: with or without the chat template."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from heterorl.common.errors import ConfigError, PromptRefused
from heterorl.common.model.directory import check_model_dir, first_line
from heterorl.common.model.ending import end_token_ids
from heterorl.common.tasks.task import Message, Prompt
from heterorl.common.types.common import Int32Array


class Prompter:
    """A tokenizer and the way prompts go through it."""

    def __init__(
        self,
        model_dir: str,
        *,
        use_chat_template: bool,
        template_arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Load the tokenizer.

        Args:
            model_dir: a directory, or a name of the hub.
            use_chat_template: prompts are messages to the model's template.
            template_arguments: what the template is given beside them, such as enable_thinking.

        Raises:
            ConfigError: there is no tokenizer, no template, or none that takes such arguments.
        """
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
        if template_arguments and not use_chat_template:
            raise ConfigError("chat_template_arguments", "prompts go through no template", action=_SWITCH)
        own = {"messages", *inspect.signature(self.tokenizer.apply_chat_template).parameters}
        taken = template_arguments.keys() & own
        if taken:
            raise ConfigError("chat_template_arguments", f"{', '.join(sorted(taken))}: heterorl sets it itself")
        self.use_chat_template = use_chat_template
        self.template_arguments = dict(template_arguments)

        self.end_token_ids = end_token_ids(model_dir, self.tokenizer)
        """Ids that end a completion, ascending, as the model's files say."""

    @property
    def eos_token_id(self) -> int:
        """Id that ends a text which is written, not drawn."""
        return int(self.tokenizer.eos_token_id)

    def encode(self, text: str) -> Int32Array:
        """Token ids of a prompt, int32."""
        return self.encode_prompt(Prompt(index=0, text=text, answer=""))

    def encode_prompt(self, prompt: Prompt) -> Int32Array:
        """Token ids of a task's prompt, int32, with all its messages.

        Raises:
            PromptRefused: it is messages, and no template is used or this one refuses them.
        """
        # The template writes its own special tokens.
        ids = self.tokenizer.encode(self._written(prompt), add_special_tokens=not self.use_chat_template)
        return np.array(ids, np.int32)

    def num_tokens(self, prompts: Sequence[Prompt]) -> list[int]:
        """How many tokens each prompt has; all at once, which is many times as fast."""
        texts = [self._written(prompt) for prompt in prompts]
        if not texts:
            return []
        found = self.tokenizer(texts, add_special_tokens=not self.use_chat_template, return_attention_mask=False)
        return [len(ids) for ids in found["input_ids"]]

    def _written(self, prompt: Prompt) -> str:
        if not self.use_chat_template:
            if prompt.messages:
                problem = "prompts are messages (task.data.messages, task.system_prompt), and no template writes them"
                raise PromptRefused("use_chat_template", problem, action=_SWITCH)
            return prompt.text
        messages = prompt.messages or (Message(role="user", content=prompt.text),)
        from jinja2 import TemplateError

        try:
            text: str = self.tokenizer.apply_chat_template(
                [{"role": message.role, "content": message.content} for message in messages],
                tokenize=False,
                add_generation_prompt=True,
                **self.template_arguments,
            )
        # A template computes, such as with a part that these messages lack.
        except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            roles = ", ".join(message.role for message in messages)
            problem = f"the model's template refuses messages of {roles}: {first_line(error)}"
            raise PromptRefused(
                "use_chat_template", problem, action="correct the data, or task.system_prompt"
            ) from error
        return text

    def tokens(self, completion: str) -> Int32Array:
        """Token ids of a completion, int32, without its end."""
        return np.array(self.tokenizer.encode(completion, add_special_tokens=False), np.int32)

    def decode(self, token_ids: Int32Array) -> str:
        """Text of a completion, special tokens left out."""
        text: str = self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)
        return text


_SWITCH = "set use_chat_template = true"
