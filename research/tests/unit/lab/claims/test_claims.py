"""A verdict is a rule over the seeds' differences; results that are not there are not tested."""

import json

import pytest

from heterorl_research.lab.claims import verdicts
from heterorl_research.lab.claims.claim import Claim, Observed, Side, judge, p_value, versions
from heterorl_research.lab.claims.declared import CLAIMS
from heterorl_research.lab.claims.verdicts import differences, gather, markdown, write_claims
from heterorl_research.lab.report.reading import load_table
from heterorl_research.lab.statistics.power import power
from heterorl_research.lab.statistics.significance import equivalence_test, t_test
from research.tests.support.lab_results import make_run

UP = [0.10, 0.12, 0.08, 0.11, 0.09, 0.10]
NOISE = [0.10, -0.12, 0.08, -0.11, 0.09, -0.05]


def claim_of(direction="above", **changes):
    test = {"a": Side(algorithm="gepo", delay="8 versions"), "b": Side(algorithm="gspo", delay="8 versions")}
    fields = {
        "claim": "c",
        "source": "paper",
        "question": "q",
        "experiment": "e",
        "task": "addition",
        **test,
        **changes,
    }
    return Claim(direction=direction, **fields)


def verdict(claim, values):
    (found,) = judge([Observed(claim=claim, differences=values)])
    return found.verdict


def verdicts_of(*tested):
    return [found.verdict for found in judge([Observed(claim=claim, differences=values) for claim, values in tested])]


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
    tests = [claim_of(b=Side(algorithm=name, delay="8 versions")) for name in ("a", "b", "c", "d")]
    assert verdicts_of(*((one, weak) for one in tests)) == ["not shown"] * 4
    # Four experiments that answer one question are four chances too.
    assert verdicts_of(*((claim_of(experiment=name), weak) for name in "efgh")) == ["not shown"] * 4
    # What is not tested, another question, and the same test from the other side take no part in the correction.
    turned = claim_of("below", a=claim.b, b=claim.a)
    others = [(tests[0], []), (claim_of(question="other", ratio=0.5), weak), (turned, [-value for value in weak])]
    assert verdicts_of((claim, weak), *others) == ["shown", "not tested", "shown", "shown"]


def test_exploratory_evidence_suggests_and_is_corrected_apart():
    weak = [0.03 + 0.0224 * sign for sign in (1, -1, 1, -1, 1, -1)]
    looks = [
        Observed(claim=claim_of(experiment=name), differences=UP, evidence="exploratory")
        for name in ("a", "b", "c", "d")
    ]

    found = judge([*looks, Observed(claim=claim_of("below"), differences=UP, evidence="exploratory")])
    assert [one.verdict for one in found] == ["suggested"] * 4 + ["doubted"]
    assert judge([*looks, Observed(claim=claim_of(), differences=weak)])[-1].verdict == "shown"


@pytest.mark.parametrize(
    ("direction", "margin", "collapsed", "expected"),
    [
        # 2 sum C(16, k) / 2^16 for k >= 13 is .021, for k >= 12 .077.
        ("above", 0.5, 13, "shown"),
        ("above", 0.5, 12, "not shown"),
        ("above", 0.5, 3, "contradicted"),
        # 2 x .75^16 = .020; 2 x (.75^16 + 16 x .25 x .75^15) = .127.
        ("below", 0.25, 0, "shown"),
        ("below", 0.25, 1, "not shown"),
    ],
)
def test_share_of_seeds(direction, margin, collapsed, expected):
    claim = claim_of(
        direction, margin=margin, b=None, a=Side(algorithm="gspo", delay="8 versions", metric="has_collapsed")
    )

    (found,) = judge([Observed(claim=claim, differences=[1.0] * collapsed + [0.0] * (16 - collapsed))])

    assert (found.verdict, found.num, found.power) == (expected, 16, None)
    assert 0.0 <= found.low <= collapsed / 16 <= found.high <= 1.0


def test_power_is_of_accuracies_with_a_spread():
    found = [
        judge([Observed(claim=claim_of(**changes), differences=values)])[0].power
        for changes, values in (
            ({}, UP), ({}, [0.1, 0.1]),
            ({"a": Side(algorithm="gepo", delay="8 versions", metric="kl_mean")}, UP),
        )
    ]  # fmt: skip

    assert found == [pytest.approx(power(0.05, sd=0.0002**0.5, num=6)), None, None]


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
    found = load_table(results_of(tmp_path, "e", runs) / "e.json").runs

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

    assert [differences(one.claim, one.runs) for one in found] == [pytest.approx([0.2, 0.2]), [], []]
    assert [len(one.runs) for one in found] == [4, 2, 0]


