"""A small Qwen3-architecture model with its own tokenizer, in Hugging Face format: what tests and demo train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from heterorl.common.model.building import BUILDING

ALPHABET = "0123456789+-*=() "
EOS = "<eos>"
PAD = "<pad>"


def build_tokenizer() -> Any:
    """One token a character; anything outside the alphabet is the padding token."""
    from transformers import PreTrainedTokenizerFast

    vocabulary = {text: number for number, text in enumerate([PAD, EOS, *ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, unk_token=PAD)


def write_tiny_model(directory: Path, *, seed: int, hidden_size: int = 64, num_layers: int = 2) -> Path:
    """Write a randomly initialised model and its tokenizer; equal arguments give equal bytes of weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = build_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=hidden_size // 4,
        max_position_embeddings=256,
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
