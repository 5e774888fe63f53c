"""What needs a GPU: `make test-gpu`. On a machine without one all is skipped.

TEST_DEVICE=cpu runs what needs none of it on the CPU, to see that the tests themselves work.
"""

import os

import pytest
import torch

DEVICE = os.environ.get("TEST_DEVICE", "cuda")


def pytest_collection_modifyitems(items):
    if DEVICE == "cuda" and not torch.cuda.is_available():
        for item in items:
            if item.path.parent.name == "gpu":
                item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))


@pytest.fixture
def device():
    # TF32 keeps 10 bits of fp32 products: the comparisons are with real fp32.
    torch.backends.cuda.matmul.allow_tf32 = False
    return DEVICE


@pytest.fixture
def cuda():
    if DEVICE != "cuda":
        pytest.skip("measures a GPU's memory")
    return DEVICE
