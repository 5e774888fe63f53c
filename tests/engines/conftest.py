"""These tests need optional engines and run in an environment of their own: `make test-engines`."""

import importlib.util

_NEEDS = {"test_deepspeed_*.py": "deepspeed"}
collect_ignore_glob = [pattern for pattern, package in _NEEDS.items() if importlib.util.find_spec(package) is None]
