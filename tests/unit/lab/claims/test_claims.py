"""A verdict is a rule over the seeds' differences; results that are not there are not tested."""

import json

import pytest

from heterorl.common.errors import ConfigError
from heterorl.lab.claims import verdicts
from heterorl.lab.claims.claim import Claim, Side, judge, p_value, versions
from heterorl.lab.claims.declared import CLAIMS
from heterorl.lab.claims.verdicts import differences, gather, markdown, write_claims
from heterorl.lab.report.data import load_table
from heterorl.lab.statistics.significance import equivalence_test, t_test
from tests.support.lab_results import make_run

UP = [0.10, 0.12, 0.08, 0.11, 0.09, 0.10]
NOISE = [0.10, -0.12, 0.08, -0.11, 0.09, -0.05]


def claim_of(direction="above", **changes):
    test = {"a": Side(algorithm="gepo", delay="8 versions"), "b": Side(algorithm="gspo", delay="8 versions")}
    fields = {"claim": "c", "source": "paper", "experiment": "e", "task": "addition", **test, **changes}
    return Claim(direction=direction, **fields)


def verdict(claim, values):
    (found,) = judge([(claim, values)])
    return found.verdict


@pytest.mark.parametrize(
    ("direction", "margin", "values", "expected"),
    [
        ("above", 0.0, UP, "shown"),
        ("above", 0.0, [-value for value in UP], "contradicted"),
        ("above", 0.0, NOISE, "not shown"),
        ("above", 0.09, UP, "not shown"),
        ("above", 0.2, UP, "contradicted"),
        ("above", -0.05, [0.001 * value for value in UP], "shown"),
        ("below", 0.0, UP, "contradicted"),
        ("below", 0.05, [-value for value in UP], "shown"),
        ("below", 0.2, [-value for value in UP], "contradicted"),
        ("within", 0.2, UP, "shown"),
        ("within", 0.105, UP, "not shown"),
        ("within", 0.05, UP, "contradicted"),
        ("within", 0.05, [-value for value in UP], "contradicted"),
        ("within", 0.05, NOISE, "not shown"),
        ("above", 0.0, [0.1], "not tested"),
        ("above", 0.0, [], "not tested"),
    ],
)
def test_verdict(direction, margin, values, expected):
    assert verdict(claim_of(direction, margin=margin), values) == expected


def test_p_is_against_the_border_of_what_is_claimed():
    assert p_value(claim_of("above", margin=0.05), UP) == t_test([value - 0.05 for value in UP])
    assert p_value(claim_of("below", margin=0.05), UP) == t_test([value + 0.05 for value in UP])
    assert p_value(claim_of("within", margin=0.2), UP) == equivalence_test(UP, margin=0.2)
    assert p_value(claim_of("within", margin=0.05), UP) == t_test([value - 0.05 for value in UP])


def test_many_claims_have_to_be_clearer_than_one():
    # t = 3.0 with five degrees of freedom: p = 0.03.
    weak = [0.03 + 0.0224 * sign for sign in (1, -1, 1, -1, 1, -1)]
    claim = claim_of()

    assert 0.01 < t_test(weak) < 0.05
    assert verdict(claim, weak) == "shown"
    questions = [claim_of(b=Side(algorithm=name, delay="8 versions")) for name in ("a", "b", "c", "d")]
    assert [found.verdict for found in judge([(one, weak) for one in questions])] == ["not shown"] * 4
    # What is not tested, another experiment, and the same question from the other side take no part in the correction.
    turned = claim_of("below", a=claim.b, b=claim.a)
    others = [(questions[0], []), (claim_of(experiment="f", ratio=0.5), weak), (turned, [-value for value in weak])]
    assert [found.verdict for found in judge([(claim, weak), *others])] == ["shown", "not tested", "shown", "shown"]


def results_of(directory, name, runs):
    directory.mkdir(exist_ok=True)
    (directory / f"{name}.json").write_text(json.dumps({"experiment": name, "runs": runs}))
    return directory


