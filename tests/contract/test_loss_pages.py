"""The tables of docs/losses.md and docs/own-losses.md are what configuration and code say."""

import ast
import dataclasses
import inspect
import itertools
import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest
from pydantic import TypeAdapter, ValidationError

from heterorl.learner.learner_config import LearnerConfig
from heterorl.learner.loss import custom, loss_config
from heterorl.learner.loss.loss_config import LossConfig
from heterorl.learner.loss.loss_spec import ALGORITHMS

DOCS = Path(__file__).parents[2] / "docs"
LOSSES = (DOCS / "losses.md").read_text(encoding="utf-8")
OWN = (DOCS / "own-losses.md").read_text(encoding="utf-8")
ADAPTER = TypeAdapter(LossConfig)
CLASSES = {
    each.model_fields["kind"].default: each
    for each in vars(loss_config).values()
    if inspect.isclass(each) and issubclass(each, loss_config.LossOptions) and "kind" in each.model_fields
}
ADVANTAGES = {"std": "mean_std", "r - mean": "mean", "(r - mean) / Beta": "beta"}
AGGREGATIONS = {
    "rollout mean": "sequence_mean",
    "token mean": "token_mean",
    "token sum, rollout mean": "sequence_sum",
    "1 / (N max_new_tokens)": "max_length",
    "T_i^-a / (max_new_tokens sum_j T_j^-a), a = `length_power`": "length_power",
}


def table(text, head):
    """Cells of the rows below a header that begins with `head`."""
    lines = text[text.index(f"| {head}") :].splitlines()
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[2:])
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip()[1:-1])] for row in rows]


KINDS = {re.match(r"`(\w+)`", row[0])[1]: row for row in table(LOSSES, "kind | weight and clip")}


