"""Settings that every test shares."""

import os

import pytest
from hypothesis import settings

# Examples are judged by what they show, never by how long a shared machine took over them. In CI they are the same ones
# every time: a change is not refused for what it did not touch. Everywhere else each run looks at new ones.
settings.register_profile("untimed", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("untimed")


@pytest.fixture(scope="session", autouse=True)
def _one_thread_per_process() -> None:
    """Two cores serve several processes: threads inside torch would only fight each other."""
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)
