"""The device of tests that need a GPU, as in tests/gpu."""

from tests.gpu.conftest import cuda, device, pytest_collection_modifyitems  # noqa: F401
