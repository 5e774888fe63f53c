"""What needs an engine's package is collected where the package is: `make test-engines`."""

from importlib.util import find_spec

collect_ignore_glob = [pattern for module, pattern in (("vllm", "test_vllm_*.py"), ("deepspeed", "test_deepspeed_*.py"))
                       if find_spec(module) is None]  # fmt: skip
