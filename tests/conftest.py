"""Settings that every test shares."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _one_thread_per_process() -> None:
    """Two cores serve several processes: threads inside torch would only fight each other."""
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)
