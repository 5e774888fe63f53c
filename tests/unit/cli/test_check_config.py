"""A wrong configuration is told in words: every key, by the path that was written, with what was meant."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
from transformers import Qwen3Config
from typer.testing import CliRunner

from heterorl.cli.check_config import counted, text_of
from heterorl.cli.main import app
from heterorl.common.errors import ConfigError
from heterorl.common.process.config_file import PATTERNS, InvalidConfig, all_keys, load
from heterorl.common.tasks.task_config import TaskConfig, build_task
from heterorl.common.text.conversation import Conversations
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.learner.learner_config import LearnerConfig
from heterorl.sampler.sampler_config import SamplerConfig
from tests.support.conversations import FAMILIES, prompter_of, save_chat_model

LEARNER = """
lr = 1e-5
engin = "hf"
coordinator = "coord.example"
[task]
nam = "jsonl:x"
digits = 0
rewards_timeout_s = 3
[backend]
compute_dtype = "bf15"
[backend.nothing]
x = 1
[tls]
model_dir = "/models/start"
"""


def problems(schema, *overrides, path=None):
    with pytest.raises(InvalidConfig) as caught:
        load(schema, path, overrides)
    return [str(problem) for problem in caught.value.problems]


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_every_wrong_key_is_named_at_every_depth(tmp_path):
    path = tmp_path / "node.toml"
    path.write_text(LEARNER)

    found = problems(LearnerConfig, path=path)

    assert sorted(found) == [
        "backend.compute_dtype: 'bf15' is none of fp32, bf16; did you mean bf16?",
        "backend.nothing: unknown key",
        "coordinator: 'coord.example' is not host:port, for example coord.example:50051",
        "engin: unknown key",
        "lr: unknown key; did you mean backend.lr?",
        "task.digits: must be at least 1, is 0",
        "task.nam: unknown key; did you mean task.name?",
        "task.rewards_timeout_s: unknown key; did you mean task.reward_timeout_s?",
        "tls.model_dir: unknown key; did you mean model_dir, above the first [table] of the file?",
    ]
    with pytest.raises(InvalidConfig) as caught:
        load(LearnerConfig, path)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{path} has 9 problems:"
    assert set(lines[1:-1]) == set(found)
    assert lines[-1] == "heterorl print-config SERVICE lists every key"


@pytest.mark.parametrize(
    ("schema", "override", "message"),
    [
        (SamplerConfig, "engine.devic=cpu", "engine.devic: unknown key; did you mean engine.device?"),
        (SamplerConfig, "engine.device=gpu", "engine.device: 'gpu' is not cpu, cuda or cuda:N"),
        (SamplerConfig, "engine.kind=vlm", "engine.kind: 'vlm' is none of hf, vllm; did you mean vllm?"),
        (SamplerConfig, "engine.hf.device=cpu", "engine.hf: unknown key"),
        (
            SamplerConfig,
            "engine={kind='vllm', canary_device='cpu'}",
            "engine.canary_device: unknown key; did you mean engine.swap_check_device?",
        ),
        (SamplerConfig, "seed=3", "seed: unknown key; did you mean delay_seed?"),
        (LearnerConfig, "seed=3", "seed: unknown key; did you mean task.seed or"),
        (SamplerConfig, "engin.device=cpu", "engin: unknown key; did you mean engine?"),
        (SamplerConfig, "delay.kind=fixd", "delay.kind: 'fixd' is none of "),
        (SamplerConfig, "site='a b'", "site: 'a b' is not a name of up to 64 letters"),
        (SamplerConfig, "group_size=many", "group_size: must be a whole number, is 'many'"),
        (SamplerConfig, "seeded_sampling=perhaps", "seeded_sampling: must be true or false, is 'perhaps'"),
        (SamplerConfig, "trusted_keys=['x']", "trusted_keys[0]: 'x' is not a public key as"),
        (SamplerConfig, "task=3", "task: must be a table, is 3"),
        (CoordinatorConfig, "max_staleness_versions='8'", "max_staleness_versions: must be a whole number, is '8'"),
        (
            CoordinatorConfig,
            "difficulty.explore=1",
            "difficulty.explore: unknown key; did you mean difficulty.outside_share?",
        ),
        (CoordinatorConfig, "store_bytes=5", "store_bytes: unknown key; did you mean payload_space_bytes?"),
        (CoordinatorConfig, "payload_space_bytes=5", "payload_space_bytes: must be at least 1048576, is 5"),
        (
            LearnerConfig,
            "loss={kind='grpo', kl_coefficient=0}",
            "loss.kl_coefficient: unknown key; did you mean loss.sampler_kl?",
        ),
        (CoordinatorConfig, "max_policy_age_s=9", "max_policy_age_s: unknown key; did you mean max_superseded_s?"),
        (CoordinatorConfig, "max_superseded_s=inf", "max_superseded_s: must be a finite number, is inf"),
        (CoordinatorConfig, "learner_lease_s=0.001", "learner_lease_s: must be at least 0.3, is 0.001"),
        (CoordinatorConfig, "work_lease_s=0.1", "work_lease_s: must be at least 1, is 0.1"),
        (LearnerConfig, "backend.lr='1e-3'", "backend.lr: must be a number, is '1e-3'"),
        (LearnerConfig, "backend.lr=-1", "backend.lr: must be above 0, is -1"),
        (LearnerConfig, "loss.kind=gepoo", "loss.kind: 'gepoo' is none of "),
        (LearnerConfig, "model_dir=3", "model_dir: must be text, is 3"),
        (LearnerConfig, "device=cpu", "device: unknown key; did you mean verification.device or backend.device?"),
        (LearnerConfig, "retry_base_s=100", "retry_cap_s is below retry_base_s"),
        (CoordinatorConfig, "listen=50051", "listen: must be text, is 50051"),
    ],
)
def test_a_problem_is_told_in_words(schema, override, message):
    (found,) = problems(schema, override)

    assert found.startswith(message)


@pytest.mark.parametrize("schema", [CoordinatorConfig, LearnerConfig, SamplerConfig])
def test_no_regular_expression_is_shown_to_people(schema):
    def patterns(model):
        for field in model.model_fields.values():
            yield from (item.pattern for item in field.metadata if getattr(item, "pattern", None))
            stack = [field.annotation]
            while stack:
                inner = stack.pop()
                stack += get_args(inner)
                yield from (item.pattern for item in getattr(inner, "metadata", ()) if getattr(item, "pattern", None))
                if isinstance(inner, type) and hasattr(inner, "model_fields"):
                    yield from patterns(inner)

    assert set(patterns(schema)) <= set(PATTERNS)
    assert {"task.reward"} <= set(all_keys(LearnerConfig))


def test_another_services_file_is_recognised(tmp_path):
    path = tmp_path / "node.toml"
    path.write_text('holder = "l"\ngroups_per_step = 8\n[backend]\nlr = 1e-6\n[tls]\ninsecure = true\n')

    for command in (["check-config", "sampler"], ["sampler"], ["print-config", "sampler"]):
        problem = str(invoke(*command, "--config", str(path)).exception)
        assert problem.startswith(f"--config: {path} has the keys of a learner, not of a sampler")
    # A typing error does not make it another's.
    path.write_text('site = "eu"\nholdr = 1\n')
    assert "holdr: unknown key" in str(invoke("check-config", "sampler", "--config", str(path)).exception)


def test_unknown_style_of_logs_is_refused():
    result = invoke("sampler", "--log", "xml")

    assert result.exit_code == 2
    assert "'xml'" in result.output


@pytest.mark.process
def test_everything_that_cannot_be_loaded_is_one_line_each(tmp_path):
    path = tmp_path / "node.toml"
    (tmp_path / "mine.py").write_text("def scor(prompt, completion, answer):\n    return 1.0\n")
    path.write_text(
        f'model_dir = "{tmp_path}/nothing"\n[task]\nname = "arithmetik"\nreward = "mine:score"\n'
        '[engine]\nkind = "vllm"\n[tracing]\notlp_endpoint = "http://127.0.0.1:4317"\n[tls]\ninsecure = true\n'
    )

    def checked(*overrides):
        pairs = [word for override in overrides for word in ("--set", override)]
        return str(invoke("check-config", "sampler", "--config", str(path), *pairs).exception)

    lines = checked().splitlines()
    assert lines[0] == f"{len(lines) - 1} problems:"
    assert f"model_dir: there is no directory {tmp_path}/nothing" in "\n".join(lines)
    assert any("'arithmetik' is none of arithmetic, " in line for line in lines)
    assert any(line.startswith("vllm is not installed") for line in lines)
    # One thing after another is corrected.
    assert "mine.py has no function score; did you mean scor?" in checked("task.name=arithmetic")
    assert "cannot read /nope.jsonl" in checked("task.name=jsonl:/nope.jsonl")
    assert invoke("check-config", "sampler", "--config", str(path), "--keys-only").exit_code == 0


@pytest.mark.process
def test_the_command_prints_them_and_ends_with_2(tmp_path):
    path = tmp_path / "node.toml"
    path.write_text("lr = 1\nengine = 3\n")

    for command in (["check-config", "sampler"], ["sampler"]):
        result = subprocess.run(
            [sys.executable, "-m", "heterorl", *command, "--config", str(path)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert result.returncode == 2
        lines = result.stderr.splitlines()
        assert lines[0] == f"error: {path} has 2 problems:"
        assert set(lines[1:3]) == {"engine: must be a table, is 3", "lr: unknown key"}
        assert "Traceback" not in result.stderr


EPISODE = """
class Talk:
    shares_process = True

    def reset(self, row, *, seed):
        self.said = ""
        return "Well?"

    def step(self, action):
        self.said = action.text
        return STEP

    def score(self):
        return SCORE
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("service", "step", "score", "problem"),
    [
        (
            "learner",
            "1 / (action.text != 'Yes')",
            "1.0",
            "task.environment: an episode of prompt 0 in which the policy",
        ),
        (
            "sampler",
            "'so?'",
            "1 / (self.said != 'Yes')",
            "task.environment: an episode of prompt 0 in which the policy",
        ),
        (
            "sampler",
            "'so?'",
            "1e9",
            "task.environment: an episode of prompt 0 in which the policy says Yes: a reward of",
        ),
        ("sampler", "'so?'", "1.0", ""),
    ],
)
def test_an_episode_is_stepped_behind_the_template(tmp_path, service, step, score, problem):
    (tmp_path / "talk.py").write_text(EPISODE.replace("STEP", step).replace("SCORE", score))
    save_chat_model(tmp_path / "chat")
    path = tmp_path / "node.toml"
    path.write_text(
        f'model_dir = "{tmp_path}/chat"\nuse_chat_template = true\n[task]\nname = "seeds"\nsize = 500\n'
        'environment = "talk:Talk"\n[sampling]\nmax_new_tokens = 8\n[tls]\ninsecure = true\n'
    )

    result = invoke("check-config", service, "--config", str(path))

    assert str(result.exception or "").startswith(problem)
    if not problem:
        assert result.exit_code == 0, result.exception
        assert "500 prompts to train on, 512 held out; the longest of 64 has " in result.output