def test_all_variants_are_averaged_over_seeds_that_have_them_all(tmp_path):
    runs = [
        make_run(name, 8, seed, last=last, variant=variant)
        for seed in (0, 1, 2)
        for variant, gain in (("lr=1", 0.1), ("lr=2", 0.3))
        for name, last in (("gepo", 0.5 + gain), ("gspo", 0.5))
        if (seed, variant, name) != (2, "lr=2", "gspo")
    ]
    found = load_table(results_of(tmp_path, "e", runs) / "e.json").runs
    sides = {
        key: Side(algorithm=name, delay="8 versions", variant=None) for key, name in (("a", "gepo"), ("b", "gspo"))
    }

    assert differences(claim_of(**sides), found) == pytest.approx([0.2, 0.2])


def kept_results(directory, name, runs, **more):
    directory.mkdir(exist_ok=True)
    (directory / f"{name}.json").write_text(json.dumps({"runs": runs, "protocol": {"tune": False}, **more}))


def evidence_of(directory, claim):
    (found,) = gather([claim], directory)
    return found.evidence


def test_evidence_needs_a_protocol_and_seeds_that_did_not_suggest_the_claim(tmp_path):
    def runs(first, count=5):
        return [make_run(name, 8, first + seed) for name in ("gepo", "gspo") for seed in range(count)]

    kept_results(tmp_path, "e", runs(200))
    kept_results(tmp_path, "confirm", runs(300))
    kept_results(tmp_path, "pilot", runs(201))
    results_of(tmp_path, "old", runs(0))

    kept_results(tmp_path, "begun", runs(200), protocol={"tune": False, "least_seeds": 6})
    kept_results(tmp_path, "few", runs(200, 4), protocol={"tune": False, "least_seeds": 4})

    assert evidence_of(tmp_path, claim_of()) == "protocol"
    assert evidence_of(tmp_path, claim_of(experiment="begun")) == "exploratory"
    assert evidence_of(tmp_path, claim_of(experiment="few")) == "exploratory"
    assert evidence_of(tmp_path, claim_of(experiment="old")) == "exploratory"
    assert evidence_of(tmp_path, claim_of(experiment="e+old")) == "exploratory"
    assert evidence_of(tmp_path, claim_of(suggested_by=("old",))) == "protocol"
    assert evidence_of(tmp_path, claim_of(suggested_by=("pilot",))) == "exploratory"
    assert evidence_of(tmp_path, claim_of(experiment="confirm", suggested_by=("e", "pilot"))) == "confirmation"


def test_failed_runs_edges_of_the_grid_and_flat_curves_stand_in_the_row(tmp_path, monkeypatch):
    level = [{"step": step, "accuracy": 0.5} for step in range(0, 401, 40)]
    runs = [
        make_run(name, delay, seed, evaluations=level)
        for name in ("gepo", "gspo") for delay in (0, 8) for seed in (200, 201, 202)
    ]  # fmt: skip
    for run in runs:
        # No two alike: without a spread there is no interval.
        run["evaluations"] = [{**one, "accuracy": 0.5 + run["seed"] * one["step"] / 1e8} for one in level]
    runs[4] |= {"failed": "out of memory"}
    runs[5] |= {"last": 0.0, "diverged_at": 7}
    runs[6]["evaluations"] = [{**one, "accuracy": one["step"] / 1000} for one in level]
    kept_results(
        tmp_path, "e", runs, tuning={"engine": "fast", "device": "cpu", "at_edge": ["gspo-d8"]},
    )  # fmt: skip
    gepo = Side(algorithm="gepo", delay="8 versions")
    start = Side(algorithm="gepo", delay="8 versions", metric="warm_start_accuracy")
    monkeypatch.setattr(verdicts, "CLAIMS", (claim_of(), claim_of(a=gepo, b=start)))
    monkeypatch.setattr(verdicts, "FEW", 0)

    write_claims(tmp_path, tmp_path / "claims.json")
    both, alone = json.loads((tmp_path / "claims.json").read_text())

    # The failed seed is in no pair and is counted; the one that diverged ended at 0.
    assert (both["seeds"], both["failed"], both["difference"]) == (2, 1, -0.25)
    assert (both["is_flat_online"], alone["is_flat_online"]) == (False, True)
    assert (both["is_rate_at_edge"], alone["is_rate_at_edge"]) == (True, False)
    assert both["relaxed"] == ["3 seeds", "one rate"]
    assert "| 2, 1 runs failed | -0.250 (" in markdown([both])
    assert "| protocol, relaxed: 3 seeds, one rate; rate at an end of the grid |" in markdown([both])


def test_table_has_every_declared_claim_and_the_keys_that_programs_read(tmp_path):
    number = write_claims(tmp_path, tmp_path / "claims.json")
    rows = json.loads((tmp_path / "claims.json").read_text())

    assert number == len(rows) == len(CLAIMS)
    keys = {"claim", "source", "experiment", "seeds", "difference", "low", "high", "p", "verdict"}
    assert all(keys <= row.keys() for row in rows)
    assert {row["verdict"] for row in rows} == {"not tested"}
    assert {row["source"] for row in rows} == {"paper", "README", "project"}
    page = markdown(rows)
    assert sum(line.startswith("| ") and "---" not in line for line in page.splitlines()) == len(rows) + page.count(
        "## "
    )


