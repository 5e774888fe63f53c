"""The GPU trial at a tenth of its size: parts in processes of their own, limits, and what a second call repeats."""

import json

import pytest

from benchmarks.gpu import trial


def _call(monkeypatch, out, *words, parts=("card",)):
    monkeypatch.setattr("sys.argv", ["trial", "--device", "cpu", "--out", str(out), "--parts", *parts, *words])
    trial.main()
    return json.loads((out / "no-card.json").read_text())["parts"]


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_a_late_part_ends_alone_and_a_second_call_repeats_only_what_is_not_done(tmp_path, monkeypatch):
    (late,) = _call(monkeypatch, tmp_path, "--minutes", "0")
    assert (late["status"], late["rows"]) == ("out of time", [])

    (done,) = _call(monkeypatch, tmp_path, "--minutes", "3")
    assert done["status"] == "done"
    assert next(row["what"] for row in done["rows"]) == trial.PEAK
    assert all(row["value"] > 0 for row in done["rows"])

    monkeypatch.setattr(trial, "_run", lambda *_, **__: pytest.fail("a part that is done ran once more"))
    assert _call(monkeypatch, tmp_path) == [done]
