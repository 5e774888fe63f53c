"""A row of the spool: whether its bytes are the group that was spooled, and what takes its place if not. Pure."""

from __future__ import annotations

import numpy as np
import xxhash

from heterorl.common.errors import MalformedPayload
from heterorl.common.types.common import Digest
from heterorl.common.types.rollout import Group, GroupId, SealedGroup
from heterorl.common.wire.seal import read_sealed


def checksum_of(sequence: int, data: bytes) -> bytes:
    """xxh3-64 of a row, 8 bytes; its place is part of it."""
    return xxhash.xxh3_64_digest(data, seed=sequence)


def group_of(sequence: int, payload: bytes, checksum: bytes) -> SealedGroup | str:
    """The group of a row, or what is wrong with it."""
    if checksum != checksum_of(sequence, payload):
        return "its bytes changed on disk"
    try:
        group = read_sealed(payload)
    except MalformedPayload as error:
        return str(error)
    return group if group.id.sequence == sequence else "it is another group"


def empty_group(group_id: GroupId) -> Group:
    """A group that settles its sequence and nothing else: without rollouts it is refused for good."""
    return Group(
        id=group_id, assignment=0, prompt_index=0, prompt_token_ids=np.zeros(0, np.int32), rollouts=(),
        oldest_version=0, state_root=Digest(""), generation_s=0.0,
    )  # fmt: skip
