"""Which runs an experiment has, what they are called, and what is refused."""

import pytest
from pydantic import ValidationError

from heterorl.common.errors import ConfigError
from heterorl.common.process.config_file import InvalidConfig, load
from heterorl.common.tasks.arithmetic import ArithmeticTask
from heterorl.common.wire.common_messages import bytes_digest
from heterorl_research.lab import warm_starts
from heterorl_research.lab.benchmarks import evaluation_seed, split_evaluation
from heterorl_research.lab.cell import list_cells
from heterorl_research.lab.config import ExperimentConfig, RegimeConfig
from heterorl_research.lab.protocol.rates import trials
from heterorl_research.lab.protocol.rules import check
from heterorl_research.lab.results import LATER_KEYS, cell_digest, identity
from heterorl_research.lab.run import find_experiment

WITH_PROTOCOL = [
    "horizon", "sawtooth", "ladder", "plane", "lengths", "long", "clips", "clips256", "candidates", "candidates_ends",
    "confirm", "arms", "s6_latency", "whole", "whole_ends", "whole_lengths", "gates21", "gates101", "stale2026_t21",
    "stale2026_t101", "stale2026_t101_256", "warmup21", "reference", "cliff301", "stale2026",
]  # fmt: skip
SHIPPED = [
    "quick", "stale64", "stale256", "latency1800", "sweeps", "recommend", "tasks", "s7_sweeps", "large", "cliff1001",
    *WITH_PROTOCOL,
]  # fmt: skip


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_experiments_are_valid_and_their_runs_have_names_of_their_own(name):
    cells = list_cells(load(ExperimentConfig, find_experiment(name)))

    assert len({cell.run_id for cell in cells}) == len(cells) > 0
    assert len({cell_digest(cell) for cell in cells}) == len(cells)


def test_runs_with_a_seed_of_the_warm_start_begin_from_one():
    keys = [
        {warm_starts.key(cell) for cell in list_cells(load(ExperimentConfig, find_experiment("cliff301"), overrides))}
        for overrides in ([], ["tasks=[{name='t', warm_start_seed=401}]"], ["tasks=[{name='t'}]"])
    ]
    assert [len(some) for some in keys] == [1, 1, 4]


def test_every_shipped_experiment_is_listed_here():
    assert {path.stem for path in find_experiment("quick").parent.glob("*.toml")} == set(SHIPPED)


@pytest.mark.parametrize(
    ("name", "digest"),
    # Of all digests of the experiment. Whoever adds a key of a run names it in LATER_KEYS; then results stay those of
    # the experiment that made them.
    [
        ("quick", "a995386239e28ad2d74d21548cfb066dc31245e0b44d045bd4ee1831acc9984c"),
        ("stale64", "423aca25e35b398f856aea544c91c06bd7f8cf93685f5d9cf438e57aeeb87578"),
        ("stale256", "b5977e1f50d9177acf998942c1e6e7774c0ba7c0bb36a9e255a2c0b9cc044eca"),
        ("latency1800", "bbe73af6db773549f0c394ff9a275ea2dac69b950044a53b1ca028bc3849d503"),
        ("sweeps", "5e1fe96b034aad07d2f49f50012910d3b24a333cca2350e7fded560821d663e9"),
        ("recommend", "6c1ffdc6629d29d15fdccf16759da1d1d38e10345bce7c385259bc22201877ce"),
        ("tasks", "aabf197043f909a88c065f0396c4e96293713b46738caafafd21f3618a7720fc"),
    ],
)
def test_a_new_key_leaves_the_digests_of_earlier_runs_alone(name, digest):
    digests = [cell_digest(cell) for cell in list_cells(load(ExperimentConfig, find_experiment(name)))]

    assert bytes_digest("\n".join(digests).encode()) == digest


def test_a_later_key_that_is_set_is_another_run():
    plain, smooth, slow = (
        list_cells(ExperimentConfig(regime={"last_evaluations": last}, tasks=({"lr": lr},)))[0]
        for last, lr in ((1, None), (3, None), (1, 1e-4))
    )

    assert len({cell_digest(cell) for cell in (plain, smooth, slow)}) == 3


def test_later_keys_exist():
    cell = list_cells(ExperimentConfig())[0]

    assert LATER_KEYS["task"] <= set(type(cell.task).model_fields)
    assert LATER_KEYS["regime"] <= set(type(cell.regime).model_fields)


def test_a_learning_rate_is_the_variants_or_the_chosen_or_the_tasks_or_the_regimes():
    experiment = ExperimentConfig(
        algorithms=({"name": "a"}, {"name": "b"}),
        tasks=({"name": "t", "lr": 2e-4}, {"name": "u"}),
        variants=({"name": ""}, {"name": "lr=0.1", "set": {"lr": 0.1}}),
        regime={"lr": 5e-4},
        protocol={"chosen": {"t-a-none0v": 1e-3, "t-a-none0v-lr=0.1": 7.0}, "least_seeds": 2},
        seeds=(0, 1),
    )

    found = {cell.arm_id: cell.regime.lr for cell in list_cells(experiment)}

    assert found == {
        "t-a-none0v": 1e-3, "t-b-none0v": 2e-4, "u-a-none0v": 5e-4, "u-b-none0v": 5e-4,
        **{f"{task}-{name}-none0v-lr=0.1": 0.1 for task in "tu" for name in "ab"},
    }  # fmt: skip


