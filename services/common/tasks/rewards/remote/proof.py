"""What a reward service signs, so that no site can state another value: Ed25519 over one completion's reward.

    "heterorl reward 2\\n" NAME "\\n" MESSAGES "\\n" SHA256(completion) "\\n" SHA256(answer) "\\n" VALUE

NAME is the reward's name in the configuration. MESSAGES is the SHA256 of SHA256(role) SHA256(content) of all messages
of the prompt in their order, as the request lists them. Every digest is of UTF-8 text and written in lower-case hex,
also where it is digested again. VALUE is the IEEE 754 double in big-endian order, in lower-case hex. A signature says
nothing of who asked: the same question may be stated again, and have the same reward. It says nothing of a group
either, so a reward that looks at all completions of a prompt cannot be signed.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence

from heterorl.common.identity.signing import Signer, signed_by
from heterorl.common.tasks.messages import messages_of
from heterorl.common.tasks.task import Message, Prompt


def statement(name: str, messages: Sequence[Message], completion: str, answer: str, value: float) -> bytes:
    """The bytes that are signed."""
    asked = _digest("".join(_digest(turn.role) + _digest(turn.content) for turn in messages))
    words = ["heterorl reward 2", name, asked, _digest(completion), _digest(answer), struct.pack(">d", value).hex()]
    return "\n".join(words).encode()


def sign(signer: Signer, name: str, messages: Sequence[Message], completion: str, answer: str, value: float) -> bytes:
    """A service's signature, 64 bytes."""
    return signer.sign(statement(name, messages, completion, answer, value))


def is_signed(
    signature: bytes, keys: Iterable[str], *, name: str, prompt: Prompt, completion: str, value: float
) -> bool:
    """Whether one of the keys made the signature of just this reward."""
    signed = statement(name, messages_of(prompt), completion, prompt.answer, value)
    return signed_by(signed, signature, keys) is not None


def _digest(text: str) -> str:
    # A model can be made to draw half a surrogate pair, which has no UTF-8.
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
