"""Words are completed in the shell: the script that is installed asks the program itself."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from heterorl import __version__

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environment(tmp_path):
    """A home of its own, with the console script on the path, as an installer writes it."""
    script = tmp_path / "bin" / "heterorl"
    script.parent.mkdir()
    script.write_text(f"#!{sys.executable}\nimport sys\nfrom heterorl.entry import main\nsys.exit(main())\n")
    script.chmod(0o755)
    path = f"{script.parent}{os.pathsep}{os.environ['PATH']}"
    # The shell is named, not looked for among the parents of this process.
    named = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    return {**os.environ, **named, "HOME": str(tmp_path), "PATH": path, "PYTHONPATH": str(ROOT / "src")}


def run(environment, *words):
    result = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_program_says_its_version(environment):
    assert run(environment, "heterorl", "--version") == f"heterorl {__version__}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [("coor", "coordinator"), ("check-config", "lear", "learner"), ("certs", "iss", "issue")]
)
def test_bash_completes_what_was_begun(environment, tmp_path, words):
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    *begun, whole = words
    run(environment, "heterorl", "--install-completion", "bash")
    (installed,) = (tmp_path / ".bash_completions").iterdir()
    assert str(installed) in (tmp_path / ".bashrc").read_text()
    program = (
        f"source {installed}; complete -p heterorl > /dev/null || exit 3; COMP_WORDS=(heterorl {' '.join(begun)});"
        f" COMP_CWORD={len(begun)}; _heterorl_completion heterorl; echo ${{COMPREPLY[@]}}"
    )

    assert whole in run(environment, "bash", "--norc", "-c", program).split()


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_is_shown(environment, shell):
    assert "_HETERORL_COMPLETE" in run(environment, "heterorl", "--show-completion", shell)
