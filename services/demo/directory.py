"""The demonstration's directory: recognised by a marker, held by one demonstration at a time.

Guarantees: of an existing directory only what an earlier demonstration wrote is deleted, by name; a directory that
holds anything but has no marker is refused untouched.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from heterorl.common.errors import ConfigError
from heterorl.common.process.files import try_lock
from heterorl.demo.config import SITES
from heterorl.report.figures import PICTURES

MARKER = ".heterorl-demo"
RESULTS = (
    *("certs", "config", "logs", "coordinator", "learner", *SITES),
    *("model", "model.writing", "summary.json", "report.html"),
)
OWN = (*RESULTS, *(f"{name}.png" for name in PICTURES))
_NOTE = "Written by `heterorl demo`. Its next run with this --out replaces its own results here, and nothing else.\n"


@contextlib.contextmanager
def claim(out: Path) -> Iterator[Path]:
    """Create the directory, or take over an earlier demonstration's and delete that one's results.

    Raises:
        ConfigError: the directory is somebody else's, cannot be written, or another demonstration runs in it.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError("--out", f"{out} is not a directory")
    try:
        if out.is_dir() and any(out.iterdir()) and not (out / MARKER).is_file():
            raise ConfigError(
                "--out",
                f"{out} is not empty and was not written by the demo; nothing in it was touched",
                action="name a new or an empty directory",
            )
        out.mkdir(parents=True, exist_ok=True)
        file = (out / MARKER).open("a", encoding="ascii")
    except OSError as error:
        raise ConfigError("--out", f"cannot write to {out}: {error.strerror}") from error
    with file:
        # The children do not inherit it.
        if not try_lock(file):
            raise ConfigError("--out", f"another demo is running in {out}", action="name another directory")
        if file.tell() == 0:
            file.write(_NOTE)
            file.flush()
        for name in OWN:
            _remove(out / name)
        yield out


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
