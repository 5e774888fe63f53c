"""The rendered jobs in a Slurm of one machine, real but for the program that they start."""

import getpass
import logging
import re
import socket
import subprocess
import time
from pathlib import Path

import pytest

from heterorl.launch.nodes import nodes_of
from heterorl.launch.render import render, write_tree
from tests.support.launches import NODES, run_file, run_table
from tests.support.limits import WAIT_S
from tests.support.ports import free_port
from tests.support.tools import check, tool

_LOG = logging.getLogger(__name__)
STAND_IN = """#!/bin/bash
# Says that it was started, and by which command; ends well when all are there.
echo "$@" >{began}/"$SLURM_JOB_NAME"
while (($(ls {began} | wc -l) < {count})); do sleep 0.1; done
"""


def configuration(directory: Path, host: str) -> str:
    for name in ("state", "spool"):
        (directory / name).mkdir()
    return f"""
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={free_port()}
SlurmdPort={free_port()}
SlurmUser={getpass.getuser()}
SlurmdUser={getpass.getuser()}
AuthType=auth/none
CredType=cred/none
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={directory}/ended
NodeName={host} NodeAddr=127.0.0.1 CPUs=64 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=10 State=UP
"""


@pytest.mark.slow
def test_jobs_start_after_what_they_need_and_complete(tmp_path):
    controller, daemon = tool("slurmctld"), tool("slurmd")
    tool("sbatch")
    host = socket.gethostname().partition(".")[0]
    (tmp_path / "slurm.conf").write_text(configuration(tmp_path, host))
    table = run_table()
    samplers = [
        {key: value for key, value in each.items() if key not in ("devices", "host")} for each in table["samplers"]
    ]
    run = run_file(
        coordinator={"host": host},
        relays=[{"site": "eu", "host": host}],
        samplers=samplers,
        learner={},
        run=table["run"],
    )
    write_tree(render("slurm", run), tmp_path / "tree")
    began = tmp_path / "began"
    began.mkdir()
    program = tmp_path / "program"
    program.write_text(STAND_IN.format(began=began, count=len(NODES)))
    program.chmod(0o755)
    environment = ["env", f"SLURM_CONF={tmp_path / 'slurm.conf'}", f"HETERORL={program}"]

    with (tmp_path / "log").open("wb") as log:
        processes = [
            subprocess.Popen([*environment, name, "-D", "-c"], stdout=log, stderr=log) for name in (controller, daemon)
        ]
        try:
            until(lambda: "idle" in quietly(*environment, "sinfo", "-h", "-o", "%t"), tmp_path)
            # While no job can start, each but the coordinator's waits for another one, not for room.
            check(*environment, "scontrol", "update", f"nodename={host}", "state=drain", "reason=test")
            check(*environment, "bash", str(tmp_path / "tree" / "submit.sh"))
            waiting = dict(line.split() for line in check(*environment, "squeue", "-h", "-o", "%j %E").splitlines())
            check(*environment, "scontrol", "update", f"nodename={host}", "state=resume")
            ended = tmp_path / "ended"
            until(lambda: ended.exists() and ended.read_text().count("JobId=") == len(NODES), tmp_path)
        finally:
            quietly(*environment, "scancel", "--me")
            for process in processes:
                process.terminate()
                process.wait(WAIT_S)

    states = dict(re.findall(r"Name=my-run-(\S+) JobState=(\S+)", ended.read_text()))
    assert states == dict.fromkeys(NODES, "COMPLETED")
    numbers = {name: number for number, name in re.findall(r"JobId=(\d+) .*?Name=my-run-(\S+)", ended.read_text())}
    needs = {node.name: {numbers[name] for name in node.needs} for node in nodes_of(run)}
    assert {name: set(re.findall(r"after:(\d+)", waiting[f"my-run-{name}"])) for name in NODES} == needs
    for node in nodes_of(run):
        said = (began / f"my-run-{node.name}").read_text()
        assert said == f"{node.kind} --config config/{node.name}.toml --log json\n"


def quietly(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def until(condition, directory: Path) -> None:
    """Ask Slurm, which tells nobody of its own accord, until it is so."""
    try:
        while not condition():
            time.sleep(0.2)
    except BaseException:
        # Of the test's own limit.
        logs = [path.read_text() for path in (directory / "tree" / "logs").glob("*")]
        _LOG.warning("\n".join([(directory / "log").read_text()[-4000:], *logs]))
        raise
