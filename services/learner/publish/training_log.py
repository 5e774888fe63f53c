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

from heterorl.common.process.files import BAD_ROW, cut_torn_line, make_directory
from heterorl.common.types.common import StepReport, strict_json
from heterorl.common.types.policy import NO_VERSION, Manifest, PayloadKind
from heterorl.common.types.run import EVALUATIONS_FILE, STEPS_FILE, VERSIONS_FILE

_LOG = logging.getLogger(__name__)


class TrainingLog:
    """Appends rows to the three files of a state directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        make_directory(directory)
        for name in (VERSIONS_FILE, STEPS_FILE, EVALUATIONS_FILE):
            if (directory / name).exists():
                cut_torn_line(directory / name)
        path = directory / VERSIONS_FILE
        lines = path.read_bytes().splitlines() if path.exists() else []
        self.last_version = NO_VERSION
        """Version of the last row; -1 for none or a damaged one."""
        try:
            self.last_version = int(json.loads(lines[-1])["version"]) if lines else NO_VERSION
        except BAD_ROW:
            _LOG.warning("training log %s has a damaged line, no weights depend on it: %.40r", path, lines[-1])

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
                cut_torn_line(path)
