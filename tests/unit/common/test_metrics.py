"""Metrics are served on a port of their own, with names by convention."""

import json
import logging
import re
import urllib.request

import pytest

from services.common import logs, metrics
from services.common.errors import PortInUse


def test_metrics_are_served_and_a_taken_port_names_its_key():
    port = metrics.serve(0)
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()

    assert "heterorl_coordinator_head_version" in page
    with pytest.raises(PortInUse, match="metrics_port"):
        metrics.serve(port)


def test_metric_names_follow_the_convention():
    names = [metric.name for metric in metrics.REGISTRY.collect()]

    assert len(names) == len(set(names)) > 30
    assert all(re.fullmatch(r"heterorl_[a-z0-9_]+", name) for name in names)


def test_logs_are_text_for_people_and_json_for_machines(capsys):
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        logs.configure(style="console")
        logging.getLogger("x").info("hello %s", "you")
        logs.configure(style="json")
        try:
            raise ValueError("broken")
        except ValueError:
            logging.getLogger("x").exception("it failed")
    finally:
        root.handlers[:], root.level = handlers, level
    text, line = capsys.readouterr().err.splitlines()

    assert text.endswith("x: hello you")
    assert json.loads(line)["message"] == "it failed"
    assert "ValueError: broken" in json.loads(line)["exception"]
