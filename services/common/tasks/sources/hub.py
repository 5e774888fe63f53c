"""Data sets of the hub: a name, the commit that it stands for, and that commit as a directory.

A branch moves: nodes that start on two days would train on two sets. So a branch or tag is the commit that it stood at
when this node first started. The note in the node's own directory keeps a restart where it was, and the contract's
digest tells a node that reads another commit than the learner. A repository is downloaded once, from then on without a
network (HF_HUB_OFFLINE=1).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from heterorl.common.errors import ConfigError, DependencyMissing
from heterorl.common.process.files import replacing

_FORM = re.compile(r"(?P<place>[^@\[\]]+)(@(?P<revision>[^@\[\]]+))?(\[(?P<split>.+)\])?")
_LOCAL = re.compile(r"(?P<place>[/.~][^\[\]]*)(\[(?P<split>.+)\])?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A data set of the hub, or a directory of this machine.

    Example: HubName(place="openai/gsm8k", revision="e53f048856ff4f594e959d75785d2c2d37b678ee", split="train")
    """

    place: str
    revision: str
    split: str

    @property
    def is_local(self) -> bool:
        """Whether it is a directory here."""
        return self.place.startswith(("/", ".", "~"))

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, which never means anything else."""
        return bool(_COMMIT.fullmatch(self.revision))

    def at(self, commit: str) -> str:
        """The name as one writes it, with a commit."""
        return f"hf:{self.place}@{commit}[{self.split}]"


def parse(key: str, text: str) -> HubName:
    """Read what stands after `hf:`.

    Raises:
        ConfigError: it is not of that form; names `key`.
    """
    found = _LOCAL.fullmatch(text) or _FORM.fullmatch(text)
    if found is None:
        raise ConfigError(
            key, f"hf:{text} is not hf:NAME@REVISION[split]", action="for example hf:acme/sums@main[train]"
        )
    parts = found.groupdict()
    return HubName(place=parts["place"], revision=parts.get("revision") or "", split=parts["split"] or "train")


NOTES = "sources.json"
"""File of the notes, in the directory of a node's state."""
_LOG = logging.getLogger(__name__)


def pinned(key: str, name: HubName, *, notes: Path | None, cache_dir: str) -> str:
    """The commit to read.

    The file `notes` has what was resolved before, and errors name `key`. An empty `cache_dir` is the library's own
    place.

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
    # Of a directory of the cache the name is the commit; one small file brings it.
    commit = download(key, name, name.revision, files=("README.md",), cache_dir=cache_dir).name
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


def download(key: str, name: HubName, revision: str, *, files: Sequence[str], cache_dir: str) -> Path:
    """The directory of a repository at a revision: as the hub says or, without it, the cache.

    Only what the patterns `files` name is downloaded, and everything where there are none.

    Raises:
        ConfigError: it is not in the cache and cannot be downloaded.
        DependencyMissing: the library of the hub is not installed.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise DependencyMissing("huggingface_hub", "data") from error
    try:
        place = snapshot_download(
            name.place,
            repo_type="dataset",
            revision=revision,
            allow_patterns=list(files) or None,
            cache_dir=str(Path(cache_dir) / "hub") if cache_dir else None,
        )
    except (OSError, ValueError) as error:
        problem = f"cannot get {name.place} at {revision} from the hub: {str(error).splitlines()[0]}"
        raise ConfigError(
            key, problem, action="correct the name, or copy the cache of a machine that has it"
        ) from error
    return Path(place)
