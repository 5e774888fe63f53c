"""What this learner runs with, for whoever looks at its directory later: run.json of the state directory."""

from __future__ import annotations

import json

import services
from services.learner.config import LearnerConfig

RUN_FILE = "run.json"


def write_run_file(config: LearnerConfig) -> None:
    """Write the release and every key of the configuration, whole or not at all; keys name files, not secrets."""
    run = {"heterorl_version": services.__version__, "config": config.model_dump(mode="json")}
    path = config.state_dir / RUN_FILE
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(run, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)