@pytest.mark.parametrize("name", WITH_PROTOCOL)
def test_experiments_with_a_protocol_keep_it_once_their_rates_are_chosen(name):
    experiment = load(ExperimentConfig, find_experiment(name))
    protocol = experiment.protocol
    chosen = {cell.arm_id: 1e-3 for cell in list_cells(experiment)}
    tuned = experiment.model_copy(update={"protocol": protocol.model_copy(update={"chosen": chosen})})

    suggested_on = {one: load(ExperimentConfig, find_experiment(one)).seeds for one in protocol.confirms}
    check(tuned, list_cells(tuned), suggested_on=suggested_on)
    if protocol.tune:
        trials(experiment)
        with pytest.raises(ConfigError, match="no learning rate is chosen for"):
            check(experiment, list_cells(experiment))
    assert "gepo" in {algorithm.name for algorithm in experiment.algorithms}


def test_stale64_has_the_losses_of_the_sources_at_three_delays():
    experiment = load(ExperimentConfig, find_experiment("stale64"))

    assert {algorithm.loss.kind for algorithm in experiment.algorithms} >= {
        "grpo", "dr_grpo", "bnpo", "dapo", "gspo", "gmpo", "delta_l", "topr", "cispo", "gepo",
        "gepo_plus", "eqp", "ds_gspo", "ds_gepo",
    }  # fmt: skip
    assert {cell.delay_value for cell in list_cells(experiment)} == {0.0, 8.0, 64.0}
    assert len(experiment.seeds) >= 5


def test_a_seed_is_finished_before_the_next_begins():
    cells = list_cells(ExperimentConfig(seeds=(3, 5), delays=({"kind": "none"}, {"kind": "fixed", "value": 2})))

    assert [cell.seed for cell in cells] == [3, 3, 5, 5]


def test_variants_change_the_regime_and_every_loss():
    experiment = ExperimentConfig(
        variants=({"name": "lr=0.1", "set": {"lr": 0.1}}, {"name": "kl=1", "set": {"loss.sampler_kl": 1.0}})
    )
    first, second = list_cells(experiment)

    assert (first.regime.lr, first.algorithm.loss.sampler_kl) == (0.1, 0.005)
    assert (second.regime.lr, second.algorithm.loss.sampler_kl) == (1e-3, 1.0)


def test_a_variant_of_an_unknown_key_names_it():
    with pytest.raises(ConfigError, match=r"variants\.set\.learning_rate"):
        list_cells(ExperimentConfig(variants=({"name": "x", "set": {"learning_rate": 1}},)))


def test_two_runs_of_one_name_are_refused():
    twice = ({"name": "gepo"}, {"name": "gepo", "loss": {"kind": "gspo"}})
    with pytest.raises(ConfigError, match="two runs are called add3-gepo-none0v-s0"):
        list_cells(ExperimentConfig(algorithms=twice))


def test_refresh_and_transit_of_the_same_delay_have_different_names():
    delays = tuple(
        {"kind": "lognormal", "low": 60, "high": 1800, "semantics": semantics}
        for semantics in ("transit", "refresh_interval")
    )
    names = [cell.run_id for cell in list_cells(ExperimentConfig(delays=delays))]

    assert names == ["add3-gepo-lognormal1800s-s0", "add3-gepo-lognormal1800sr-s0"]


def test_the_default_of_a_delay_is_part_of_its_name():
    delays = tuple({"kind": "lognormal", "low": 60, "high": 1800, "default": default} for default in (0, 60))
    cells = list_cells(ExperimentConfig(delays=delays))

    assert [cell.run_id for cell in cells] == ["add3-gepo-lognormal1800s-s0", "add3-gepo-lognormal1800sd60-s0"]
    assert [identity(cell)["delay_kind"] for cell in cells] == ["lognormal", "lognormal less 60"]


GOLDEN = {
    ("quick", "add3-gepo-fixed64v-s0"): "71c792b06b8fcbb519a51d7fa8af9f24dd488e3b40a6b579016c21c23e9ad523",
    ("stale64", "add3-gepo-fixed64v-s0"): "71c792b06b8fcbb519a51d7fa8af9f24dd488e3b40a6b579016c21c23e9ad523",
    ("stale64", "add3-dapo-none0v-s4"): "6039bc974f75019b2039852a09b638bcd0fb2aa5ab51548dc4c6eaf104ef5879",
    ("latency1800", "add3-gspo-weibull1800sr-s2"): "f3c4239d59305b5e833aa998fe37fba2fdfd7bc8de8fd89ad06f94078e8bbf37",
    (
        "sweeps",
        "add3-gepo-fixed64v-temperature=0.6-s1",
    ): "247cd8bd4cf20191984c6d75d533e01e7111557e192f522933961904908f83f7",
    ("tasks", "progression-topr-fixed32v-s2"): "6a8ae2504337371d305daa57e699e2c73012f97f30a5f948a8e96beb0f38682a",
}


