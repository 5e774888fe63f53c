"""What needs an engine's package is collected where the package is: `make test-engines`."""

from importlib.util import find_spec

NEEDS = (("vllm", "test_vllm_*.py"), ("deepspeed", "test_deepspeed_*.py"), ("vllm", "test_deployed_*.py"))
collect_ignore_glob = [pattern for module, pattern in NEEDS if find_spec(module) is None]
