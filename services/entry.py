"""The console script. It handles Ctrl-C before it imports anything else."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; Ctrl-C during its import exits with code 130."""
    try:
        from heterorl.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
