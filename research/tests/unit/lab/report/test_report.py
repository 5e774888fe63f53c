"""The report shows every algorithm and every failure, the same way each time, whatever the results hold."""

import csv
import json

import pytest

from heterorl.common.errors import ConfigError
from heterorl_research.lab.report.data import Run
from heterorl_research.lab.report.drawing.canvas import save
from heterorl_research.lab.report.paired import comparisons
from heterorl_research.lab.report.reading import load, load_table
from heterorl_research.lab.report.report import pictures_of, render, write_report
from heterorl_research.lab.report.sweeps import settings, swept_keys
from heterorl_research.lab.report.tables import rows, write_comparisons, write_runs
from research.tests.support.lab_results import make_run, write_results

pytestmark = pytest.mark.slow


def plain_runs(algorithms=("gepo", "gspo"), delays=(0, 64), seeds=(0, 1)):
    return [
        make_run(algorithm, delay, seed, last=0.5 + 0.1 * seed - delay / 400)
        for algorithm in algorithms
        for delay in delays
        for seed in seeds
    ]


def page_of(directory):
    """The page without its pictures, which take seconds to draw."""
    results = load(directory)
    return render(results, comparisons(results), [])


def draw(directory, *names):
    """Draw some of the pictures; all of them would take long."""
    found = {picture.name: picture for picture in pictures_of(load(directory))}
    for name in names:
        save(found[name], directory)
    return found


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_page_shows_every_algorithm_number_and_picture_and_needs_no_other_file(tmp_path):
    page = write_report(write_results(tmp_path, plain_runs())).read_text(encoding="utf-8")

    for text in ("gepo", "gspo", "no delay", "64 versions", "0.550 ± 0.635", "Synthetic", "no difference shown"):
        assert text in page
    pictures = {path.stem for path in tmp_path.glob("*.png")}
    assert pictures == {
        "accuracy", "accuracy_each", "last", "kl", "iw_variance", "advantage_error", "bias", "ess", "clip", "grad_norm",
        "staleness", "correlations", "training", "difference_gepo", "difference_online",
    }  # fmt: skip
    assert page.count("data:image/png;base64,") == page.count("<img") == len(pictures)


def test_csv_files_hold_every_run_and_comparison(tmp_path):
    results = load(write_results(tmp_path, [*plain_runs(), make_run("gspo", 8, 0, failed="=1+1")]))

    write_runs(results, tmp_path / "runs.csv")
    write_comparisons(comparisons(results), tmp_path / "comparisons.csv")
    runs, found = rows_of(tmp_path / "runs.csv"), rows_of(tmp_path / "comparisons.csv")

    assert len(runs) == 9
    assert [run["failed"] for run in runs if run["delay"] == "8.0"] == ["'=1+1"]
    # Two delays by two measures.
    assert [(c["algorithm"], c["pairs"], float(c["mean_difference"])) for c in found] == [("gspo", "2", 0.0)] * 4


def test_failed_runs_are_shown_with_their_error_and_are_in_no_mean(tmp_path):
    runs = [*plain_runs(), make_run("grpo", 8, 0, last=0.1, failed="loss is nan at step 7")]
    page = page_of(write_results(tmp_path, runs))

    assert '<tr class="bad"><td>grpo-d8-s0</td>' in page
    assert "loss is nan at step 7" in page
    (failed,) = [row for row in rows(load(tmp_path)) if row.arm.algorithm == "grpo"]
    assert (failed.last, failed.num_finished, failed.num_failed) == (None, 0, 1)


def test_rates_at_the_edge_failures_and_divergence_stand_in_the_table(tmp_path):
    runs = [make_run("gspo", 8, seed, lr=3e-4) for seed in (0, 1, 2)]
    runs[1] |= {"failed": "out of memory"}
    runs[2] |= {"last": 0.0, "diverged_at": 2, "warm_start_accuracy": None}
    write_results(tmp_path, [make_run("gepo", 8, 0, lr=1e-3), *runs])
    path = tmp_path / "results.json"
    tuning = {"engine": "fast", "device": "cpu", "at_edge": ["gspo-d8"]}
    path.write_text(json.dumps({**json.loads(path.read_text()), "tuning": tuning}))

    gepo, gspo = rows(load(tmp_path))
    assert (gspo.lr, gspo.is_at_edge, gepo.is_at_edge) == ("0.0003", True, False)
    assert gspo.collapse_share == "1/2 (0.09 to 0.91), 1 failed"
    assert "<td>0.0003*</td>" in page_of(tmp_path)


