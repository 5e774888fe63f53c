"""The console script: nothing is imported before Ctrl-C is understood."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; Ctrl-C while it is loaded ends it without a traceback, exit code 130."""
    try:
        from heterorl.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
