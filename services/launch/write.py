"""Write a rendered tree to a directory that holds nothing yet."""

from __future__ import annotations

from pathlib import Path

from heterorl.common.errors import ConfigError
from heterorl.launch.texts import Tree


def write_tree(tree: Tree, directory: Path) -> None:
    """Write every text; scripts may be run.

    Raises:
        ConfigError: the directory holds something already, or cannot be written.
    """
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise ConfigError("--out", f"{directory} exists and is not empty", action="name a new directory")
        for path, text in sorted(tree.items()):
            target = directory / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
            target.chmod(0o755 if path.endswith(".sh") else 0o644)
    except OSError as error:
        raise ConfigError("--out", f"cannot write {directory}: {error.strerror}") from error
