"""Settings that every test shares."""

import pytest
from hypothesis import settings

# Examples are judged by what they show, never by how long a shared machine took over them.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session", autouse=True)
def _one_thread_per_process() -> None:
    """Two cores serve several processes: threads inside torch would only fight each other."""
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)
