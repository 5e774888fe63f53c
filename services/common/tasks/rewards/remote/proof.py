"""What a reward service signs, so that no site can state another value: Ed25519 over one completion's reward.

    "heterorl reward 1\\n" NAME "\\n" SHA256(prompt) "\\n" SHA256(completion) "\\n" VALUE

NAME is the reward's name in the configuration; the digests are of UTF-8 text, in lower-case hex; VALUE is the IEEE 754
double in big-endian order, in lower-case hex. A signature says nothing of who asked: the same prompt and completion may
be stated again, and have the same reward.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

from heterorl.common.identity.signing import Signer, signed_by


def statement(name: str, prompt: str, completion: str, value: float) -> bytes:
    """The bytes that are signed."""
    # A model can be made to draw half a surrogate pair, which has no UTF-8.
    digests = [hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest() for text in (prompt, completion)]
    return "\n".join(["heterorl reward 1", name, *digests, struct.pack(">d", value).hex()]).encode()


def sign(signer: Signer, name: str, prompt: str, completion: str, value: float) -> bytes:
    """A service's signature, 64 bytes."""
    return signer.sign(statement(name, prompt, completion, value))


def is_signed(signature: bytes, keys: Iterable[str], *, name: str, prompt: str, completion: str, value: float) -> bool:
    """Whether one of the keys made the signature of just this reward."""
    return signed_by(statement(name, prompt, completion, value), signature, keys) is not None
