"""Commands of rank 0 to the other ranks, as bytes.

    u32 little-endian length n; n bytes of JSON {"do": ..., "groups": [...], ...}; blobs of those sizes

Blobs are groups in their wire form, of `heterorl.common.wire.sealed_groups`. That form has no mark of stale tokens:
`stale` has numbers of their group, rollout and span.
"""

import json
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from pathlib import Path

from heterorl.common.types.rollout import Group
from heterorl.common.wire.sealed_groups import open_group, read_sealed, seal


class Do(Enum):
    """Methods of ShardedBackend that all ranks take part in, and the end."""

    TRAIN = "train"
    STORE = "store"
    LOAD_PUBLISHED = "load_published"
    FREEZE = "freeze"
    RESTORE = "restore"
    STAGE = "stage"
    CODE = "code"
    DIVIDE = "divide"
    WHOLE = "whole"
    STOP = "stop"


AGREED = frozenset({Do.FREEZE, Do.RESTORE, Do.STAGE})
"""Commands that raise a HeterorlError on all ranks or on none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command.

    Example: Command(do=Do.RESTORE, directory=Path("v00000001/backend"))
    """

    do: Do
    groups: Sequence[Group] = ()
    head_version: int = 0
    step: int = 0
    directory: Path = Path()
    keep_optimizer: bool = False
    version: int = -1
    """Number of the sharded weights that the command makes or reads; -1 for none."""
    before: int | None = None
    """Number of the weights that a delta starts from."""
    kept: Sequence[int] = ()
    """Numbers of all weights that are still needed."""
    threads: int = 1


def command_to_bytes(command: Command) -> bytes:
    """Write a command."""
    blobs = [seal(group).data for group in command.groups]
    plain = {
        "do": command.do.value,
        "directory": str(command.directory),
        "groups": [len(blob) for blob in blobs],
        "stale": [place for number, group in enumerate(command.groups) for place in _stale_of(number, group)],
    }
    text = json.dumps({field.name: getattr(command, field.name) for field in fields(command)} | plain).encode()
    return len(text).to_bytes(4, "little") + text + b"".join(blobs)


def command_from_bytes(data: bytes) -> Command:
    """Read a command of another rank of the same learner."""
    start = 4 + int.from_bytes(data[:4], "little")
    header = json.loads(data[4:start])
    groups = []
    stale = {tuple(place) for place in header.pop("stale")}
    for number, size in enumerate(header["groups"]):
        group = open_group(read_sealed(data[start : start + size]))
        groups.append(_with_stale(number, group, stale) if stale else group)
        start += size
    read = {
        "do": Do(header["do"]),
        "directory": Path(header["directory"]),
        "groups": tuple(groups),
        "kept": tuple(header["kept"]),
    }
    return Command(**header | read)


def _stale_of(number: int, group: Group) -> Iterator[tuple[int, int, int]]:
    for member, rollout in enumerate(group.rollouts):
        yield from ((number, member, place) for place, span in enumerate(rollout.spans) if span.is_stale)


def _with_stale(number: int, group: Group, stale: Container[object]) -> Group:
    rollouts = tuple(
        replace(
            rollout,
            spans=tuple(
                replace(span, is_stale=(number, member, place) in stale) for place, span in enumerate(rollout.spans)
            ),
        )
        for member, rollout in enumerate(group.rollouts)
    )
    return replace(group, rollouts=rollouts)