@pytest.mark.process
def test_without_a_model_an_episode_is_stepped_all_the_same(tmp_path):
    (tmp_path / "talk.py").write_text(EPISODE.replace("STEP", "1 / (action.text != 'Yes')").replace("SCORE", "1.0"))
    path = tmp_path / "node.toml"
    path.write_text(
        'use_chat_template = true\n[task]\nname = "seeds"\nenvironment = "talk:Talk"\n[tls]\ninsecure = true\n'
    )

    lines = str(invoke("check-config", "learner", "--config", str(path)).exception).splitlines()

    assert lines[0] == "2 problems:"
    assert lines[1].startswith("model_dir: is not set")
    assert lines[2].startswith("task.environment: the policy says 'Yes': ")


@pytest.mark.process
def test_a_template_that_cannot_write_what_is_said_is_told(tmp_path):
    names = "from heterorl.common.tasks.environments.environment import Observation\nfrom heterorl.common.tasks.task import Message\n"
    said = 'Observation((Message(role="system", content="so?"),))'
    (tmp_path / "talk.py").write_text(names + EPISODE.replace("STEP", said).replace("SCORE", "1.0"))
    template, tokenizer = FAMILIES["gemma"]
    prompter = prompter_of(tmp_path / "chat", template, tokenizer())
    task = build_task(TaskConfig(name="seeds", environment="talk:Talk", environment_path=str(tmp_path)))
    try:
        with pytest.raises(ConfigError, match="system"):
            Conversations(task, prompter).try_episodes()
    finally:
        task.close()


