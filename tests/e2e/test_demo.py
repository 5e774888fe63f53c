"""The demonstration as a person runs it: one command, four processes, every promise checked."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest


@pytest.fixture
def cache(tmp_path_factory):
    """Warm starts for all tests of the demonstration, whichever process runs them."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "warm-starts"


@pytest.mark.timeout(900)
def test_tiny_demo_keeps_its_promises_and_leaves_a_report_and_a_model(tmp_path, cache):
    result = subprocess.run(
        [
            sys.executable, "-m", "heterorl", "demo", "--tiny", "--out", str(tmp_path / "demo"),
            "--cache", str(cache),
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert result.returncode == 0, result.stdout + result.stderr
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert summary["status"] == "complete"
    assert summary["evaluation_prompts"] == 256
    evaluations = [json.loads(row) for row in (tmp_path / "demo/learner/evaluations.jsonl").read_text().splitlines()]
    assert [row["num_prompts"] for row in evaluations] == [256] * 4
    assert summary["warm_start_accuracy"] == evaluations[0]["accuracy"]
    assert summary["final_accuracy"] == evaluations[-1]["accuracy"]
    assert summary["ledger_balanced"]
    assert summary["digest_mismatches"] == 0
    assert summary["versions"] == 25
    assert summary["groups_trained"] == 24 * 8
    # transit of 8 versions, and what waits in the queue on top
    assert 8 <= summary["staleness_versions_steady"] <= 16
    page = (tmp_path / "demo" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 12
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(summary["model_dir"])
    tokenizer = AutoTokenizer.from_pretrained(summary["model_dir"])
    assert model.get_output_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert tokenizer.decode(tokenizer.encode("1+2=")) == "1+2="


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ctrl_c_in_the_middle_stops_every_process_in_order_and_says_what_is_known(tmp_path, cache):
    out = tmp_path / "demo"
    demo = subprocess.Popen(
        [sys.executable, "-m", "heterorl", "demo", "--tiny", "--out", str(out), "--cache", str(cache)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    children = []
    try:
        # The first step is shown as soon as it is seen: some twenty are left.
        lines = []
        for text in demo.stdout:
            lines.append(text)
            if text.startswith("step "):
                break
        children = psutil.Process(demo.pid).children(recursive=True)
        commands = [process.cmdline() for process in children]
        demo.send_signal(signal.SIGINT)
        rest, errors = demo.communicate()
    finally:
        # The same process, not another one that was given its number.
        left = [process for process in children if process.is_running()]
        for process in left:
            process.kill()
        demo.kill()
        demo.wait()

    assert demo.returncode == 130, "".join(lines) + rest + errors
    # Four services, and the processes that compute rewards for those that have asked for one.
    assert sum("heterorl" in command for command in commands) == 4
    assert left == []
    stops = [text for text in rest.splitlines() if text.startswith("stopped ")]
    assert stops[0].startswith("stopped site-")
    assert stops[-1] == "stopped coordinator"
    assert "interrupted after" in rest
    assert "Traceback" not in errors
    summary = json.loads((out / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    # The learner may go on for a moment while the samplers end.
    assert 1 <= summary["steps"] == summary["versions"] - 1
    assert summary["warm_start_accuracy"] is not None
