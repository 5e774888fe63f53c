"""Digests as peers write them: checked where they enter, so that no other text can ever be a file's name."""

from __future__ import annotations

from heterorl.common.errors import InvalidRequest, MalformedPayload
from heterorl.common.types.common import Digest

DIGEST_CHARACTERS = 64
_HEX = frozenset("0123456789abcdef")


def is_digest(text: str) -> bool:
    """Whether a text is a blake3-256 in lower-case hex and nothing else."""
    return len(text) == DIGEST_CHARACTERS and _HEX.issuperset(text)


def digest_field(key: str, text: str) -> Digest:
    """Check a digest that came from a peer, so that it can never be a path.

    Raises:
        InvalidRequest: not 64 lower-case hexadecimal digits.
    """
    if not is_digest(text):
        raise InvalidRequest(f"{key}: not a blake3 digest in lower-case hex")
    return Digest(text)


def file_name(digest: str) -> str:
    """The name of the file that holds this content.

    Raises:
        MalformedPayload: not a digest, whoever forgot to check it.
    """
    if not is_digest(digest):
        raise MalformedPayload("a payload is named by something that is no digest")
    return digest