def test_short_file_of_a_sampler_says_what_will_be_asked(tmp_path):
    path = tmp_path / "site.toml"
    path.write_text('site = "eu-1"\n[tls]\ninsecure = true\n[join]\naccept = ["jsonl:/data"]\n[sampling]\ntop_k = 0\n')
    result = CliRunner().invoke(app, ["check-config", "sampler", "--config", str(path), "--keys-only"])

    assert result.exit_code == 0, result.output
    asked = "taken from the run at the start: task, lora, chat_template_arguments, group_size, use_chat_template"
    assert asked in result.output
    assert "accepted besides built-in tasks: jsonl:/data" in result.output


def test_the_longest_prompt_is_counted(tmp_path):
    rows = [{"prompt": "a" * length, "answer": "1"} for length in (3, 1, 40, 7)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = build_task(TaskConfig(name=f"jsonl:{path}", evaluation_path=str(held_out(tmp_path))))

    prompter = SimpleNamespace(num_tokens=lambda prompts: [len(prompt.text) for prompt in prompts])
    words = counted(task, prompter, with_positions(tmp_path, 50))
    fewer = counted(task, prompter, with_positions(tmp_path, 16))

    assert words == "4 prompts to train on, 1 held out; the longest has 40 tokens with its template (prompt 2)"
    assert fewer == f"{words}; 2 of 4 are too long for 16 tokens with 10 new ones: they make no group"


def test_the_prompt_of_a_number_is_shown_with_its_source():
    sources = (
        {"label": "small", "name": "arithmetic", "digits": 1},
        {"label": "long", "name": "progression", "digits": 1},
    )
    task = build_task(TaskConfig(name="mixture", sources=sources))
    last = task.num_prompts - 1

    assert text_of(task, last) == f"prompt {last} of long: {task.prompt(last).text}"
    with pytest.raises(ConfigError, match=f"--prompt: must be from 0 to {last}; got {last + 1}"):
        text_of(task, last + 1)


def with_positions(directory, number):
    """A node's file whose model has so many positions."""
    Qwen3Config(max_position_embeddings=number).save_pretrained(directory)
    return LearnerConfig(model_dir=str(directory), sampling={"max_new_tokens": 10})


def test_the_tools_of_an_environment_are_counted_with_the_prompt(tmp_path):
    def num_tokens(prompts, *, tools=()):
        return [len(prompt) + 100 * len(tools) for prompt in prompts]

    task = SimpleNamespace(
        num_prompts=2, num_evaluation_prompts=1, environments=("played",), prompt=lambda index: "ab" * (index + 1),
        environment_of=lambda prompt: SimpleNamespace(tools=("add",)) if prompt == "ab" else None,
    )  # fmt: skip

    config = with_positions(tmp_path, 200)
    assert "the longest has 102 tokens" in counted(task, SimpleNamespace(num_tokens=num_tokens), config)


def held_out(directory):
    path = directory / "held_out.jsonl"
    path.write_text('{"prompt": "held out", "answer": "1"}\n')
    return path


@pytest.mark.parametrize(
    ("schema", "table", "problem"),
    [
        (SamplerConfig, {"engine": {"kind": "vllm", "device": "cuda"}}, "engine.device: is a key of kind hf, not of vllm; remove it"),
        (SamplerConfig, {"engine": {"memory_share": 0.5}}, "engine.memory_share: is a key of kind vllm, not of hf; remove it"),
        (LearnerConfig, {"backend": {"kind": "torch", "stage": 2}}, "backend.stage: is a key of kind deepspeed, not of torch; remove it"),
        (LearnerConfig, {"backend": {"lr": True}}, "backend.lr: must be a number, is true"),
        (LearnerConfig, {"lora": {"rank": True}}, "lora.rank: must be a whole number, is true"),
        (CoordinatorConfig, {"min_free_bytes": False}, "min_free_bytes: must be a whole number, is false"),
    ],
)  # fmt: skip
def test_keys_of_another_kind_and_booleans_as_numbers_are_named(schema, table, problem, tmp_path):
    path = tmp_path / "c.toml"
    lines = [f"{key} = {json.dumps(value)}" for key, value in table.items() if not isinstance(value, dict)]
    for name, section in table.items():
        if isinstance(section, dict):
            lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in section.items())]
    path.write_text("\n".join(lines))

    with pytest.raises(InvalidConfig) as caught:
        load(schema, path)

    assert str(caught.value).startswith(problem)


