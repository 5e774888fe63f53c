"""Environments that hold what a requirements file names and nothing else, by links to what is installed already."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import venv
from collections.abc import Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.certificates import Certificates, paths

ROOT = Path(__file__).parents[2]
THREADS = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
CHECK_AND_SCORE = """
import json, sys
from pathlib import Path

from heterorl.cli.check_config import load_service
from heterorl.entry import main

if __name__ == "__main__":
    service, file, *overrides = sys.argv[1:]
    settings = [word for override in overrides for word in ("--set", override)]
    sys.argv = ["heterorl", "check-config", service, "--config", file, *settings]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
    if service == "coordinator":
        sys.exit()
    from heterorl.common.text.conversation import try_reward
    from heterorl.common.tasks.task_config import build_task

    config = load_service(service, Path(file), overrides)
    print(json.dumps(try_reward(build_task(config.task), None)))
"""


def environment(
    directory: Path, service: str, *, without: Sequence[str] = (), places: Sequence[str] = tuple(sys.path)
) -> Path:
    """The interpreter of an environment that has what requirements/SERVICE.txt pins, from some `sys.path`.

    A package that is there in another version only is not taken: the environment would be another one.
    """
    venv.create(directory, symlinks=True, with_pip=False)
    (packages,) = directory.glob("lib/python*/site-packages")
    known: dict[tuple[str, str], Distribution] = {}
    for found in distributions(path=list(places)):
        known.setdefault((canonicalize_name(found.metadata["Name"]), found.version.partition("+")[0]), found)
    for line in (ROOT / "requirements" / f"{service}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        if name not in without:
            (pin,) = requirement.specifier
            _link(known[name, pin.version], packages)
    (packages / "heterorl.pth").write_text(f"{ROOT / 'src'}\n", encoding="utf-8")
    return directory / "bin" / "python"


def _link(found: Distribution, packages: Path) -> None:
    for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
        target = Path(str(found.locate_file(top)))
        if target.exists() and not (packages / top).exists():
            (packages / top).symlink_to(target)


def check_and_score(
    python: Path, service: str, config: Path, directory: Path, *overrides: str, code: str = CHECK_AND_SCORE
) -> subprocess.CompletedProcess[str]:
    """`heterorl check-config`, then one answer of the task; certificates, state and data are this directory's.

    What is printed last is the reward.
    """
    settings = list(overrides)
    own = re.search(r'name = "jsonl:(.*)"', config.read_text(encoding="utf-8"))
    if own is not None:
        data = directory / "train.jsonl"
        rows = [{"prompt": f"What is half of {odd}?", "answer": f"$\\frac{{{odd}}}{{2}}$"} for odd in (1, 3, 5)]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        settings += [f"task.name=jsonl:{data if own[1].startswith('/') else config.parent / own[1]}"]
        settings += ["task.reward_timeout_s=60"]
    script = directory / "check_and_score.py"
    script.write_text(code, encoding="utf-8")
    # -P: what stands beside the script is no package.
    node = Certificates(directory / "certs").node(service, "site-1")
    settings += [f"tls.{key}={path}" for key, path in paths(node).items()]
    if service == "coordinator":
        (directory / "revoked").touch()
        settings += [f"data_dir={directory / 'data'}", f"tls.revoked={directory / 'revoked'}"]
    else:
        settings += [f"state_dir={directory / 'state'}", *["site=site-1"] * (service == "sampler")]
    return subprocess.run(
        [str(python), "-P", str(script), service, str(config), *settings],
        cwd=directory, capture_output=True, text=True, check=False,
        env={"PATH": f"{python.parent}:/usr/bin:/bin", "HOME": str(directory), **THREADS},
    )  # fmt: skip
