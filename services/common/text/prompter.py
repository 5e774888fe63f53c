"""Tokenization of prompts and completions, equal on every node, and end tokens."""

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np

from heterorl.common.errors import ConfigError, PromptRefused
from heterorl.common.model.contract import ContractConfig
from heterorl.common.model.model_directory import check_model_dir, first_line
from heterorl.common.tasks.task import Message, Prompt, messages_of
from heterorl.common.text.chat_template import (
    CLOCK,
    DATE,
    TEMPLATE_ERRORS,
    ChatTemplate,
    GivenTokens,
    as_variables,
    has_clock,
    source_of,
    sources_of,
    tool_name,
)
from heterorl.common.text.thoughts import Thoughts, opens_thoughts
from heterorl.common.types.common import MAX_END_TOKENS, Digest, Int32Array
from heterorl.common.wire.common_messages import bytes_digest

_LOG = logging.getLogger(__name__)
_OURS = frozenset({"messages", "tools", "documents", "add_generation_prompt", "chat_template"})
_SWITCH = "set use_chat_template = true"
_NO_TOOLS = "take an environment without tools, or another model"
_CORRECT = "correct the data, or what refuses it"
_PROBE = "0"
_ENDS = "eos_token_id"


class Prompter:
    """A tokenizer with the chat template of a run."""

    @classmethod
    def of(cls, config: ContractConfig) -> Self:
        """Tokenizer and template of a configuration; raises as `Prompter`."""
        return cls(
            config.model_dir,
            use_chat_template=config.use_chat_template,
            template_arguments=config.chat_template_arguments,
            end_token_ids=config.sampling.end_token_ids,
        )

    def __init__(
        self,
        model_dir: str,
        *,
        use_chat_template: bool,
        template_arguments: Mapping[str, Any] = MappingProxyType({}),
        end_token_ids: tuple[int, ...] = (),
    ) -> None:
        """Load the tokenizer.

        `template_arguments` are further variables of the template, such as enable_thinking. `end_token_ids` are taken
        in place of the model's own. Raises ConfigError without a tokenizer or a usable template, or if the template
        takes no such arguments.
        """
        check_model_dir(model_dir)
        from transformers import AutoTokenizer

        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
        except Exception as error:
            # The library raises many types for a broken file.
            raise ConfigError(
                "model_dir",
                f"cannot load a tokenizer from {model_dir}: {first_line(error)}",
                action="name a directory with tokenizer.json and tokenizer_config.json",
            ) from error
        if template_arguments and not use_chat_template:
            raise ConfigError("chat_template_arguments", "prompts go through no template", action=_SWITCH)
        if self.tokenizer.eos_token_id is None:
            raise ConfigError(
                "model_dir",
                f"the tokenizer of {model_dir} has no end-of-sequence token",
                action="set eos_token in tokenizer_config.json",
            )
        self._template = self._compiled(model_dir, template_arguments) if use_chat_template else None
        self._opening = [] if use_chat_template else _opening_of(self.tokenizer)

        self._thoughts = Thoughts(self.tokenizer)
        self._opens_thoughts = self._is_open(Prompt(index=0, text=_PROBE, answer="")) if use_chat_template else False
        self._given: GivenTokens | None = None
        self.digests = (
            tokenizer_digest(self.tokenizer),
            chat_template_digest(
                self.tokenizer, use_chat_template=use_chat_template, template_arguments=template_arguments
            ),
        )
        """Digests of tokenizer and template; equal digests mean equal ids of equal messages."""
        self.end_token_ids = self._ends(model_dir, end_token_ids)
        """Ids that end a completion: stated ones, else, ascending, of the model's files and its template."""

    def _compiled(self, model_dir: str, arguments: Mapping[str, Any]) -> ChatTemplate:
        source = source_of(self.tokenizer)
        if not source:
            raise ConfigError(
                "use_chat_template",
                f"the tokenizer of {model_dir} has no chat template",
                action="set use_chat_template = false, or add chat_template.jinja to the model's directory",
            )
        taken = arguments.keys() & _OURS
        if taken:
            raise ConfigError(
                "chat_template_arguments",
                f"{', '.join(sorted(taken))}: heterorl sets it itself",
                action="remove these names",
            )
        if any(map(has_clock, sources_of(self.tokenizer))):
            told = arguments.get(CLOCK, DATE)
            _LOG.info("the chat template may write the date, which is %s (chat_template_arguments.%s)", told, CLOCK)
        return ChatTemplate(self.tokenizer, arguments=arguments)

    def _ends(self, model_dir: str, stated: tuple[int, ...]) -> tuple[int, ...]:
        # Files that name none are no problem where the run states them.
        named = stated or end_token_ids(model_dir, self.tokenizer)
        if self._template is None:
            return named
        try:
            behind = self._template.answer_end()
        except TEMPLATE_ERRORS:
            return named
        ids = self.tokenizer.encode(behind.lstrip(), add_special_tokens=False)[:1]
        if ids and ids[0] in self.tokenizer.added_tokens_decoder:
            self._given = GivenTokens(self._template, self.tokenizer, end_token_id=ids[0])
            return stated or tuple(sorted({*named, *ids}))
        _LOG.warning(
            "the template ends an answer by %r, which is not a special token: a completion ends by the tokens %s, or by"
            " sampling.max_new_tokens (set sampling.end_token_ids)", behind, ", ".join(map(str, named)),
        )  # fmt: skip
        return named

    @property
    def eos_token_id(self) -> int:
        """Id that ends written texts, not drawn ones."""
        return int(self.tokenizer.eos_token_id)

    def encode(self, text: str) -> Int32Array:
        return self.encode_prompt(Prompt(index=0, text=text, answer=""))

    def encode_prompt(self, prompt: Prompt, *, tools: Sequence[Mapping[str, Any]] = ()) -> Int32Array:
        """A prompt's token ids with messages and tools, int32; raises PromptRefused."""
        ids = self._opened(self.tokenizer.encode(self._written(prompt, tools=tools), add_special_tokens=False))
        if not ids:
            raise PromptRefused("task", "the prompt has no tokens", action=_CORRECT)
        return np.array(ids, np.int32)

    def check_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Raise ConfigError where a prompt would not show the tools."""
        if self._template is None:
            raise ConfigError("use_chat_template", "tools are shown by a template", action=_SWITCH)
        asked = [as_variables(Message(role="user", content=_PROBE))]
        try:
            with_tools = self._template.write(asked, begins_answer=True, tools=tools)
            without = self._template.write(asked, begins_answer=True)
        except TEMPLATE_ERRORS as error:
            problem = f"the model's template refuses the tools: {first_line(error)}"
            raise ConfigError("task.environment", problem, action=_NO_TOOLS) from error
        left_out = [name for name in map(tool_name, tools) if name not in with_tools]
        if left_out or with_tools == without:
            words = ", ".join(left_out or map(tool_name, tools))
            problem = f"the model's template leaves out the tools {words}"
            raise ConfigError("task.environment", problem, action=_NO_TOOLS)

    def written_call(self, name: str, arguments: Mapping[str, Any], *, tools: Sequence[Mapping[str, Any]]) -> str:
        """Text of a tool call in the template's form; empty without one."""
        if self._template is None:
            raise ConfigError("use_chat_template", "tools are shown by a template", action=_SWITCH)
        try:
            return self._template.call(name, arguments, tools=tools)
        except TEMPLATE_ERRORS:
            return ""

    def given(self, messages: Sequence[Message], *, is_cut: bool) -> Int32Array:
        """Token ids between two turns, int32, behind the first's end token.

        They depend only on the arguments, not on the history. `messages` are the user's, tools' and the system's, at
        least one. With `is_cut` the turn ended at its token limit, so its end token is given first.

        Raises:
            ConfigError: no template is used, or it ends an answer by no special token.
            PromptRefused: the template cannot write these messages behind an answer.
        """
        return np.array(self._between().ids(messages, is_cut=is_cut), np.int32)

    def check_turns(self, prompt: Prompt, *, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Raise PromptRefused where a prompt changes the tokens between turns.
        An example is `/no_think`."""
        self._between().check_behind(messages_of(prompt), tools=tools)

    def given_problem(self, role: str, *, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Why messages of a role cannot stand between turns; empty otherwise."""
        return self._between().problem(role, tools=tools)

    def _between(self) -> GivenTokens:
        if self._given is not None:
            return self._given
        if self._template is None:
            raise ConfigError("use_chat_template", "turns of an environment need a template", action=_SWITCH)
        problem = "the model's template ends an answer by no special token, so turns cannot be told apart"
        raise ConfigError("use_chat_template", problem, action="take another model for task.environment")

    def num_tokens(self, prompts: Sequence[Prompt], *, tools: Sequence[Mapping[str, Any]] = ()) -> list[int | None]:
        """Tokens of each prompt, None where refused; one batch is faster."""
        texts: dict[int, str] = {}
        for number, prompt in enumerate(prompts):
            with suppress(PromptRefused):
                texts[number] = self._written(prompt, tools=tools)
        if not texts:
            return [None] * len(prompts)
        found = self.tokenizer(list(texts.values()), add_special_tokens=False, return_attention_mask=False)
        sizes = {number: len(self._opened(ids)) for number, ids in zip(texts, found["input_ids"], strict=True)}
        # Without tokens it is refused too.
        return [sizes.get(number) or None for number in range(len(prompts))]

    def _opened(self, ids: list[int]) -> list[int]:
        """Ids with a text's opening tokens once; a template writes its own."""
        return ids if ids[: len(self._opening)] == self._opening else [*self._opening, *ids]

    def _written(self, prompt: Prompt, *, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        if prompt.refusal:
            raise PromptRefused("task", prompt.refusal, action=_CORRECT)
        text = self._text(prompt, tools=tools)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptRefused("task", "half a surrogate pair is not text", action=_CORRECT) from error
        return text

    def _text(self, prompt: Prompt, *, tools: Sequence[Mapping[str, Any]]) -> str:
        if self._template is None:
            if tools:
                raise PromptRefused("use_chat_template", "tools are shown by a template", action=_SWITCH)
            if prompt.messages:
                problem = "prompts are messages (task.data.messages, task.system_prompt), and no template writes them"
                raise PromptRefused("use_chat_template", problem, action=_SWITCH)
            return prompt.text
        messages = messages_of(prompt)
        try:
            return self._template.write(list(map(as_variables, messages)), begins_answer=True, tools=tools)
        except TEMPLATE_ERRORS as error:
            roles = ", ".join(message.role for message in messages)
            problem = f"the model's template refuses messages of {roles}: {first_line(error)}"
            raise PromptRefused(
                "use_chat_template", problem, action="correct the data, or task.system_prompt"
            ) from error

    def _is_open(self, prompt: Prompt) -> bool:
        with suppress(PromptRefused):
            return opens_thoughts(self._written(prompt))
        return False

    def completion(self, token_ids: Int32Array, prompt: Prompt | None = None) -> str:
        """Text of a completion, or of a later turn, to be scored.

        `<think>` and `</think>` mark thoughts, also where the model has other marks. Template or prompt may open
        thoughts; without a prompt they are as behind a bare one. If they do not end, the text begins with `<think>`,
        and all of it is thoughts.
        """
        is_open = self._opens_thoughts if prompt is None else self._is_open(prompt)
        return self._thoughts.text(token_ids, is_open=is_open)

    def tokens(self, completion: str) -> Int32Array:
        """Token ids of a completion, int32, without its end."""
        return np.array(self.tokenizer.encode(completion, add_special_tokens=False), np.int32)

    def decode(self, token_ids: Int32Array, *, keeps_special: bool = False) -> str:
        """Text of a completion, by default without special tokens."""
        # Keep spaces that a tokenizer file would have cleaned up.
        text: str = self.tokenizer.decode(
            token_ids.tolist(), skip_special_tokens=not keeps_special, clean_up_tokenization_spaces=False
        )
        return text


def _opening_of(tokenizer: Any) -> list[int]:
    """Special tokens that a tokenizer puts before a text."""
    plain = tokenizer.encode(_PROBE, add_special_tokens=False)
    marked = tokenizer.encode(_PROBE)
    starts = [start for start in range(len(marked)) if marked[start : start + len(plain)] == plain]
    return list(marked[: starts[0]]) if starts else []


def end_token_ids(model_dir: str, tokenizer: Any) -> tuple[int, ...]:
    """Ascending end ids of the model's files and tokenizer; raises ConfigError."""
    named = _named(model_dir)
    listed = named if isinstance(named, list) else [] if named is None else [named]
    # Exactly: true is an int too.
    if not all(type(number) is int and number >= 0 for number in listed) or len(listed) >= MAX_END_TOKENS:
        raise ConfigError(
            "model_dir",
            f"{_ENDS} in the files of {model_dir} is not a list of token ids: {named!r}"[:300],
            action="correct the file, or set sampling.end_token_ids",
        )
    own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    return tuple(sorted({*listed, *own}))


def _named(model_dir: str) -> Any:
    config = _read(model_dir, "config.json")
    # A model with an inner text model has it there.
    inner = config.get("text_config")
    files = (_read(model_dir, "generation_config.json"), config, inner if isinstance(inner, dict) else {})
    return next((each[_ENDS] for each in files if each.get(_ENDS) is not None), None)


def _read(model_dir: str, name: str) -> dict[str, Any]:
    """A JSON file of a model; empty where there is none."""
    from transformers.utils.hub import cached_file

    try:
        path = cached_file(model_dir, name)
        if path is None:
            return {}
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError:
        return {}
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            "model_dir",
            f"{name} of {model_dir} is not JSON: {error}",
            action="copy the file from the model's source again",
        ) from error
    return content if isinstance(content, dict) else {}


def tokenizer_digest(tokenizer: Any) -> Digest:
    """Digest of the fast tokenizer, or of vocabulary, with special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    return bytes_digest(f"{text}\n{sorted(tokenizer.special_tokens_map.items())}".encode())


def chat_template_digest(
    tokenizer: Any, *, use_chat_template: bool, template_arguments: Mapping[str, Any] = MappingProxyType({})
) -> Digest:
    """Digest of templates, their arguments and date; without one, of no bytes."""
    if not use_chat_template:
        return bytes_digest(b"")
    source, arguments = "\0".join(sources_of(tokenizer)), dict(template_arguments)
    if has_clock(source):
        arguments.setdefault(CLOCK, DATE)
    written = f"\n{json.dumps(arguments, sort_keys=True)}" if arguments else ""
    return bytes_digest(f"{source}{written}".encode())