def test_a_file_of_another_editor_or_from_a_pipe_is_read(tmp_path):
    marked = tmp_path / "marked.toml"
    marked.write_text("metrics_port = 7\n", encoding="utf-8-sig")
    assert load(LearnerConfig, marked).metrics_port == 7
    reading, writing = os.pipe()
    os.write(writing, b"metrics_port = 8\n")
    os.close(writing)
    piped = Path(f"/dev/fd/{reading}")

    assert [load(LearnerConfig, piped).metrics_port for _ in range(2)] == [8, 8]
    os.close(reading)


def test_a_file_of_another_encoding_is_named(tmp_path):
    path = tmp_path / "learner.toml"
    path.write_bytes("# f\u00fcr\n".encode("latin-1"))

    with pytest.raises(ConfigError, match=r"learner\.toml is not UTF-8: .* \(save it as UTF-8\)"):
        load(LearnerConfig, path)


def test_draws_of_a_site_that_no_run_takes_are_said(tmp_path):
    path = tmp_path / "sampler.toml"
    path.write_text(
        '[tls]\ninsecure = true\n[[evaluation]]\nname = "sums"\nnum_prompts = 9\n[[evaluation]]\nname = "bare"\n'
    )

    said = invoke("check-config", "sampler", "--config", str(path), "--keys-only").output

    assert "evaluation.sums.num_prompts: a run draws as the coordinator's [[evaluation]] says" in said


@pytest.mark.process
def test_a_set_that_cannot_be_read_is_named_before_the_start(tmp_path):
    model = save_chat_model(tmp_path / "model")
    path = tmp_path / "sampler.toml"
    path.write_text(
        f'model_dir = "{model}"\n[tls]\ninsecure = true\n[sampling]\nmax_new_tokens = 8\n[[evaluation]]\nname = "sums"\n'
        f'task = {{name = "jsonl:{tmp_path}/missing.jsonl"}}\n'
    )

    with pytest.raises(ConfigError, match=r"evaluation\.sums\.task\.name: .*missing\.jsonl"):
        CliRunner().invoke(app, ["check-config", "sampler", "--config", str(path)], catch_exceptions=False)


def test_a_machine_without_torch_is_told_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)

    result = invoke("check-config", "sampler", "--set", "tls.insecure=true")

    assert str(result.exception) == "torch is not installed (in a clone of heterorl: pip install '.[sampler]')"