def defaults_in(words):
    """Keys and defaults that a row names: `key` (.5), `key = 1`, clip .2 / .2, cap 2."""
    found = re.findall(r"`(\w+)` \((\.?\d[\d.]*)\)", words) + re.findall(r"`(\w+) = ([\d.]+)`", words)
    for keys, pattern in (
        (("eps_low", "eps_high"), r"(?:clip|eps) (\.?\d+) / (\.?\d+)"),
        (("cap",), r"\bcap (\d+)"),
        (("rho_cap", "c_cap"), r"\bcaps (\d+)"),
        (("drift_limit",), r"z_i < -([\d.]+) \(`drift_limit`\)"),
    ):
        for match in re.finditer(pattern, words):
            values = match.groups()
            found += zip(keys, values * (len(keys) // len(values)), strict=True)
    return {key: float(value) for key, value in found}


def test_the_page_has_every_kind_and_marks_the_default():
    assert KINDS.keys() == ALGORITHMS.keys(), "a kind of LossConfig has its row in the table of docs/losses.md"
    assert ALGORITHMS.keys() == CLASSES.keys() - {"custom"}, "a class of loss_config.py is in the union LossConfig"
    assert [kind for kind, row in KINDS.items() if "(default)" in row[0]] == [LearnerConfig().loss.kind]
    named = {kind for row in table(LOSSES, "samplers | completions") for kind in re.findall(r"`(g\w+|topr)`", row[2])}
    assert named <= KINDS.keys()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_kind_has_the_advantage_the_average_and_the_defaults_of_its_row(kind):
    _, weight, advantage, aggregation, _ = KINDS[kind]
    loss = ADAPTER.validate_python({"kind": kind})

    assert loss.advantage == next(value for words, value in ADVANTAGES.items() if advantage.startswith(words))
    assert loss.aggregation == AGGREGATIONS[aggregation]
    said = defaults_in(weight)
    assert {key: getattr(loss, key) for key in said} == said


def test_rows_name_these_defaults():
    # A row that names a default in no form of `defaults_in` is not compared: add the new one here.
    assert {kind: sorted(said) for kind, row in KINDS.items() if (said := defaults_in(row[1]))} == {
        "gepo": ["eps_high", "eps_low"],
        "gepo_1s": ["eps_high"],
        "gepo_whole": ["drift_limit"],
        "gepo_plus": ["kl_threshold"],
        "ds_gspo": ["defensive_fraction"],
        "gmpo": ["eps_log"],
        "dapo": ["eps_high", "eps_low"],
        "bnpo": ["eps_high", "eps_low"],
        "cispo": ["eps_high", "eps_low"],
        "tis": ["cap"],
        "mis": ["cap"],
        "impala": ["c_cap", "rho_cap"],
        "mois": ["mixture_age", "mixture_slope"],
        "m2po": ["m2_budget"],
        "opsm": ["opsm_threshold"],
    }


def test_parts_are_keys_of_the_kinds_that_the_page_names():
    families = {
        "all": loss_config.LossOptions,
        "all; backends torch and fsdp2": loss_config.LossOptions,
        "clipped ratios": loss_config.RatioLossConfig,
        "GEPO and GSPO families": loss_config.SequenceLossConfig,
        "GEPO family": loss_config.GroupDenominatorConfig,
        "`gepo`": loss_config.GepoConfig,
    }
    rows = table(LOSSES, "key | for | meaning")
    for cell, kinds, _ in rows:
        for key in re.findall(r"`(\w+)(?:`| =)", cell):
            having = {kind for kind, each in CLASSES.items() if key in each.model_fields}
            if kinds == "all except `eqp` and `custom`":
                refusing = {kind for kind in having if not _accepts(kind, key, 0.04)}
                assert refusing == {"eqp", "custom"} | (CLASSES.keys() - having)
            elif key in ("length_power", "opsm_threshold"):
                assert having == set(CLASSES)
            else:
                assert having == {kind for kind, each in CLASSES.items() if issubclass(each, families[kinds])}, key
        for key, values in re.findall(r"`(\w+) = (\"\w+\"`(?:, `\"\w+\"`)+)", cell):
            choices = get_args(loss_config.SequenceLossConfig.model_fields[key].annotation)
            assert re.findall(r'"(\w+)"', values) == list(choices)
    words = {cell: meaning for cell, _, meaning in rows}
    loss = loss_config.GepoConfig()
    assert f"{loss.sampler_kl}".lstrip("0") + " for every kind" in words["`sampler_kl`"]
    assert words["`max_log_weight`"].endswith(f", {loss.max_log_weight:g} nats")
    for name in get_args(loss_config.Denominator):
        assert name in words["`denominator`"]


def _accepts(kind, key, value):
    needs = {"function": "module:function"} if kind == "custom" else {}
    try:
        ADAPTER.validate_python({"kind": kind, key: value, **needs})
    except ValidationError:
        return False
    return True


def test_every_key_of_a_kind_is_on_the_page():
    own = {"function", "directory", "options", "reads_reference"}
    keys = {key for each in CLASSES.values() for key in each.model_fields} - {"kind"} - own

    missing = sorted(key for key in keys if not re.search(rf"\b{key}\b", LOSSES))
    assert missing == [], "a key of a kind is named in its row of docs/losses.md, or in the table of parts"
    assert {key for key in own if f"`loss.{key}`" in OWN or f"\n{key} =" in OWN} == own


def test_examples_of_the_page_are_losses():
    for cell, _ in table(LOSSES, "`[loss]` | what it is"):
        ADAPTER.validate_python(tomllib.loads(f"loss = {cell.strip('`')}")["loss"])


@pytest.mark.parametrize(("head", "name"), [("field | shape", "LossBatch"), ("field of `LossOutput`", "LossOutput")])
def test_fields_of_an_own_loss_have_the_names_and_shapes_of_the_page(head, name):
    rows = {row[0].strip("`"): row[1] for row in table(OWN, head)}
    fields = [each.name for each in dataclasses.fields(getattr(custom, name))]
    (tree,) = [each for each in ast.parse(inspect.getsource(custom)).body if getattr(each, "name", "") == name]
    described = {
        first.target.id: then.value.value
        for first, then in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(first, ast.AnnAssign) and isinstance(then, ast.Expr)
    }

    assert list(rows) == fields
    for field, shape in rows.items():
        said = set(re.findall(r"\[B(?:, T)?\]", described[field])) if field != "max_log_weight" else set()
        assert said == set(re.findall(r"\[B(?:, T)?\]", shape)), field
        assert ("bool" in shape, "int64" in shape) == ("bool" in described[field], "int64" in described[field]), field
    optional = {each.name for each in dataclasses.fields(custom.LossBatch) if each.default is None}
    if name == "LossBatch":
        assert {field for field, shape in rows.items() if "None" in shape} == optional == {"reference_BT"}
    else:
        assert f"at most {custom.MAX_METRICS}," in OWN
