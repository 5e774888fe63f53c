"""The tests that need a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from benchmarks.gpu.rows import Place, Rows

FOLDERS = ("tests/gpu", "research/tests/gpu")


def run(rows: Rows, place: Place) -> None:
    """Run them; a test that compares speeds is a part of its own here."""
    with tempfile.TemporaryDirectory() as name:
        report = Path(name) / "report.xml"
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}",
             "--deselect", "tests/gpu/test_gpu_fsdp2.py::test_tokens_a_second_beside_trl",
             *(folder for folder in FOLDERS if Path(folder).is_dir())],
            env=os.environ | {"TEST_DEVICE": place.device}, check=False,
        )  # fmt: skip
        cases = ElementTree.parse(report).getroot().findall(".//testcase")
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    rows.add("tests passed", len(cases) - len(failed) - len(skipped), "")
    rows.add("tests failed", len(failed), "", forecast=0)
    rows.add("tests skipped", len(skipped), "")
    for case in failed:
        rows.note("failed", f"{case.get('classname')}::{case.get('name')}")
    reasons = {str(case.find("skipped").get("message")) for case in skipped}  # type: ignore[union-attr]
    for reason in sorted(reasons):
        rows.note("skipped", reason)
