"""A group <-> the message that pushes it, which is never longer than the coordinator takes."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np

from heterorl.common.types.values import Group
from heterorl.common.wire.groups import group_to_pb
from heterorl.v1 import rollout_pb2

_LOG = logging.getLogger(__name__)


def push_to_pb(group: Group, *, limit_bytes: int) -> rollout_pb2.PushGroupsRequest:
    """The message of a group; of one that no message has room for, its shell.

    The shell has no rollouts, so the coordinator refuses it for good and counts it. Were it never sent, everything
    behind it in the outbox would wait for ever; were it dropped here, its sequence would be missing for ever.
    """
    message = rollout_pb2.PushGroupsRequest(group=group_to_pb(group))
    if message.ByteSize() <= limit_bytes:
        return message
    _LOG.error(
        "group %d of site %s is lost: its message has %d bytes, the coordinator's max_message_bytes is %d",
        group.id.sequence,
        group.id.site,
        message.ByteSize(),
        limit_bytes,
    )
    shell = dataclasses.replace(group, rollouts=(), prompt_token_ids=np.zeros(0, np.int32))
    return rollout_pb2.PushGroupsRequest(group=group_to_pb(shell))
