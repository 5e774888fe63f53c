import asyncio
import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from heterorl.common.errors import ConfigError, EnvironmentFailed, PromptRefused, RewardError
from heterorl.common.generation.inference_engine import Finished, generate_all
from heterorl.common.model import tensors
from heterorl.common.tasks.arithmetic import ArithmeticTask
from heterorl.common.tasks.task import AnswerProblem, Prompt
from heterorl.common.text.prompter import Prompter
from heterorl.common.types.rollout import FinishReason, RewardPart
from heterorl.common.weights.arena import Arena
from heterorl.learner.evaluate import Evaluator
from heterorl.learner.learner_config import LearnerConfig
from heterorl.learner.learner_parts import assemble
from tests.support.learner_world import LAYOUT, NumpyBackend, fill, learn, learner_config, open_coordinator, rows
from tests.support.training import tiny_model


class Bytes:
    """Tokens are bytes."""

    def encode_prompt(self, prompt):
        return self.encode(prompt.text)

    def encode(self, text):
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, token_ids):
        return bytes(token_ids.tolist()).decode()

    def completion(self, token_ids, prompt=None):
        return self.decode(token_ids)


class Answering:
    """Engine that answers the first `num_right` prompts rightly; notes the states that it was given."""

    def __init__(self, task, num_right):
        self.right = {task.evaluation_prompt(index).text: task.evaluation_prompt(index).answer for index in range(50)}
        self.num_right, self.roots, self.seeds = num_right, [], []
        self.under_way = []

    def load(self, arena, version):
        self.roots.append((version, arena.state_root()))

    def submit(self, request):
        self.under_way.append(request)

    def collect(self):
        requests, self.under_way = self.under_way, []
        self.seeds.append([request.seed for request in requests])
        return [
            Finished(
                key=request.key,
                member=member,
                completion=SimpleNamespace(
                    token_ids=(ids := self._answer(request)),
                    logprobs=np.zeros(ids.size, np.float32),
                    finish_reason=FinishReason.EOS,
                ),
            )
            for request in requests
            for member in range(request.num_completions)
        ]

    def cancel(self):
        self.under_way = []

    def _answer(self, request):
        is_right = request.key < self.num_right
        return Bytes().encode(self.right[Bytes().decode(request.prompt)] if is_right else "?")


def test_accuracy_is_the_share_of_right_completions():
    task = ArithmeticTask(digits=2)
    evaluator = Evaluator(
        task=task, engine=Answering(task, 3), prompter=Bytes(), num_prompts=4, num_per_prompt=2, seed=5
    )

    evaluation = evaluator.evaluate(Arena(LAYOUT), 7)

    # 3 of 4 prompts, each twice.
    assert (evaluation.version, evaluation.accuracy, evaluation.num_completions) == (7, 0.75, 8)


class Shouting:
    """Implements Conversations: prompts show a tool, and an episode scores the turn that it was stepped with."""

    def __init__(self):
        self.turns, self.spec = [], SimpleNamespace(open=self._open)

    def encode(self, prompt):
        return Bytes().encode(f"tools! {prompt.text}")

    def of(self, prompt):
        return self if prompt.index else None

    def answer(self, episode, turn):
        self.turns.append(Bytes().decode(turn))

    @contextlib.contextmanager
    def _open(self):
        yield SimpleNamespace(score=self._score)

    def _score(self):
        if len(self.turns) == 3:
            raise EnvironmentFailed("three is too much")
        return (RewardPart(name="played", value=0.5),)


def test_prompts_with_an_environment_are_written_and_played_as_in_rollouts():
    task = ArithmeticTask(digits=2)
    conversations = Shouting()
    engine = Answering(task, 0)
    asked = []
    engine.submit = lambda request: (asked.append(Bytes().decode(request.prompt)), engine.under_way.append(request))

    evaluation = Evaluator(
        task=task, engine=engine, prompter=Bytes(), num_prompts=4, num_per_prompt=1, seed=0, conversations=conversations
    ).evaluate(Arena(LAYOUT), 0)

    assert asked == [f"tools! {task.evaluation_prompt(index).text}" for index in range(4)]
    assert conversations.turns == ["?"] * 3
    # A wrong answer without an environment, two episodes of .5, and one that failed.
    assert (evaluation.accuracy, evaluation.num_errors) == (pytest.approx(1 / 3), 1)


def test_versions_are_evaluated_with_the_same_seeds():
    task = ArithmeticTask(digits=2)
    engine = Answering(task, 3)
    evaluator = Evaluator(task=task, engine=engine, prompter=Bytes(), num_prompts=3, num_per_prompt=1, seed=5)

    evaluator.evaluate(Arena(LAYOUT), 1)
    evaluator.evaluate(Arena(LAYOUT), 2)

    assert engine.seeds == [[5, 6, 7], [5, 6, 7]]


