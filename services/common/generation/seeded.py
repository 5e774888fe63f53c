"""Noise that names decide: whoever knows a token's name can repeat its draw, and nobody chooses it.

Guarantees: the same bits on every machine and for every batch; the noise of a token depends on its group's key, its
place in the group and its position alone. The key comes from the seed that the coordinator assigned, the state root of
the weights and the prompt, so a site that follows it has nothing to choose among.

key = blake2b-128("heterorl-gumbel-1/SEED/STATE_ROOT/PROMPT_INDEX"), little-endian. A token's 128 bits are blake2b-128
of key (16 bytes), sample and position (4 bytes each, little-endian): the key of a Philox4x64-10 stream, whose 32-bit
words u, low half of each output first, become g = -log(-log((u + 0.5) / 2^32)). The token is
argmax(logits / temperature + g): the Gumbel-max trick (Gumbel, 1954; Maddison et al., arXiv 1411.0030).
"""

from __future__ import annotations

import hashlib

import numpy as np

from heterorl.common.types.common import Float32Array

KEY_BYTES = 16


def group_key(*, seed: int, state_root: str, prompt_index: int) -> int:
    """Key of a group's noise, 128 bits.

    Args:
        seed: of the group's assignment.
        state_root: of the weights that it is generated with.
        prompt_index: position of the prompt in the task.
    """
    text = f"heterorl-gumbel-1/{seed}/{state_root}/{prompt_index}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest(), "little")


def gumbel_noise(key: int, *, sample: int, position: int, vocab_size: int) -> Float32Array:
    """Standard Gumbel noise [V] of one token.

    Args:
        key: of the group.
        sample: place of the rollout in the group, from 0.
        position: of the token in the completion, from 0.
        vocab_size: number of token ids.
    """
    name = key.to_bytes(KEY_BYTES, "little") + sample.to_bytes(4, "little") + position.to_bytes(4, "little")
    words = np.frombuffer(hashlib.blake2b(name, digest_size=KEY_BYTES).digest(), "<u8")
    raw = np.random.Philox(key=words).random_raw((vocab_size + 1) // 2)
    uniform = (raw.astype("<u8").view("<u4")[:vocab_size] + 0.5) / 2.0**32
    return (-np.log(-np.log(uniform))).astype(np.float32)
