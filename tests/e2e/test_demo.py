"""The demonstration as a person runs it: one command, four processes, every promise checked."""

import json
import subprocess
import sys

import pytest

from services.demo.outcome import digest_mismatches


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_tiny_demo_keeps_its_promises_and_leaves_a_report_and_a_model(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "services", "demo", "--tiny", "--out", str(tmp_path / "demo")],
        capture_output=True, text=True, timeout=380, check=False,
    )  # fmt: skip

    assert result.returncode == 0, result.stdout + result.stderr
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert summary["ledger_balanced"]
    assert summary["digest_mismatches"] == 0
    assert summary["versions"] == 25
    assert summary["groups_trained"] == 24 * 8
    # transit of 8 versions, and what waits in the queue on top
    assert 8 <= summary["staleness_versions_steady"] <= 16
    page = (tmp_path / "demo" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 6
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(summary["model_dir"])
    tokenizer = AutoTokenizer.from_pretrained(summary["model_dir"])
    assert model.get_output_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert tokenizer.decode(tokenizer.encode("1+2=")) == "1+2="


def test_digest_mismatch_is_counted():
    versions = [{"version": 0, "state_root": "a"}, {"version": 1, "state_root": "b"}]

    assert digest_mismatches(versions, [versions, versions[1:]]) == 0
    assert digest_mismatches(versions, [[{"version": 1, "state_root": "x"}, {"version": 9, "state_root": "b"}]]) == 2