def test_differences_join_seeds_of_the_named_arms_and_no_others(tmp_path):
    runs = [
        *(make_run("gepo", 8, seed, last=0.5 + seed / 10) for seed in (0, 1, 2)),
        *(make_run("gspo", 8, seed, last=0.4) for seed in (1, 2, 3)),
        make_run("gspo", 8, 0, failed="nan"),
        make_run("gepo", 64, 3, last=0.9),
        make_run("gepo", 8, 3, last=0.9, task="other", run_id="other"),
        make_run("gepo", 8, 3, last=0.9, variant="lr=1"),
    ]
    found = load_table(results_of(tmp_path, "e", runs) / "e.json").finished

    assert differences(claim_of(), found) == pytest.approx([0.2, 0.3])
    assert differences(claim_of(ratio=0.5), found) == pytest.approx([0.4, 0.5])
    start = Side(algorithm="gepo", delay="8 versions", metric="warm_start_accuracy")
    assert differences(claim_of(b=start), found) == pytest.approx([0.2, 0.3, 0.4])
    fallen = Side(algorithm="gepo", delay="8 versions", metric="has_collapsed")
    assert differences(claim_of(a=fallen, b=fallen), found) == [0.0, 0.0, 0.0]


def test_experiments_of_one_regime_are_joined_and_missing_ones_are_not_tested(tmp_path):
    results_of(tmp_path, "one", [make_run("gepo", 8, seed, last=0.7) for seed in (0, 1)])
    results_of(tmp_path, "two", [make_run("gspo", 8, seed, last=0.5) for seed in (0, 1)])
    claims = [claim_of(experiment="one+two"), claim_of(experiment="one"), claim_of(experiment="three")]

    found = gather(claims, tmp_path)

    assert [differences(claim, runs) for claim, runs in found] == [pytest.approx([0.2, 0.2]), [], []]
    assert [len(runs) for _, runs in found] == [4, 2, 0]


def test_table_has_every_declared_claim_and_the_keys_that_programs_read(tmp_path):
    number = write_claims(tmp_path, tmp_path / "claims.json")
    rows = json.loads((tmp_path / "claims.json").read_text())

    assert number == len(rows) == len(CLAIMS)
    keys = {"claim", "source", "experiment", "seeds", "difference", "low", "high", "p", "verdict"}
    assert all(keys <= row.keys() for row in rows)
    assert {row["verdict"] for row in rows} == {"not tested"}
    assert {row["source"] for row in rows} == {"paper", "README"}
    assert markdown(rows).count("\n") == len(rows) + 2


def test_a_shown_claim_stands_in_the_table_with_its_numbers(tmp_path, monkeypatch):
    runs = [
        make_run(name, 8, seed, last=0.5 + shift)
        for seed, value in enumerate(UP)
        for name, shift in (("gepo", value), ("gspo", 0.0))
    ]
    monkeypatch.setattr(verdicts, "CLAIMS", (claim_of(),))

    write_claims(results_of(tmp_path, "e", runs), tmp_path / "claims.json")
    (row,) = json.loads((tmp_path / "claims.json").read_text())

    assert (row["seeds"], row["steps"], row["difference"], row["verdict"]) == (6, 3, 0.1, "shown")
    # s = sqrt(0.001 / 5), s / sqrt(6) times 2.5706.
    assert row["high"] - 0.1 == pytest.approx(2.57058 * (0.0002 / 6) ** 0.5, abs=1e-4)
    assert row["p_sign_flip"] == pytest.approx(2 / 64, rel=1e-2)
    assert "| 6 | +0.100 (+0.085 to +0.115) | < 0.001 | < 0.001 | **shown** |" in markdown([row])


def test_damaged_results_are_an_error(tmp_path):
    for name in {name for claim in CLAIMS for name in claim.experiment.split("+")}:
        (tmp_path / f"{name}.json").write_text("{")

    with pytest.raises(ConfigError, match="is not JSON"):
        write_claims(tmp_path, tmp_path / "claims.json")


def test_declared_claims_are_told_apart():
    assert len({(claim.claim, claim.experiment, claim.test, claim.source) for claim in CLAIMS}) == len(CLAIMS)
    assert versions(0) == "no delay"
    assert versions(1) == "1 version"
