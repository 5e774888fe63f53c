"""A row of the spool: whether its bytes are the group that was spooled, and what takes its place if not. Pure."""

from __future__ import annotations

import numpy as np
import xxhash

from heterorl.common.errors import InvalidRequest, MalformedPayload
from heterorl.common.types.common import Digest
from heterorl.common.types.rollout import Group, GroupId, SealedGroup
from heterorl.common.wire.seal import open_group, read_sealed


def checksum_of(sequence: int, data: bytes) -> bytes:
    """xxh3-64 of a row, 8 bytes; its place is part of it."""
    return xxhash.xxh3_64_digest(data, seed=sequence)


def group_of(sequence: int, payload: bytes, checksum: bytes | None) -> SealedGroup | str:
    """The group of a row, or what is wrong with it; a row of an earlier program has no checksum."""
    if checksum is not None and checksum != checksum_of(sequence, payload):
        return "its bytes changed on disk"
    try:
        group = read_sealed(payload)
        if checksum is None:
            # There, only what is inside can tell.
            open_group(group)
    except (MalformedPayload, InvalidRequest) as error:
        return str(error)
    return group if group.id.sequence == sequence else "it is another group"


def empty_group(group_id: GroupId) -> Group:
    """A group that settles its sequence and nothing else: without rollouts it is refused for good."""
    return Group(
        id=group_id, assignment=0, prompt_index=0, prompt_token_ids=np.zeros(0, np.int32), rollouts=(),
        oldest_version=0, state_root=Digest(""), generation_s=0.0,
    )  # fmt: skip
