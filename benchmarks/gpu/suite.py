"""The tests that need a GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from benchmarks.gpu.rows import Place, Rows

FOLDERS = ("tests/gpu", "research/tests/gpu")
STOPS_S = 20.0


def run(rows: Rows, place: Place) -> None:
    """Run them, until the limit at most; a test that compares speeds is a part of its own here."""
    with tempfile.TemporaryDirectory() as name:
        report, log = Path(name) / "report.xml", Path(name) / "log"
        command = [
            sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", f"--junitxml={report}",
            "--deselect", "tests/gpu/test_gpu_fsdp2.py::test_tokens_a_second_beside_trl",
            *(folder for folder in FOLDERS if Path(folder).is_dir()),
        ]  # fmt: skip
        environment = os.environ | {"TEST_DEVICE": place.device}
        with log.open("w") as stdout, subprocess.Popen(command, env=environment, stdout=stdout) as child:
            try:
                child.wait(max(1.0, place.limit_s - STOPS_S))
                unfinished = []
            except subprocess.TimeoutExpired:
                unfinished = log.read_text(encoding="utf-8").splitlines()[-1:]
                # It writes its report then.
                child.send_signal(signal.SIGINT)
        print(log.read_text(encoding="utf-8"))
        if not report.exists():
            rows.note("not ended", "no test had begun at the limit")
            return
        cases = ElementTree.parse(report).getroot().findall(".//testcase")
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    # The report has the test that the limit interrupted.
    rows.add("tests passed", len(cases) - len(failed) - len(skipped) - len(unfinished), "")
    rows.add("tests failed", len(failed), "", forecast=0)
    rows.add("tests skipped", len(skipped), "")
    for case in failed:
        rows.note("failed", f"{case.get('classname')}::{case.get('name')}")
    reasons = {str(case.find("skipped").get("message")) for case in skipped}  # type: ignore[union-attr]
    for reason in sorted(reasons):
        rows.note("skipped", reason)
    for line in unfinished:
        rows.note("not ended", f"{line.split(' ')[0]}, and not begun what follows it")
