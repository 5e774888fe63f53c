"""Freed frames stay in the process: the next ones cost no page faults."""

import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
from concurrent.futures import ThreadPoolExecutor
from heterorl.common.rpc.transport_options import keep_freed_frames
if sys.argv[1] == "keep":
    assert keep_freed_frames()
pool = ThreadPoolExecutor(1)
def use():
    pool.submit(lambda: [bytes(1 << 20) for _ in range(4)]).result()
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="an option of glibc")
def test_frames_cost_no_page_faults():
    faults = {
        mode: int(subprocess.run([sys.executable, "-c", FAULTS, mode], capture_output=True, check=True).stdout)
        for mode in ("keep", "as it is")
    }

    # 200 MiB, made by a thread and freed by another as payloads are read, are 51,200 pages.
    assert faults["as it is"] > 10_000
    assert faults["keep"] < 2_000
