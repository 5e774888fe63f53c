"""Processes in which a module is another one than on the disk: a `sitecustomize` changes it once it is imported."""

from __future__ import annotations

from pathlib import Path

_SOURCE = """
import importlib.abc, importlib.machinery, sys
{before}
def change(module):
    {change}
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "{module}":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        own = spec.loader.exec_module
        def exec_module(module):
            own(module)
            change(module)
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Finder())
"""


def patched_path(directory: Path, module: str, change: str, before: str = "") -> Path:
    """A directory for the head of PYTHONPATH.

    Args:
        directory: where; it is made.
        module: the name of the module.
        change: one line of Python over `module`.
        before: what that line needs.
    """
    directory.mkdir()
    source = _SOURCE.format(module=module, change=change, before=before)
    (directory / "sitecustomize.py").write_text(source, encoding="utf-8")
    return directory
