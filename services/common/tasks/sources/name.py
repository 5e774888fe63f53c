"""`hf:NAME@REVISION[split]` in its parts; a local directory is `hf:/path/to/it[split]`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from heterorl.common.errors import ConfigError

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
