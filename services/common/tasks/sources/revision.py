"""The commit that a branch or tag of the hub stood at when this node first started; from then on it is that one.

A branch moves: nodes that start on two days would train on two sets. The note in the node's own directory keeps a
restart where it was, and the contract's digest tells a node that reads another commit than the learner.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from heterorl.common.errors import ConfigError
from heterorl.common.process.files import replacing
from heterorl.common.tasks.sources.name import HubName
from heterorl.common.tasks.sources.snapshot import commit_of

NOTES = "sources.json"
"""File of the notes, in the directory of a node's state."""
_LOG = logging.getLogger(__name__)


def pinned(key: str, name: HubName, *, notes: Path | None, cache_dir: str) -> str:
    """The commit to read.

    Args:
        key: of the configuration, for errors.
        name: what it says; a commit is taken as it is.
        notes: file of what was resolved before; None keeps no notes.
        cache_dir: where downloads lie; empty is the library's own place.

    Raises:
        ConfigError: no revision is named, or it cannot be resolved.
    """
    if name.is_pinned:
        return name.revision
    if not name.revision:
        problem = f"hf:{name.place} names no revision"
        raise ConfigError(key, problem, action=f"write hf:{name.place}@REVISION[{name.split}], a commit or a branch")
    known = _read(key, notes)
    written = f"{name.place}@{name.revision}"
    if written in known:
        return known[written]
    commit = commit_of(key, name, cache_dir=cache_dir)
    _LOG.warning(
        "%s: %s of %s is commit %s from now on; %s says so on every node",
        key, name.revision, name.place, commit, name.at(commit),
    )  # fmt: skip
    if notes is not None:
        notes.parent.mkdir(parents=True, exist_ok=True)
        with replacing(notes) as file:
            file.write(json.dumps({**known, written: commit}, indent=1).encode())
    return commit


def _read(key: str, notes: Path | None) -> dict[str, str]:
    if notes is None or not notes.exists():
        return {}
    try:
        known = json.loads(notes.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(key, f"cannot read {notes}: {error}", action="remove it to resolve branches anew") from error
    return {str(written): str(commit) for written, commit in known.items()}
