"""Processes that stand still past their leases, and disks that take long: the run goes on and keeps its promises."""

import asyncio
import contextlib
import json
import logging
import shutil
import signal
import subprocess

import pytest

from campaigns.kills import SAMPLERS, is_kept
from heterorl.common.rpc.calls import RetryPolicy
from heterorl.common.rpc.client import CoordinatorClient
from tests.support.cluster import Cluster, account
from tests.support.links import PLAINTEXT
from tests.support.witness import Witness, contract_of

NODES = ("coordinator", "learner", *SAMPLERS)
LEARNER_LEASE_S, WORK_LEASE_S = 3.0, 10.0
"""Of a Cluster."""
SLOW_DISK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
static int slow(const char *name, int fd) {
  int (*real)(int) = dlsym(RTLD_NEXT, name);
  int log = open(getenv("SLOW_DISK_LOG"), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  if (log >= 0) { dprintf(log, "%d\n", getpid()); close(log); }
  usleep(300000);
  return real(fd);
}
int fsync(int fd) { return slow("fsync", fd); }
int fdatasync(int fd) { return slow("fdatasync", fd); }
"""
"""Each synchronisation takes 0.3 s longer, as on a disk that others load, and is noted by its process."""


class Silence(logging.Handler):
    """Sets `noted` when a client says that the coordinator has not answered for longer than the learner's lease."""

    def __init__(self):
        super().__init__()
        self.noted = asyncio.Event()

    def emit(self, record):
        if "has not answered for" in record.getMessage():
            self.noted.set()


@contextlib.contextmanager
def standing_still(cluster, names):
    for name in names:
        cluster.children[name].process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for name in names:
            cluster.children[name].process.send_signal(signal.SIGCONT)


async def past_the_lease(cluster, client, names):
    """Wait until the leases of these nodes are over, by the coordinator's clock where it runs."""
    if "coordinator" in names:
        silence = Silence()
        logger = logging.getLogger("heterorl.common.rpc.calls")
        logger.addHandler(silence)
        try:
            await silence.noted.wait()
        finally:
            logger.removeHandler(silence)
    elif names == ("learner",):
        await cluster.until(client, lambda status: status.progress_age_s > 2 * LEARNER_LEASE_S)
    else:
        (name,) = names
        await cluster.until(
            client, lambda status: max(s.last_seen_s for s in status.sites if s.site == name) > WORK_LEASE_S
        )


async def goes_on(cluster, client, *, versions=2):
    head = (await cluster.until(client, lambda status: True)).head_version
    await cluster.until(client, lambda status: status.head_version >= head + versions)
    assert {name: child.exit_code for name, child in cluster.children.items()} == dict.fromkeys(NODES)


@contextlib.asynccontextmanager
async def run_of(cluster):
    """A run at work: its client, and a site that pushes beside the samplers."""
    contract = contract_of(cluster.model_dir, digits=1, max_new_tokens=3, group_size=2)
    async with CoordinatorClient(cluster.address, tls=PLAINTEXT, policy=RetryPolicy(budget_s=2.0, cap_s=0.2)) as client:
        witness = Witness(client, contract, seed=3)
        try:
            for name in NODES:
                cluster.start(name)
            await cluster.until(client, lambda status: status.head_version >= 2)
            pushing = asyncio.create_task(witness.run())
            await witness.reaches(1)
            yield client, witness
            pushing.cancel()
            await asyncio.wait([pushing])
        finally:
            cluster.stop()


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_run_goes_on_after_each_process_and_all_of_them_stood_still(tmp_path, record_property):
    cluster = Cluster(tmp_path)
    async with run_of(cluster) as (client, witness):
        for names in (*((name,) for name in NODES), NODES):
            with standing_still(cluster, names):
                await past_the_lease(cluster, client, names)
            await goes_on(cluster, client)

    result = account(cluster, witness.acknowledged, SAMPLERS)
    record_property("account", json.dumps(result))
    assert is_kept(result), json.dumps(result)


@pytest.fixture
def slow_disk(tmp_path, monkeypatch):
    """The log of SLOW_DISK, which processes load that start from now on."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc makes the slow disk")
    source, library, log = (tmp_path / f"slow_disk.{kind}" for kind in ("c", "so", "log"))
    source.write_text(SLOW_DISK)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("SLOW_DISK_LOG", str(log))
    return log


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_run_goes_on_where_every_synchronisation_takes_long(tmp_path, slow_disk, record_property):
    cluster = Cluster(tmp_path)
    async with run_of(cluster) as (client, witness):
        await goes_on(cluster, client)
        for name in ("coordinator", "learner"):
            cluster.kill(name)
            cluster.start(name)
            await goes_on(cluster, client)
        pids = {str(child.process.pid) for child in cluster.children.values()}

    assert pids <= set(slow_disk.read_text().split())
    result = account(cluster, witness.acknowledged, SAMPLERS)
    record_property("account", json.dumps(result))
    assert is_kept(result), json.dumps(result)
