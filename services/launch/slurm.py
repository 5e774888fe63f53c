"""Slurm: a batch script for each node, and submit.sh that hands them in so that each starts after what it needs.

A directory on a file system of all machines holds scripts, configurations, credentials, state and logs.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace

from heterorl.launch.nodes import CPUS, Node, complete, memory_limit, nodes_of, renumbered
from heterorl.launch.run import RunFile
from heterorl.launch.texts import Tree, certs_script, certs_words, readme, store_words, table, targets, toml_text

_ATTEMPTS = """\
attempts=${HETERORL_ATTEMPTS:-10}
pause_s=${HETERORL_PAUSE_S:-10}
"""
_TIME = """\
# Ten minutes before the job's time is over Slurm sends USR1 to this script alone: the node ends in order, and the job
# goes back into the queue. srun itself would kill the step at a TERM, so scancel sends it to the step.
is_time_over=
trap 'is_time_over=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
"""
_WAIT = """\
  # A signal ends the wait, not the step.
  wait $! || code=$?
  while kill -0 $! 2>/dev/null; do code=0; wait $! || code=$?; done
  if [[ $is_time_over ]]; then scontrol requeue "$SLURM_JOB_ID" && exit 0; fi
"""
_LOOP_END = """\
  # 0 is a stop or the end of the run; 2 is an error that only an operator can correct.
  if ((code == 0 || code == 2)); then exit "$code"; fi
  echo "%s: attempt $attempt of $attempts ended with code $code" >&2
  sleep "$pause_s"
done
exit "$code"
"""
_MACHINES = """\
python=${HETERORL_PYTHON:-python}
master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Of the job: two jobs may share a machine.
port=$((20000 + SLURM_JOB_ID %% 10000))
# Who starts the job step is not a rank: a launcher's variables would make it one.
unset RANK LOCAL_RANK WORLD_SIZE
for ((attempt = 1; attempt <= attempts; attempt++)); do
  code=0
  # "--" keeps torchrun from reading --log as the beginning of its own --log-dir.
  # shellcheck disable=SC2016  # SLURM_NODEID is each machine's own
  srun --kill-on-bad-exit=1 --wait=60 bash -c '
    exec "$0" -m torch.distributed.run --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" \\
      --nproc-per-node %d --master-addr "$1" --master-port "$2" --max-restarts 0 \\
      -m -- heterorl learner --config config/%s.toml --log json' "$python" "$master" "$port" &
"""


def render(run: RunFile, parts: Sequence[str] = ()) -> Tree:
    """The files of the shared directory; of some parts alone where they are named."""
    nodes = nodes_of(run, parts=parts)
    tree: Tree = {}
    for node in nodes:
        tree[f"{node.name}.sbatch"] = _script(run, node)
        config = complete(
            replace(node, config=renumbered(node)),
            state_dir=f"state/{node.name}",
            tls_dir=f"credentials/{node.name}",
            insecure=run.tls.insecure,
        )
        tree[f"config/{node.name}.toml"] = toml_text(node, run.run.id, config)
    tree["submit.sh"] = _submit(run, nodes)
    tree |= certs_script(run, nodes, lambda node: f"credentials/{node.name}")
    tree |= targets(run, nodes)
    return tree | readme(run, nodes, "Slurm", table(nodes, lambda node: node.host or "any"), _words(run, nodes))


def _script(run: RunFile, node: Node) -> str:
    options = [
        f"--job-name={run.run.id}-{node.name}",
        f"--nodes={len(node.machines) or 1}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={CPUS[node.kind]}",
        *([f"--gpus-per-node={node.num_gpus}"] if node.num_gpus else []),
        *([f"--mem={limit.upper()}"] if (limit := memory_limit(node)) else []),
        # The others dial this host; where nobody dials, Slurm chooses unless the run says.
        *([f"--nodelist={node.host}"] if node.host and not node.machines else []),
        "--requeue",
        "--signal=B:USR1@600",
        "--open-mode=append",
        f"--output=logs/{node.name}-%j.log",
    ]
    lines = [
        "#!/bin/bash",
        f"# {node.name} of run {run.run.id}; submit.sh hands it in. HETERORL names another program than heterorl.",
        *(f"#SBATCH {option}" for option in options),
        "",
        "set -uo pipefail",
        'cd "${SLURM_SUBMIT_DIR:?start it with submit.sh}" || exit 2',
        _ATTEMPTS.rstrip(),
        _TIME.rstrip(),
    ]
    if node.machines:
        lines.append((_MACHINES % (node.nproc, node.name)).rstrip())
    else:
        command = shlex.join([*node.command, "--config", f"config/{node.name}.toml", "--log", "json"])
        lines += [
            "heterorl=${HETERORL:-heterorl}",
            "for ((attempt = 1; attempt <= attempts; attempt++)); do",
            "  code=0",
            f'  srun --kill-on-bad-exit=1 "$heterorl" {command} &',
        ]
    return "\n".join(lines) + "\n" + _WAIT + _LOOP_END % node.name


def _submit(run: RunFile, nodes: tuple[Node, ...]) -> str:
    lines = [
        "#!/bin/bash",
        f"# Hands in the jobs of run {run.run.id}: each may start when what it needs has started.",
        "# SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_TIMELIMIT and Slurm's other variables count for every job.",
        "set -euo pipefail",
        'cd "$(dirname "${BASH_SOURCE[0]}")"',
        "mkdir -p logs state",
    ]
    waited_for = {name for node in nodes for name in node.needs}
    for node in nodes:
        after = ":".join(f"${{{_variable(name)}%%;*}}" for name in node.needs)
        option = f' --dependency="after:{after}"' if after else ""
        # A name that nothing waits for is for the eyes alone.
        prefix = f"{_variable(node.name)}=$(" if node.name in waited_for else ""
        lines.append(f"{prefix}sbatch --parsable{option} {node.name}.sbatch{')' if prefix else ''}")
    return "\n".join([*lines, ""])


def _variable(name: str) -> str:
    return name.replace("-", "_")


def _words(run: RunFile, nodes: Sequence[Node]) -> str:
    place = (
        "## Place\n\nThis directory lies on a file system of all machines. `host` in run.toml is what Slurm"
        " calls the machine,"
        " and what other nodes dial. `heterorl` is found by PATH, or by the variable HETERORL; a learner on"
        " several machines"
        " takes HETERORL_PYTHON, the interpreter of its environment."
    )
    secrets = certs_words(run, "It writes credentials/NODE here: readable by the user of the jobs alone.")
    stores = store_words(
        run,
        nodes,
        "PGPASSFILE names the file of PostgreSQL's password when submit.sh runs.",
        "on every machine that a coordinator may come to.",
    )
    start = (
        "## Start\n\n```\n./submit.sh\nsqueue --me\n```\n\nLogs are in logs/, state in state/. `scancel"
        " --signal=TERM JOB` stops a node in order, and for good. Ten minutes before its time is over a job ends its"
        " node in order and goes back into the queue; one that Slurm requeues goes on from its state."
    )
    return "\n\n".join(part for part in (place, secrets, stores, start) if part)
