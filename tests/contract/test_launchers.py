"""The examples that start a learner on several machines: by Slurm, and by systemd; with the flags that there are."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import typer.main
from torch.distributed.run import get_args_parser

from heterorl.cli.main import app
from heterorl.launch.render import render
from tests.support.launches import run_file
from tests.support.tools import check, tool

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
SBATCH = ROOT / "deploy" / "slurm" / "learner.sbatch"
UNIT = ROOT / "services" / "launch" / "units" / "heterorl-learner-node@.service"
VALUES = {"NNODES": "2", "NODE_RANK": "1", "NPROC": "8", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def parsed(words):
    """What torchrun understands of the words after its name, and what the learner does of the rest."""
    agent = get_args_parser().parse_args(words)
    assert (agent.module, agent.training_script) == (True, "heterorl")
    command, *arguments = agent.training_script_args
    learner = typer.main.get_command(app).commands[command].make_context(command, list(arguments))
    assert command == "learner"
    return agent, learner.params


def executable(path, text):
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def slurm(tmp_path):
    """Two machines as far as the script asks for them; `python` writes down its words and ends by `codes`."""
    return _slurm(tmp_path, lambda config: [str(SBATCH), config])


@pytest.fixture
def rendered(tmp_path):
    """The job of a learner of one machine, as `heterorl launch slurm` writes it."""
    return _rendered(tmp_path)


@pytest.fixture
def machines(tmp_path):
    """The same on two machines."""
    return _rendered(tmp_path, nnodes=2, backend={"kind": "fsdp2", "device": "cuda"})


def _rendered(tmp_path, **learner):
    for path, text in render("slurm", run_file(learner={"host": "gpu.example", **learner})).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return _slurm(tmp_path, lambda _: [str(tmp_path / "learner.sbatch")])


def _slurm(tmp_path, words):
    programs = tmp_path / "bin"
    programs.mkdir()
    executable(programs / "scontrol", '#!/bin/bash\necho "$*" >> "$OUT/scontrol"\nprintf "node-a\\nnode-b\\n"\n')
    executable(
        programs / "srun",
        '#!/bin/bash\n[[ $IS_TIME_OVER == pause ]] && { echo >> "$OUT/steps"; '
        '(sleep 0.3; kill -USR1 "$PPID") & exit 1; }\n'
        '[[ $IS_TIME_OVER ]] && { trap "exit 0" USR2; echo $$ > "$OUT/step"; kill -USR1 "$PPID"; '
        "while :; do sleep 0.01; done; }\n"
        'while [[ $1 == --* ]]; do echo "$1" >> "$OUT/srun"; shift; done\n'
        'SLURM_NODEID=0 "$@"; first=$?\nSLURM_NODEID=1 "$@"; exit $((first | $?))\n',
    )
    executable(
        programs / "python",
        '#!/bin/bash\nprintf "%s\\n" "$*" >> "$OUT/agents"\necho "${RANK-none}" >> "$OUT/rank"\n'
        'read -r code < "$OUT/codes"; sed -i 1d "$OUT/codes"\n'
        # A TERM to the step; torchrun then ends with 1.
        '[[ $code == stop ]] && { kill -TERM "$PPID"; exit 1; }; exit "$code"\n',
    )
    # What a real srun does at a TERM is to kill the step: here only scancel ends it.
    executable(programs / "scancel", '#!/bin/bash\necho "$*" >> "$OUT/scontrol"\nkill -USR2 "$(cat "$OUT/step")"\n')
    executable(programs / "date", '#!/bin/bash\necho >> "$OUT/asked"; echo $(($(wc -l < "$OUT/asked") * RUN_S))\n')
    (tmp_path / "learner.toml").touch()
    environment = os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}", "OUT": str(tmp_path), "RANK": "7", "HETERORL_PAUSE_S": "0",
        "HETERORL_ATTEMPTS": "3", "SLURM_JOB_ID": "4711", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8",
        "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_SUBMIT_DIR": str(tmp_path), "IS_TIME_OVER": "",
    }  # fmt: skip

    def run(*codes, config="learner.toml", over="", run_s=0):
        (tmp_path / "codes").write_text("".join(f"{code}\n" for code in codes))
        return subprocess.run(
            ["bash", *words(config)], cwd=tmp_path, capture_output=True, text=True, check=False,
            env=environment | {"IS_TIME_OVER": over, "RUN_S": str(run_s)} | ({"HETERORL_PAUSE_S": "1"} if over == "pause" else {}),
        )  # fmt: skip

    return run


def test_batch_script_is_well_formed_and_asks_for_one_agent_a_machine():
    check(tool("bash"), "-n", str(SBATCH))
    if shutil.which("shellcheck"):
        check("shellcheck", str(SBATCH))
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", SBATCH.read_text(), re.MULTILINE))

    assert asked["ntasks-per-node"] == "1"
    # At whatever size there is: another world size resumes.
    assert asked["nodes"] == "1-2"
    assert "requeue" in asked
    assert asked["signal"] == "B:USR1@1200"


def test_batch_script_starts_the_learner_on_each_machine_again_until_it_ends_well(slurm, tmp_path):
    result = slurm(1, 0, 0, 0)

    assert result.returncode == 0, result.stderr
    assert "attempt 1 of 3 ended with code 1" in result.stderr
    assert (tmp_path / "scontrol").read_text() == "show hostnames node-[a-b]\n"
    assert set((tmp_path / "srun").read_text().split()) == {"--kill-on-bad-exit=1", "--wait=60"}
    lines = (tmp_path / "agents").read_text().splitlines()
    assert len(lines) == 4
    for number, line in enumerate(lines):
        program, module, *words = line.split()
        agent, learner = parsed(words)
        assert (program, module) == ("-m", "torch.distributed.run")
        assert (agent.nnodes, agent.node_rank, agent.nproc_per_node) == ("2", number % 2, "8")
        assert (agent.master_addr, agent.master_port, agent.max_restarts) == ("node-a", 24711, 0)
        assert learner["config"] == tmp_path / "learner.toml"
    # What starts the agents is no rank, whatever its own launcher has said.
    assert set((tmp_path / "rank").read_text().split()) == {"none"}


def test_batch_script_gives_up_after_its_attempts_and_says_so(slurm, tmp_path):
    result = slurm(*[1] * 6)

    assert result.returncode == 1
    assert "attempt 3 of 3" in result.stderr
    assert len((tmp_path / "agents").read_text().splitlines()) == 6


@pytest.mark.parametrize("script", ["slurm", "machines"])
def test_a_learner_that_ran_for_ten_minutes_has_all_attempts_again(script, request, tmp_path):
    result = request.getfixturevalue(script)(*[1] * 8, 0, 0, run_s=600)

    assert result.returncode == 0, result.stderr
    assert len((tmp_path / "agents").read_text().splitlines()) == 10


@pytest.mark.parametrize("script", ["slurm", "machines"])
def test_a_learner_that_is_told_to_stop_is_not_started_again(script, request, tmp_path):
    result = request.getfixturevalue(script)("stop", "stop", 0, 0)

    assert result.returncode == 0, result.stderr
    assert len((tmp_path / "agents").read_text().splitlines()) == 2
    assert "attempt" not in result.stderr


@pytest.mark.parametrize("script", ["slurm", "rendered"])
def test_job_whose_time_is_over_ends_its_node_and_goes_back_into_the_queue(script, request, tmp_path):
    result = request.getfixturevalue(script)(over="1")

    assert result.returncode == 0, result.stderr
    said = (tmp_path / "scontrol").read_text().splitlines()
    assert [line for line in said if not line.startswith("show")] == ["--signal=TERM 4711", "requeue 4711"]
    # It was not started once more.
    assert not (tmp_path / "agents").exists()
    assert "attempt" not in result.stderr


@pytest.mark.parametrize("script", ["slurm", "rendered"])
def test_job_whose_time_is_over_between_two_attempts_goes_back_into_the_queue(script, request, tmp_path):
    result = request.getfixturevalue(script)(over="pause")

    assert result.returncode == 0, result.stderr
    assert "requeue 4711" in (tmp_path / "scontrol").read_text().splitlines()
    # A second step would run until the time limit kills the job, which nothing queues then.
    assert (tmp_path / "steps").read_text() == "\n"


def test_batch_script_without_its_configuration_starts_nothing(slurm, tmp_path):
    result = slurm(config="no-such.toml")

    assert result.returncode == 2
    assert not (tmp_path / "agents").exists()


def directives():
    """Last value of each key of the unit, its variables and instance filled in."""
    text = UNIT.read_text()
    for name, value in VALUES.items():
        text = text.replace(f"${{HETERORL_{name}}}", value)
    text = text.replace("%i", "run-1").replace("%d", "/run/credentials/unit")
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith(("#", "[")))


def test_unit_starts_an_agent_whose_learner_understands_every_flag():
    found = directives()
    program, dash_m, module, *words = shlex.split(found["ExecStart"])
    agent, learner = parsed(words)

    assert (program, dash_m, module) == ("/opt/heterorl/current/bin/python", "-m", "torch.distributed.run")
    assert (agent.nnodes, agent.node_rank, agent.nproc_per_node) == ("2", 1, "8")
    assert (agent.master_addr, agent.master_port, agent.max_restarts) == ("10.0.0.1", 29500, 0)
    assert learner["config"] == Path("/etc/heterorl/run-1.toml")
    assert {word.split("=")[0] for word in learner["set_"]} == {"tls.ca", "tls.cert", "tls.key", "state_dir"}
    assert f"state_dir=/var/lib/{found['StateDirectory']}" in learner["set_"]
    assert f"state_dir={found['WorkingDirectory']}" in learner["set_"]
    # Every variable of the command is explained where an operator writes the file.
    assert set(re.findall(r"\$\{(\w+)\}", UNIT.read_text())) == set(
        re.findall(r"^#   (HETERORL_\w+)=", UNIT.read_text(), re.MULTILINE)
    )
    # Only rank 0 could notify.
    assert (found["Type"], found["Restart"], found["KillMode"]) == ("exec", "on-failure", "mixed")


def test_systemd_accepts_the_unit_and_it_is_as_confined_as_that_of_one_machine(tmp_path):
    analyze = tool("systemd-analyze")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/heterorl/current/bin/python", "/bin/true"))

    assert check(analyze, "verify", "--man=no", str(copy)) == ""
    one = UNIT.with_name("heterorl-learner@.service").read_text()
    assert UNIT.read_text().partition("\nUMask")[2] == one.partition("\nUMask")[2] != ""
