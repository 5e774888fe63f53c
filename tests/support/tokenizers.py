"""Small tokenizers of the two families that models have: byte-level BPE, and SentencePiece's Unigram."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|end|>", "<|im_start|>", "<|im_end|>", "<s>")
"""Of `words`, in the order of their ids."""


def words(*, eos, post=None, chat_template=None, **more):
    """A byte-level BPE with SPECIAL; `post` adds tokens around a text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator(["one plus two is three, four"] * 3, trainer)
    if post is not None:
        made.post_processor = post
    return fast(made, chat_template, eos_token=eos, **more)


def sentencepiece(*, chat_template=None, **more):
    """A Unigram with bytes for what it does not know, as Llama 2, Mistral and Gemma have it."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{number:02X}>" for number in range(256)),
        *"abcdefghijklmnopqrstuvwxyz0123456789",
    ]
    pieces += [
        *"():=,.!?'\n",
        "\u2581",
        "\u2581\u2581",
        "\u2581,",
        "\u2581.",
        "\u2581!",
        "\u2581?",
        "\u2581=",
        "\u2581'",
        "\u2581x",
    ]
    scores = [(piece, -10.0 if piece.startswith("<0x") else len(piece) - 5.0) for piece in pieces]
    made = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return fast(made, chat_template, unk_token="<unk>", bos_token="<s>", eos_token="</s>", **more)


def fast(made, chat_template, **more):
    """As transformers takes it."""
    fast = PreTrainedTokenizerFast(tokenizer_object=made, **more)
    if chat_template is not None:
        fast.chat_template = chat_template
    return fast