def test_failed_verifier_is_counted_and_is_no_wrong_answer():
    class Failing(ArithmeticTask):
        def score(self, prompt, completion):
            if completion == "?":
                raise RewardError("it crashed")
            return (RewardPart(name="correct", value=1.0),)

    task = Failing(digits=2)

    evaluation = Evaluator(
        task=task, engine=Answering(task, 3), prompter=Bytes(), num_prompts=4, num_per_prompt=1, seed=0
    ).evaluate(Arena(LAYOUT), 0)  # fmt: skip

    assert (evaluation.accuracy, evaluation.num_errors) == (1.0, 1)


def test_held_out_prompt_that_the_template_refuses_is_left_out(caplog):
    task = ArithmeticTask(digits=2)

    class Refusing(Bytes):
        def encode_prompt(self, prompt):
            if prompt.index == 1:
                raise PromptRefused("use_chat_template", "the model's template refuses messages of user, user")
            return super().encode_prompt(prompt)

    engine = Answering(task, 3)
    evaluator = Evaluator(task=task, engine=engine, prompter=Refusing(), num_prompts=4, num_per_prompt=1, seed=0)
    for version in range(2):
        evaluation = evaluator.evaluate(Arena(LAYOUT), version)

    assert (evaluation.num_prompts, evaluation.num_completions, evaluation.num_errors) == (3, 3, 0)
    assert [sample.prompt_index for sample in evaluation.samples] == [0, 2, 3]
    # Its absence moves no other seed: an environment may refuse it in one version alone.
    assert engine.seeds == [[0, 2, 3], [0, 2, 3]]
    assert caplog.text.count("held-out prompt 1 is left out") == 1


def test_held_out_prompt_whose_answer_cannot_be_read_is_not_drawn(caplog):
    class Unread(ArithmeticTask):
        def answer_problem(self, prompt):
            if prompt.index == 2:
                raise RewardError("nothing is known")
            problem = AnswerProblem(key="task.match", text="cannot be read", action="correct it")
            return problem if prompt.index == 1 else None

    task = Unread(digits=2)
    evaluator = Evaluator(
        task=task, engine=Answering(task, 3), prompter=Bytes(), num_prompts=4, num_per_prompt=1, seed=0
    )
    for version in range(2):
        evaluation = evaluator.evaluate(Arena(LAYOUT), version)

    assert (evaluation.num_prompts, evaluation.num_completions, evaluation.num_errors) == (3, 3, 0)
    assert [sample.prompt_index for sample in evaluation.samples] == [0, 2, 3]
    assert caplog.text.count("held-out prompt 1 is left out") == 1


def test_what_was_generated_is_there_to_be_read():
    class Failing(ArithmeticTask):
        def score(self, prompt, completion):
            if completion == "?":
                raise RewardError("it crashed")
            return (RewardPart(name="correct", value=1.0),)

    task = Failing(digits=2)
    evaluator = Evaluator(
        task=task, engine=Answering(task, 1), prompter=Bytes(), num_prompts=2, num_per_prompt=2, seed=0
    )
    evaluation = evaluator.evaluate(Arena(LAYOUT), 3)

    first, second = evaluation.samples
    assert (first.version, first.prompt_index, first.prompt) == (3, 0, task.evaluation_prompt(0).text)
    assert [rollout.completion for rollout in first.rollouts] == [task.evaluation_prompt(0).answer] * 2
    assert first.rollouts[0].reward_parts == (RewardPart(name="correct", value=1.0),)
    assert [rollout.completion for rollout in second.rollouts] == ["?", "?"]
    assert all(np.isnan(rollout.reward) for rollout in second.rollouts)


def test_accuracy_is_absent_when_nothing_could_be_scored():
    class Failing(ArithmeticTask):
        def score(self, prompt, completion):
            raise RewardError("it crashed")

    task = Failing(digits=2)
    evaluator = Evaluator(
        task=task, engine=Answering(task, 3), prompter=Bytes(), num_prompts=4, num_per_prompt=1, seed=0
    )

    assert evaluator.evaluate(Arena(LAYOUT), 0).accuracy is None


async def test_learner_evaluates_the_published_weights_at_its_cadence(tmp_path):
    core = await open_coordinator(tmp_path)
    task = ArithmeticTask(digits=2)
    engine = Answering(task, 1)
    evaluator = Evaluator(task=task, engine=engine, prompter=Bytes(), num_prompts=2, num_per_prompt=1, seed=0)
    config = learner_config(tmp_path, evaluation={"every_versions": 2})

    await asyncio.gather(learn(config, core, evaluator=evaluator), fill(core, 6))

    versions = {row["version"]: row["state_root"] for row in rows(config.state_dir / "versions.jsonl")}
    assert engine.roots == [(0, versions[0]), (2, versions[2])]
    reports = await core.list_steps(after_step=0, limit=10)
    assert [report.evaluation_accuracy for report in reports] == [None, 0.5, None]
    assert [row["accuracy"] for row in rows(config.state_dir / "evaluations.jsonl")] == [0.5, 0.5]
    await core.close()


