"""From the name of a data set to its rows: the repository at its commit, or files of this machine."""

from __future__ import annotations

from pathlib import Path

from heterorl.common.errors import ConfigError
from heterorl.common.tasks.sources.config import DataConfig
from heterorl.common.tasks.sources.files import Loaded, load_directory, load_parquet
from heterorl.common.tasks.sources.name import parse
from heterorl.common.tasks.sources.revision import pinned
from heterorl.common.tasks.sources.snapshot import snapshot


def open_repository(text: str, config: DataConfig, *, notes: Path | None) -> tuple[Loaded, Loaded | None]:
    """Rows to train on, and those of the held-out split where one is named.

    Args:
        text: `NAME@REVISION[split]`, or a directory with its split.
        config: which subset and files.
        notes: see `revision.pinned`.

    Raises:
        ConfigError: no such set, revision, subset or split.
        DependencyMissing: the datasets library is not installed.
    """
    key = "task.name"
    name = parse(key, text)
    if name.is_local:
        directory = Path(name.place).expanduser()
    else:
        commit = pinned(key, name, notes=notes, cache_dir=config.cache_dir)
        directory = snapshot(key, name, commit, files=config.files, cache_dir=config.cache_dir)

    def load(key: str, split: str) -> Loaded:
        return load_directory(
            key, directory, split=split, subset=config.subset, files=config.files, cache_dir=config.cache_dir
        )

    held_out = load("task.data.evaluation_split", config.evaluation_split) if config.evaluation_split else None
    return load(key, name.split), held_out


def open_parquet(path: str, evaluation_path: str, config: DataConfig) -> tuple[Loaded, Loaded | None]:
    """Rows of one Parquet file or of all that a pattern names, and those of a held-out one.

    Raises:
        ConfigError: a file is not there, or not Parquet.
        DependencyMissing: the datasets library is not installed.
    """
    if config.evaluation_split:
        raise ConfigError("task.data.evaluation_split", "files have no splits", action="name task.evaluation_path")
    held_out = None
    if evaluation_path:
        held_out = load_parquet("task.evaluation_path", evaluation_path, cache_dir=config.cache_dir)
    return load_parquet("task.name", path, cache_dir=config.cache_dir), held_out
