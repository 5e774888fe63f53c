"""Results on disk -> checked records: a directory with a file for each run, or one file by itself.

Guarantees that runs come in a fixed order and that numbers that are not finite are counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from heterorl.common.errors import ConfigError
from heterorl_research.lab.report.data import Results, Run

_SAFE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+,@-]*")


def load(directory: Path) -> Results:
    """Read results.json and runs/<run_id>.json under `directory`.

    NaN and infinite numbers become None and are counted in `num_not_finite`.

    Raises:
        ConfigError: results.json is absent or not what is described here, or two runs share an id.
    """
    not_finite: list[str] = []
    found = _parse(directory / "results.json", not_finite)
    runs: list[Run] = []
    missing: list[str] = []
    try:
        table = Results.model_validate(found)
        for run in table.runs:
            if not _SAFE_ID.fullmatch(run.run_id):
                raise ConfigError("run_id", f"{run.run_id!r} is not a file name")
            path = directory / "runs" / f"{run.run_id}.json"
            if not path.exists():
                # results.json has both in short; older files have neither.
                if not run.evaluations:
                    missing.append(run.run_id)
                runs.append(run)
                continue
            detail = Run.model_validate(
                {**run.model_dump(), **_only(_parse(path, not_finite), "series", "evaluations")}
            )
            runs.append(detail)
    except ValidationError as error:
        raise ConfigError(str(directory), f"not the results of an experiment: {error}") from None
    return _sorted(table, runs, directory / "results.json").model_copy(
        update={"missing_files": sorted(missing), "num_not_finite": len(not_finite)}
    )


def load_table(path: Path) -> Results:
    """Read one file of results by itself, as it is committed: evaluations and series are the short ones.

    Raises:
        ConfigError: the file is absent or not what is described here, or two runs share an id.
    """
    not_finite: list[str] = []
    try:
        table = Results.model_validate(_parse(path, not_finite))
    except ValidationError as error:
        raise ConfigError(str(path), f"not the results of an experiment: {error}") from None
    return _sorted(table, table.runs, path).model_copy(update={"num_not_finite": len(not_finite)})


def _sorted(table: Results, runs: Sequence[Run], path: Path) -> Results:
    if len({run.run_id for run in runs}) != len(runs):
        raise ConfigError(str(path), "two runs share a run_id")
    ordered = sorted(runs, key=lambda run: (run.task, run.place.rank, run.arm, run.seed, run.run_id))
    return table.model_copy(update={"runs": ordered})


def _only(found: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: found[name] for name in names if found.get(name) is not None}


def _parse(path: Path, not_finite: list[str]) -> dict[str, Any]:
    try:
        # list.append answers None: NaN and infinities become "not measured", and are counted.
        found = json.loads(path.read_text(encoding="utf-8"), parse_constant=not_finite.append)
    except FileNotFoundError:
        raise ConfigError(str(path), "does not exist", action="run the experiment first") from None
    except ValueError as error:
        raise ConfigError(str(path), f"is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(str(path), "is not a JSON object")
    return found
