"""Starts heterorl where the user's own project has a package or a directory called `services`, too.

Our packages are found by the place of this file, whatever PYTHONPATH and the working directory say. Console script and
`python -m heterorl` call `main`; processes of our own are started as `python -P launch.py MODULE ARGUMENTS`.
"""

from __future__ import annotations

import importlib
import importlib.util
import runpy
import sys
from pathlib import Path


def pin() -> str:
    """Make the names `heterorl` and `services` ours in this process; returns the version."""
    own = Path(__file__).resolve().parent
    # A checkout keeps generated code apart; a wheel has both side by side.
    is_checkout = own.parts[-3:] == ("protos", "gen", "heterorl")
    places = {"heterorl": own, "services": (own.parents[2] if is_checkout else own.parent) / "services"}
    for name, place in places.items():
        loaded = sys.modules.get(name)
        if loaded is not None and str(place) in map(str, getattr(loaded, "__path__", ())):
            continue
        spec = importlib.util.spec_from_file_location(
            name, place / "__init__.py", submodule_search_locations=[str(place)]
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return str(sys.modules["services"].__version__)


# At once: a process that `multiprocessing` starts reads this file again, and calls no `main`.
pin()


def main() -> None:
    """Run the command line."""
    importlib.import_module("services.entry").main()


if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
