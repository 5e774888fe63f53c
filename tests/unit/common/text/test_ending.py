"""Which tokens end a completion: what a model's files say, in the order in which they are asked."""

import json
from types import SimpleNamespace

import pytest

from heterorl.common.errors import ConfigError
from heterorl.common.generation.tiny_model import write_tiny_model
from heterorl.common.model.contract import build_contract
from heterorl.common.tasks.arithmetic import ArithmeticTask
from heterorl.common.text.prompter import Prompter, end_token_ids
from heterorl.common.types.common import MAX_END_TOKENS, Digest
from heterorl.learner.learner_config import LearnerConfig

QWEN = [151645, 151643]


def read(directory, *, own=1, **files):
    """Of a directory with these files; `own` is the tokenizer's."""
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / f"{name}.json").write_text(text, encoding="utf-8")
    return end_token_ids(str(directory), SimpleNamespace(eos_token_id=own))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config": {"eos_token_id": QWEN}, "config": {"eos_token_id": 151645}}, (151643, 151645)),
        ({"generation_config": {"eos_token_id": 151643}, "config": {"eos_token_id": 5}}, (151643, 151645)),
        ({"generation_config": {"temperature": 0.7}, "config": {"eos_token_id": [151643, 151645]}}, (151643, 151645)),
        ({"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": 7}}, (7, 151645)),
        ({"config": {"eos_token_id": 151643}}, (151643, 151645)),
        ({"config": {"model_type": "outer", "text_config": {"eos_token_id": 106}}}, (106, 151645)),
        ({"config": {"eos_token_id": None, "text_config": {"eos_token_id": 106}}}, (106, 151645)),
        ({"config": {"model_type": "qwen2"}}, (151645,)),
        ({}, (151645,)),
    ],
)
def test_generation_config_is_asked_first_and_the_tokenizers_own_always_ends(tmp_path, files, expected):
    assert read(tmp_path, own=151645, **files) == expected


@pytest.mark.parametrize("named", ["<eos>", -1, [1, "2"], [1.5], True, list(range(MAX_END_TOKENS + 1))])
def test_what_is_no_list_of_ids_is_named(tmp_path, named):
    with pytest.raises(ConfigError, match="model_dir: eos_token_id in the files of .* is not a list of token ids"):
        read(tmp_path, generation_config={"eos_token_id": named})


def test_ends_that_the_run_states_take_the_place_of_a_file_that_names_none(tmp_path):
    model_dir = write_tiny_model(tmp_path / "model", seed=0, hidden_size=32)
    (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": "<eos>"}))
    with pytest.raises(ConfigError, match=r"set sampling.end_token_ids"):
        Prompter(str(model_dir), use_chat_template=False)

    assert Prompter(str(model_dir), use_chat_template=False, end_token_ids=(7,)).end_token_ids == (7,)


@pytest.mark.parametrize("content", ["{", "[" * 100_000])
def test_a_file_that_cannot_be_read_is_named(tmp_path, content):
    with pytest.raises(ConfigError, match=r"generation_config.json of .* is not JSON"):
        read(tmp_path, generation_config=content)


def contract(prompter, **changes):
    values = {"vocab_size": 19, "end_token_ids": prompter.end_token_ids, **changes}
    return build_contract(
        LearnerConfig(group_size=2), text=prompter.digests, task=ArithmeticTask(digits=2),
        layout_id=Digest("0" * 64), **values,
    )  # fmt: skip


def test_contract_states_them_in_order_and_refuses_what_the_model_has_not(tmp_path):
    model_dir = write_tiny_model(tmp_path / "model", seed=0, hidden_size=32)
    prompter = Prompter(str(model_dir), use_chat_template=False)

    assert prompter.end_token_ids == contract(prompter).end_token_ids == (1,)
    assert contract(prompter, end_token_ids=(7, 1, 7)).end_token_ids == (1, 7)
    with pytest.raises(ConfigError, match="sampling.end_token_ids: 19 is not a token of the model, which has 19"):
        contract(prompter, end_token_ids=(19,))
