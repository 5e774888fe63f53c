"""Families of chat models for tests of turns: their templates, their special tokens, and small tokenizers of their kind."""

from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from heterorl.common.text.prompter import Prompter
from tests.support.tokenizers import fast, sentencepiece

QWEN3 = (Path(__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
"""Of Qwen3 itself (Apache 2.0), to the byte: tools, and thoughts that are left out of earlier turns."""
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""As SmolLM2 has it: every role is written, no tools."""
LLAMA3 = (
    "{{- bos_token }}{%- if messages[0]['role'] == 'system' %}{%- set told = messages[0]['content'] | trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set told = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}"
    "{%- if tools is not none %}{{- 'Environment: ipython\\n' }}{%- endif %}{{- told + '<|eot_id|>' }}"
    "{%- if tools is not none %}{%- set asked = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}"
    "{{- '<|start_header_id|>user<|end_header_id|>\\n\\nRespond in the format "
    '{"name": function name, "parameters": dictionary of argument name and its value}.\\n\\n\' }}'
    "{%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{%- endfor %}{{- asked + '<|eot_id|>' }}{%- endif %}"
    "{%- for message in messages %}{%- if 'tool_calls' in message %}"
    "{%- if message.tool_calls | length != 1 %}{{- raise_exception('single tool-calls only') }}{%- endif %}"
    "{%- set call = message.tool_calls[0].function %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
    '{{- \'{"name": "\' + call.name + \'", "parameters": \' + (call.arguments | tojson) + "}<|eot_id|>" }}'
    "{%- elif message.role == 'tool' %}"
    "{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' }}{%- else %}"
    "{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
"""As Llama 3.2 has it: tools in the first message of the user, results as JSON under the role ipython."""
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
"""As Gemma has it: no system's turn, no tools, roles that alternate."""

TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Find a \u00b5.",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
        },
    },
)
"""One tool, as its JSON schema."""
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Tokens of Qwen3 that decoded text keeps."""
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEXT = [
    "system user assistant ipython tool You are a helpful assistant. the number is higher lower guess again 12 34\n\n"
]


def words_of(*, eos, are_tags_special=False, **special):
    """A byte-level BPE that splits words as Qwen3's and Llama 3's do; `special` are options of its end of turn."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[*MARKS[:2]], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator(_TEXT * 3, trainer)
    made.add_special_tokens([AddedToken(mark, normalized=False, **special) for mark in MARKS[2:]])
    add_tags = made.add_special_tokens if are_tags_special else made.add_tokens
    add_tags([AddedToken(tag, normalized=False) for tag in TAGS])
    return fast(made, None, eos_token=eos, bos_token=MARKS[0])


def pieces_of():
    """A Unigram with the marks of Gemma, which puts no space before a text."""
    made = sentencepiece()
    made.backend_tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    made.backend_tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    made.add_special_tokens({"additional_special_tokens": ["<start_of_turn>", "<end_of_turn>"]})
    return made


FAMILIES = {
    "qwen3": (QWEN3, lambda: words_of(eos="<|im_end|>")),
    "chatml": (CHATML, lambda: words_of(eos="<|im_end|>")),
    "llama3": (LLAMA3, lambda: words_of(eos="<|eot_id|>")),
    "gemma": (GEMMA, pieces_of),
}
"""Template and tokenizer by family."""


def prompter_of(directory, template, tokenizer, **arguments):
    """A Prompter of a directory that has a tokenizer and no weights."""
    tokenizer.chat_template = template
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text("{}")
    return Prompter(str(directory), use_chat_template=True, template_arguments=arguments)


def save_chat_model(directory, template=CHATML):
    """Write a small random model that speaks a template, with 512 positions; about 100 kB."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = words_of(eos="<|im_end|>")
    tokenizer.chat_template = template
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
