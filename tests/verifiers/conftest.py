"""What needs the package verifiers is collected where it is installed: `make test-verifiers`."""

from importlib.util import find_spec

# A folder of this name is found too, but not with a version of its own.
_SPEC = find_spec("verifiers.v1") if find_spec("verifiers") else None
collect_ignore_glob = [] if _SPEC else ["test_*.py"]
