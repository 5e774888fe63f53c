"""Append-only files for people and plots: versions.jsonl, steps.jsonl, evaluations.jsonl.

    versions.jsonl     {version, state_root, bytes, full_bytes, num_changed, num_elements, encode_s, publish_s}
    steps.jsonl        the fields of StepReport, not finite ones null; also rejected steps (is_applied false)
    evaluations.jsonl  {version, accuracy, num_prompts, num_completions, num_errors, seconds}

No decision depends on them; a start cuts off a torn last line. `bytes` is the size of the delta, or of the snapshot
where there is no delta. `encode_s` and `publish_s` are null in a row that a restart wrote. After versions were
abandoned, a later row of a step replaces an earlier one.
"""

import contextlib
import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from heterorl.common.process.files import make_directory
from heterorl.common.types.common import StepReport, strict_json
from heterorl.common.types.policy import NO_VERSION, Manifest, PayloadKind

_LOG = logging.getLogger(__name__)
VERSIONS_FILE = "versions.jsonl"
STEPS_FILE = "steps.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"


class TrainingLog:
    """Appends rows to the three files of a state directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        make_directory(directory)
        for name in (VERSIONS_FILE, STEPS_FILE, EVALUATIONS_FILE):
            _cut_torn_line(directory / name)
        self.last_version: int = max(
            (row.get("version", NO_VERSION) for row in read_rows(directory / VERSIONS_FILE)), default=NO_VERSION
        )
        """Newest version that has a row; -1 for none."""

    def note_version(
        self,
        manifest: Manifest,
        reports: Sequence[StepReport],
        *,
        encode_s: float | None = None,
        publish_s: float | None = None,
    ) -> None:
        sizes = {payload.kind: payload.num_bytes for payload in manifest.payloads}
        row = {
            "version": manifest.version,
            "state_root": manifest.state_root,
            "bytes": sizes.get(PayloadKind.DELTA, sizes.get(PayloadKind.SNAPSHOT, 0)),
            "full_bytes": manifest.full_bytes,
            "num_changed": manifest.num_changed,
            "num_elements": manifest.num_elements,
            "encode_s": encode_s,
            "publish_s": publish_s,
        }
        self._append(VERSIONS_FILE, [row])
        self._append(STEPS_FILE, [dataclasses.asdict(report) for report in reports])
        self.last_version = manifest.version

    def note_rejected_step(self, report: StepReport) -> None:
        self._append(STEPS_FILE, [dataclasses.asdict(report)])

    def note_evaluation(self, row: Mapping[str, object]) -> None:
        self._append(EVALUATIONS_FILE, [row])

    def _append(self, name: str, rows: Sequence[Mapping[str, object]]) -> None:
        path = self._directory / name
        try:
            with path.open("a", encoding="ascii") as file:
                file.writelines(strict_json(row) + "\n" for row in rows)
        except OSError as error:
            # The version is committed: an end would cost it where its checkpoint is not due.
            _LOG.warning("training log %s loses rows, no weights depend on it: %s", path, error)
            with contextlib.suppress(OSError):
                _cut_torn_line(path)


def read_rows(path: Path) -> list[dict[str, int]]:
    """Rows of a file; none when there is no file."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="ascii", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            # A damaged row is dropped; no weights depend on it.
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            _LOG.warning("training log %s loses a damaged line, no weights depend on it: %.40r", path, line)
    return rows


def _cut_torn_line(path: Path) -> None:
    if path.exists():
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            with path.open("r+b") as file:
                file.truncate(whole)