def test_foreign_text_is_escaped_everywhere(tmp_path):
    evil = "<script>alert(1)</script>$\\frac{"
    runs = [
        make_run(evil, 0, 0, run_id="a", task=evil, variant=evil),
        make_run(evil, 0, 1, run_id="b", task=evil, failed=evil, delay_unit=evil),
        make_run("gepo", 3, 1, run_id="c", delay_kind=evil, delay_unit=evil),
    ]

    page = page_of(write_results(tmp_path, runs, title=evil))

    draw(tmp_path, "last", "accuracy_each_0_script_alert_1_script_frac")
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_report_is_the_same_bytes_each_time_and_in_any_order_of_runs(tmp_path):
    runs = plain_runs(delays=(64,))
    first, second = write_results(tmp_path / "a", runs), write_results(tmp_path / "b", reversed(runs))

    for directory in (first, second):
        draw(directory, "kl", "accuracy")
        write_runs(load(directory), directory / "runs.csv")

    assert page_of(first) == page_of(second)
    assert (first / "runs.csv").read_bytes() == (second / "runs.csv").read_bytes()
    assert (first / "kl.png").read_bytes() == (second / "kl.png").read_bytes()
    assert (first / "accuracy.png").read_bytes() == (second / "accuracy.png").read_bytes()


def test_one_seed_has_no_interval_and_the_page_says_so(tmp_path):
    page = page_of(write_results(tmp_path, plain_runs(seeds=(0,))))

    assert "0.500 (1 seed)" in page
    assert "one pair: no test" in page


def test_missing_cells_files_and_numbers_are_left_out_and_named(tmp_path):
    runs = plain_runs()[:-1]
    runs[0] |= {"kl_mean": float("nan"), "last": None, "ledger_balanced": False}
    write_results(tmp_path, runs)
    (tmp_path / "runs" / "gepo-d0-s1.json").unlink()

    page = page_of(tmp_path)

    draw(tmp_path, "kl", "accuracy", "training", "correlations")
    assert "1 seed" in page
    assert "absent from curves:\ngepo-d0-s1." in page
    assert "not all accounted for in:\ngepo-d0-s0." in page
    # Once in results.json and once in the file of the run.
    assert "2 numbers are NaN or infinite" in page


@pytest.mark.parametrize("number", [1, 30])
def test_report_is_made_for_one_and_for_thirty_algorithms(tmp_path, number):
    names = [f"algorithm_{index}" for index in range(number)]

    page = page_of(write_results(tmp_path, plain_runs(algorithms=names, delays=(0,), seeds=(0,))))

    draw(tmp_path, "last")
    assert all(name in page for name in names)
    assert "No seed was run with both gepo" in page


def test_report_is_made_when_every_run_failed_and_when_there_is_none(tmp_path):
    all_failed = write_results(tmp_path / "a", [make_run("gepo", 0, 0, failed="out of memory")])

    assert "out of memory" in page_of(all_failed)
    assert pictures_of(load(all_failed)) == []
    assert "<img" not in write_report(write_results(tmp_path / "b", [])).read_text(encoding="utf-8")


def test_collapsed_runs_are_counted(tmp_path):
    # From 0.3 to 0.6: half of the gain is lost below 0.45.
    runs = [make_run("gspo", 64, seed, last=last) for seed, last in enumerate((0.44, 0.46, 0.1))]
    # A gain of 0.02, lost whole, and no gain: a fall within 0.05 is noise.
    kept = [
        make_run("gepo", 64, seed, last=last, best=best) for seed, (last, best) in enumerate([(0.3, 0.32), (0.26, 0.3)])
    ]

    found = {row.arm.algorithm: row for row in rows(load(write_results(tmp_path, [*runs, *kept])))}

    assert (found["gspo"].num_collapsed, found["gspo"].num_finished) == (2, 3)
    assert (found["gepo"].num_collapsed, found["gepo"].collapse_share) == (0, "0/2 (0.00 to 0.66)")
    assert found["gspo"].collapse_share == "2/3 (0.21 to 0.94)"
    assert found["gspo"].last.lowest == 0.1


def test_gap_of_means_of_three_is_no_gap_of_a_curve_that_rises_to_its_end():
    curve = [
        {"step": step, "accuracy": accuracy} for step, accuracy in enumerate((0.3, 0.5, 0.4, 0.6, 0.5, 0.7), start=1)
    ]
    rising = Run.model_validate(make_run("gepo", 64, 0, last=0.6, best=0.7, evaluations=curve))
    fallen = Run.model_validate(make_run("gepo", 64, 0, last=0.3, evaluations=[*curve, {"step": 7, "accuracy": 0.3}]))

    assert rising.smooth_gap == pytest.approx(0.0)
    assert fallen.smooth_gap == pytest.approx(0.3)
    assert Run.model_validate(make_run("gepo", 64, 0, evaluations=curve[:1])).smooth_gap is None


