"""A repository of the hub as a directory: downloaded once, from then on without a network (HF_HUB_OFFLINE=1)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from heterorl.common.errors import ConfigError, DependencyMissing
from heterorl.common.tasks.sources.name import HubName


def commit_of(key: str, name: HubName, *, cache_dir: str) -> str:
    """The commit that a branch or tag stands at: as the hub says or, without it, the cache.

    Raises:
        ConfigError: neither knows it.
    """
    # Of a directory of the cache the name is the commit; one small file brings it.
    return _download(key, name, name.revision, files=("README.md",), cache_dir=cache_dir).name


def snapshot(key: str, name: HubName, commit: str, *, files: Sequence[str], cache_dir: str) -> Path:
    """The directory of a repository at a commit.

    Args:
        key: of the configuration, for errors.
        name: the repository.
        commit: which state of it.
        files: patterns of what is downloaded; none takes everything.
        cache_dir: where downloads lie; empty is the library's own place.

    Raises:
        ConfigError: it is not in the cache and cannot be downloaded.
    """
    return _download(key, name, commit, files=(*files, "README.md") if files else (), cache_dir=cache_dir)


def _download(key: str, name: HubName, revision: str, *, files: Sequence[str], cache_dir: str) -> Path:
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
