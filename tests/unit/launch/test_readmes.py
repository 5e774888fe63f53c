"""Commands of the README.md of a launched run do what the operator needs later."""

import re
import stat

import pytest

from heterorl.launch.render import render, write_tree
from tests.support.launches import run_file
from tests.support.tools import check


@pytest.mark.parametrize("launcher", ["compose", "systemd", "slurm", "k8s"])
def test_readme_renews_what_the_script_of_the_certificates_keeps(launcher):
    tree = render(launcher, run_file())

    issued = set(re.findall(r"^issue (\S+) ", tree["certs.sh"], re.MULTILINE))
    assert issued == set(re.findall(r"^heterorl certs renew (\S+) --dir ", tree["README.md"], re.MULTILINE))


@pytest.mark.process
def test_a_copy_to_a_host_is_readable_under_any_umask(tmp_path):
    tree, etc, run = render("systemd", run_file()), tmp_path / "host", tmp_path / "launched"
    own = run / "coord.example" / "etc" / "heterorl"
    write_tree(tree, run)
    (own / "credentials" / "coordinator").mkdir(parents=True)
    (own / "mine").mkdir()
    for path in (own / "credentials" / "coordinator" / "node.key", own / "mine" / "reward.py"):
        path.touch()
    for path in (run, *run.rglob("*")):
        path.chmod(0o750 if path.is_dir() else 0o640)
    (own / "credentials" / "coordinator" / "node.key").chmod(0o600)
    (line,) = (line for line in tree["README.md"].splitlines() if "cp -rT coord.example/etc /etc" in line)
    line = line.replace("sudo deploy/install.sh", "true").replace("sudo ", "").replace("/etc/h", f"{etc}/h")
    etc.mkdir()

    check("env", "-C", str(run), "bash", "-c", f"umask 027; {line.replace(' /etc ', f' {etc} ')}")

    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (etc / "heterorl").rglob("*")}
    assert (found["coordinator.toml"], found["mine"], found["reward.py"]) == (0o644, 0o755, 0o644)
    assert (found["credentials"], found["node.key"]) == (0o750, 0o600)