def test_row_says_whether_training_has_come_to_its_end(tmp_path):
    def long_run(seed, last):
        evaluations = [{"step": step, "accuracy": min(last, 0.3 + step / 400)} for step in range(0, 401, 20)]
        return make_run("gepo", 0, seed, evaluations=evaluations, last=last)

    (flat,) = rows(load(write_results(tmp_path / "a", [long_run(0, 0.5), long_run(1, 0.6)])))
    (rising,) = rows(load(write_results(tmp_path / "b", [long_run(0, 1.25), long_run(1, 1.3)])))

    assert flat.flatness == "+0.000 \u00b1 0.000, flat"
    assert rising.flatness.startswith("+0.2")
    assert "flat" not in rising.flatness
    assert "may still turn\nwhen training goes on: addition gepo." in page_of(tmp_path / "b")
    assert "may still turn" not in page_of(tmp_path / "a")


def test_results_alone_are_enough_for_curves(tmp_path):
    runs = plain_runs()
    write_results(tmp_path, runs)
    table = json.loads((tmp_path / "results.json").read_text())
    for row, run in zip(table["runs"], runs, strict=True):
        row["evaluations"] = {
            "step": [found["step"] for found in run["evaluations"]],
            "accuracy": [found["accuracy"] for found in run["evaluations"]],
        }
        (tmp_path / "runs" / f"{run['run_id']}.json").unlink()
    (tmp_path / "results.json").write_text(json.dumps(table))

    results = load(tmp_path)

    assert results.missing_files == []
    assert [run.curve for run in results.runs] == [run.curve for run in load_table(tmp_path / "results.json").runs]
    assert all(list(run.curve) == [0, 1, 2, 3] for run in results.runs)
    assert {"accuracy", "difference_gepo"} <= {picture.name for picture in pictures_of(results)}


def test_delays_are_sorted_by_size_and_none_and_zero_are_one(tmp_path):
    kinds = [
        make_run("gepo", 64, 0),
        make_run("gepo", 8, 0),
        make_run("gepo", 0, 0),
        make_run("gepo", 0, 1, delay_kind="fixed", delay_unit="seconds"),
        make_run("gepo", 1800, 0, delay_kind="lognormal", delay_unit="seconds"),
        make_run("gepo", 1, 0),
    ]

    labels = [delay.label for delay in load(write_results(tmp_path, kinds)).delays]

    assert labels == ["no delay", "1 version", "8 versions", "64 versions", "lognormal <= 1800 s"]


def test_sweeps_get_a_panel_per_swept_key(tmp_path):
    runs = [
        make_run(algorithm, 8, seed, variant=variant)
        for algorithm in ("gepo", "gspo")
        for seed in (0, 1)
        for variant in ("lr=0.001,beta=0", "lr=0.003,beta=0", "")
    ]

    page = page_of(write_results(tmp_path, runs))

    assert swept_keys(load(tmp_path)) == ["beta", "lr"]
    assert list(draw(tmp_path, "sweep_0")["sweep_0"].panels) == ["beta; 8 versions", "lr; 8 versions"]
    assert "gspo [lr=0.003,beta=0]" in page
    assert settings("lr = 1e-3, odd") == {"lr": "1e-3", "variant": "odd"}


@pytest.mark.parametrize(
    "change", [{"run_id": "../../etc/passwd"}, {"run_id": ""}, {"seed": "many"}, {"delay": None}, {"algorithm": None}]
)
def test_malformed_results_are_an_error_of_configuration(tmp_path, change):
    results = {"runs": [{**make_run("gepo", 0, 0), **change}]}
    (tmp_path / "results.json").write_text(json.dumps(results))

    with pytest.raises(ConfigError):
        write_report(tmp_path)


def test_absent_broken_and_doubled_results_are_errors_of_configuration(tmp_path):
    with pytest.raises(ConfigError, match="run the experiment first"):
        load(tmp_path)
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        load(tmp_path)
    (tmp_path / "results.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        load(tmp_path)
    write_results(tmp_path, [make_run("gepo", 0, 0)] * 2)
    with pytest.raises(ConfigError, match="share a run_id"):
        load(tmp_path)