async def test_resumed_learner_does_not_evaluate_the_baseline_again(tmp_path):
    core = await open_coordinator(tmp_path)
    task = ArithmeticTask(digits=2)
    config = learner_config(tmp_path, evaluation={"every_versions": 100})
    evaluators = [
        Evaluator(task=task, engine=Answering(task, 1), prompter=Bytes(), num_prompts=1, num_per_prompt=1, seed=0)
        for _ in range(2)
    ]
    await asyncio.gather(learn(config, core, evaluator=evaluators[0]), fill(core, 6))

    await learn(config, core, NumpyBackend(), evaluator=evaluators[1])

    assert [row["version"] for row in rows(config.state_dir / "evaluations.jsonl")] == [0]
    await core.close()


def _write_model(directory, *, with_template=False):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tiny_model().save_pretrained(directory)
    vocabulary = {"<eos>": 0, **{token: number for number, token in enumerate("0123456789+=", start=1)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    if with_template:
        fast.chat_template = "{{ messages[0]['content'] }}="
    fast.save_pretrained(directory)
    return directory


def _config(directory, **changes):
    values = {
        "model_dir": str(directory),
        "state_dir": directory / "state",
        "task": {"digits": 2},
        "sampling": {"max_new_tokens": 4},
        "group_size": 2,
        "evaluation": {"every_versions": 1, "num_prompts": 4, "samples_per_prompt": 2},
    }
    return LearnerConfig(**{**values, **changes})


@pytest.mark.process
def test_learner_is_assembled_from_its_configuration(tmp_path):
    parts = assemble(_config(_write_model(tmp_path / "model")))

    assert parts.contract.layout_id == parts.backend.layout.layout_id
    assert (parts.contract.vocab_size, parts.contract.group_size) == (50, 2)
    assert parts.contract.num_prompts == ArithmeticTask(digits=2).num_prompts
    arena = Arena(parts.backend.layout)
    parts.backend.store(arena)
    evaluation = parts.evaluator.evaluate(arena, 0)
    assert evaluation.num_completions == 8
    assert 0 <= evaluation.accuracy <= 1


@pytest.mark.process
def test_greedy_evaluation_takes_the_most_likely_token(tmp_path):
    directory = _write_model(tmp_path / "model")
    parts = assemble(_config(directory, evaluation={"every_versions": 1, "num_prompts": 1, "samples_per_prompt": 3}))
    arena = Arena(parts.backend.layout)
    parts.backend.store(arena)
    engine, prompter = parts.evaluator._engine, parts.evaluator._prompter
    engine.load(arena, 0)

    [completions] = generate_all(engine, [prompter.encode("12+34=")], seeds=[3], num_per_prompt=3)
    texts = [prompter.decode(completion.token_ids) for completion in completions]

    # Reference: argmax of the model's own logits, one token at a time.
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tensors.load(arena, model)
    ids = [2, 3, 11, 4, 5, 12]
    for _ in range(4):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == 0:
            break
    tokens = dict(enumerate("0123456789+=", start=1))
    expected = "".join(tokens.get(number, "") for number in ids[6:])
    assert texts == [expected] * 3


def test_prompts_go_through_the_chat_template(tmp_path):
    class Recording:
        def load(self, arena, version):
            pass

        def submit(self, request):
            self.request = request

        def collect(self):
            completion = SimpleNamespace(
                token_ids=np.zeros(1, np.int32), logprobs=np.zeros(1, np.float32), finish_reason=FinishReason.EOS
            )
            return [Finished(key=self.request.key, member=0, completion=completion)]

    class OnePrompt(ArithmeticTask):
        def evaluation_prompt(self, index):
            return Prompt(index=index, text="1+1", answer="2")

    prompter = Prompter(str(_write_model(tmp_path / "model", with_template=True)), use_chat_template=True)
    engine = Recording()

    task = OnePrompt(digits=1)
    Evaluator(task=task, engine=engine, prompter=prompter, num_prompts=1, num_per_prompt=1, seed=0).evaluate(
        Arena(LAYOUT), 0
    )

    # "1+1" through the template "...=": ids of 1 + 1 =
    assert np.array_equal(engine.request.prompt, [2, 11, 2, 12])


@pytest.mark.parametrize("model_dir", ["", "nowhere/at/all"])
def test_learner_refuses_a_model_that_is_not_there(tmp_path, model_dir):
    with pytest.raises(ConfigError, match="model_dir"):
        assemble(LearnerConfig(model_dir=model_dir and str(tmp_path / model_dir)))


def test_wrong_key_is_said_before_the_model_is_loaded(tmp_path):
    with pytest.raises(ConfigError, match=r"signing_key.*heterorl keys new"):
        assemble(LearnerConfig(model_dir=str(tmp_path / "none"), signing_key=tmp_path / "none.key"))