@pytest.mark.parametrize(("name", "run_id"), GOLDEN)
def test_runs_that_set_no_later_key_keep_their_digests(name, run_id):
    cells = {cell.run_id: cell for cell in list_cells(load(ExperimentConfig, find_experiment(name)))}

    assert cell_digest(cells[run_id]) == GOLDEN[name, run_id]


LATER = [
    ("regime", {"top_p": 0.9}), ("regime", {"top_k": 3}), ("regime", {"lease_order": "newest"}),
    ("regime", {"sampler_speed": 2.0}), ("regime", {"versions_in_flight": 9}),
    ("regime", {"evaluation_offset": 9}), ("regime", {"evaluation_noise": "by_version"}),
    ("regime", {"steps_per_version": 2}),
    ("delay", {"default": 2.0}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("part", "change"), LATER, ids=lambda value: "-".join(value) if isinstance(value, dict) else ""
)
def test_a_later_key_that_is_set_makes_another_run(part, change):
    delay = {"kind": "lognormal", "low": 1, "high": 9}
    changed = {"delays": ({**delay, **change},)} if part == "delay" else {"delays": (delay,), "regime": change}
    (plain,), (other,) = (list_cells(ExperimentConfig(**{"delays": (delay,), **some})) for some in ({}, changed))

    assert change.keys() <= LATER_KEYS[part]
    assert cell_digest(other) != cell_digest(plain)


def test_names_cannot_leave_their_directory():
    with pytest.raises(ValidationError, match="name"):
        ExperimentConfig(algorithms=({"name": "../gepo"},))


def test_an_unknown_experiment_lists_those_that_are_shipped():
    with pytest.raises(
        ConfigError, match="lengths, long, plane, quick, recommend, reference, s6_latency, s7_sweeps, sawtooth"
    ):
        find_experiment("stale65")


def test_an_offset_leaves_the_prompts_before_it_out():
    task = ArithmeticTask(digits=2)

    def texts(**asked):
        parts = split_evaluation(task, **asked).values()
        return {part.evaluation_prompt(index).text for part in parts for index in range(part.num_evaluation_prompts)}

    first, second = texts(num_prompts=60), texts(num_prompts=60, offset=60)
    assert len(first) == len(second) == 60
    assert not first & second
    assert len(texts(num_prompts=600, offset=500)) == 26
    with pytest.raises(ConfigError, match=r"regime\.evaluation_offset: the task has 526 held-out prompts"):
        texts(num_prompts=1, offset=526)


def test_noise_of_an_evaluation_is_the_seeds_or_the_versions_own():
    same, own = RegimeConfig(), RegimeConfig(evaluation_noise="by_version")

    assert {evaluation_seed(same, seed=3, version=version) for version in (0, 20, 40)} == {3}
    seeds = [evaluation_seed(own, seed=seed, version=version) for seed in (3, 4) for version in (0, 20, 40)]
    assert seeds == [evaluation_seed(own, seed=seed, version=version) for seed in (3, 4) for version in (0, 20, 40)]
    # Prompt i takes the seed i further on: none of another version or run comes near.
    assert min(abs(a - b) for a in seeds for b in seeds if a != b) > 10**6
    assert len(set(seeds)) == 6


def test_held_out_sums_are_parted_by_their_carries():
    parts = split_evaluation(ArithmeticTask(digits=2), num_prompts=60)

    assert sorted(parts) == ["easier", "harder"]
    assert sum(part.num_evaluation_prompts for part in parts.values()) == 60

    def carries(text):
        left, right = text.rstrip("=").split("+")
        ones = int(left[1]) + int(right[1]) > 9
        return ones + (int(left[0]) + int(right[0]) + ones > 9)

    count = {
        name: [carries(part.evaluation_prompt(index).text) for index in range(part.num_evaluation_prompts)]
        for name, part in parts.items()
    }
    assert max(count["easier"]) < min(count["harder"])


@pytest.mark.parametrize("keys", ['name = "a b"', '[[tasks]]\nname = "a b"', '[[algorithms]]\nname = "a b"'])
def test_a_wrong_name_is_told_in_words(tmp_path, keys):
    path = tmp_path / "experiment.toml"
    path.write_text(keys)

    with pytest.raises(InvalidConfig, match="'a b' is not a name of") as caught:
        load(ExperimentConfig, path)
    assert "^" not in str(caught.value)