def test_a_shown_claim_stands_in_the_table_with_its_numbers(tmp_path, monkeypatch):
    runs = [
        make_run(name, 8, seed, last=0.5 + shift)
        for seed, value in enumerate(UP)
        for name, shift in (("gepo", value), ("gspo", 0.0))
    ]
    monkeypatch.setattr(verdicts, "CLAIMS", (claim_of(),))

    kept_results(tmp_path, "e", runs)
    write_claims(tmp_path, tmp_path / "claims.json")
    (row,) = json.loads((tmp_path / "claims.json").read_text())

    assert (row["seeds"], row["steps"], row["difference"], row["verdict"]) == (6, 3, 0.1, "shown")
    # s = sqrt(0.001 / 5), s / sqrt(6) times 2.5706.
    assert row["high"] - 0.1 == pytest.approx(2.57058 * (0.0002 / 6) ** 0.5, abs=1e-4)
    assert row["p_sign_flip"] == pytest.approx(2 / 64, rel=1e-2)
    label = "protocol, relaxed: 6 seeds, one rate"
    assert f"| c | `e`, 3 steps | 6 | +0.100 (+0.085 to +0.115) | < 0.001 | {label} | **shown** |" in markdown([row])


def test_the_evidence_says_which_rules_the_runs_of_a_claim_relax(tmp_path, monkeypatch):
    far = {"a": Side(algorithm="gepo", delay="256 versions"), "b": Side(algorithm="gspo", delay="256 versions")}
    runs = [
        make_run(name, delay, 200 + seed, last=0.5 + shift, steps=512, lr=7e-4)
        for seed, value in enumerate(UP) for delay in (8, 256) for name, shift in (("gepo", value), ("gspo", 0.0))
    ]  # fmt: skip
    kept_results(tmp_path, "e", runs, protocol={"tune": False, "steps_per_lag": 2.0, "least_seeds": 6})
    kept_results(tmp_path, "few", runs, protocol={"tune": False, "least_seeds": 8})
    results_of(tmp_path, "old", runs)
    claims = (claim_of(), claim_of(**far), claim_of(experiment="few"), claim_of(experiment="e+old"))
    monkeypatch.setattr(verdicts, "CLAIMS", claims)

    write_claims(tmp_path, tmp_path / "claims.json")
    rows = json.loads((tmp_path / "claims.json").read_text())

    # 512 steps are short for 256 versions, not for 8; without a protocol there is nothing to relax.
    assert [row["relaxed"] for row in rows] == [
        ["6 seeds", "one rate"], ["6 seeds", "2 x delay", "one rate"], ["6 seeds", "one rate"], []
    ]  # fmt: skip
    assert [line.split(" | ")[-2] for line in markdown(rows).splitlines() if line.startswith("| c ")] == [
        "protocol, relaxed: 6 seeds, one rate", "protocol, relaxed: 6 seeds, 2 x delay, one rate",
        "exploratory", "exploratory",
    ]  # fmt: skip


def test_results_that_are_missing_or_damaged_leave_a_claim_untested_and_say_why(tmp_path, monkeypatch):
    runs = [make_run("gepo", 8, seed, last=value) for seed, value in enumerate(UP)]
    kept_results(tmp_path, "e", [*runs, *(make_run("gspo", 8, seed, last=0.0) for seed in range(len(UP)))])
    kept_results(tmp_path, "one", runs[:1])
    (tmp_path / "damaged.json").write_text("{")
    claims = [
        claim_of(experiment=experiment, suggested_by=suggested_by)
        for experiment, suggested_by in (
            ("e", ()), ("e+absent", ()), ("damaged+e", ()), ("e", ("absent",)), ("e", ("damaged",)), ("one", ()),
        )
    ]  # fmt: skip
    monkeypatch.setattr(verdicts, "CLAIMS", tuple(claims))

    write_claims(tmp_path, tmp_path / "claims.json")
    rows = json.loads((tmp_path / "claims.json").read_text())

    assert [row["verdict"] for row in rows] == ["shown", *["not tested"] * 5]
    assert [row["reason"] and row["reason"][:27] for row in rows] == [
        None, "no absent.json", "damaged.json cannot be read", "no absent.json", "damaged.json cannot be read",
        "fewer than two pairs of see",
    ]  # fmt: skip
    assert all(row["p"] is row["difference"] is None and row["seeds"] == 0 for row in rows[1:])
    assert "| not tested: no absent.json |" in markdown(rows)


def test_declared_claims_are_told_apart():
    assert len({(claim.claim, claim.experiment, claim.test, claim.source) for claim in CLAIMS}) == len(CLAIMS)
    assert all(claim.suggested_by or claim.source != "README" for claim in CLAIMS)
    # Who reads the page sees neither source nor test: sentence and experiment tell rows apart.
    assert len({(claim.claim, claim.experiment) for claim in CLAIMS}) == len(CLAIMS)
    assert versions(0) == "no delay"
    assert versions(1) == "1 version"
