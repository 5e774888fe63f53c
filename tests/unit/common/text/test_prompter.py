"""Prompts as messages: what the template is given, what is refused, and what the contract says of it."""

import json

import pytest

from heterorl.common.errors import ConfigError, PromptRefused
from heterorl.common.generation.tiny_model import write_tiny_model
from heterorl.common.tasks.answer_extraction import answer_of
from heterorl.common.tasks.task import Message, Prompt
from heterorl.common.tasks.task_config import TaskConfig, build_task
from heterorl.common.text.prompter import Prompter, chat_template_digest
from tests.support.conversations import prompter_of, words_of
from tests.support.templates import QWEN, SWITCHED, THINKING
from tests.support.tokenizers import words

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{% if m.role == 'developer' %}{{ m.content + 1 }}{% endif %}"
    "{{ loop.index }}+{{ m.content }}={% endfor %}{% if enable_thinking %}7{% endif %}"
)
CONVERSATION = Prompt(
    index=0, text="3", answer="", messages=(Message(role="system", content="12"), Message(role="user", content="3"))
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = write_tiny_model(tmp_path_factory.mktemp("model"), seed=0, hidden_size=32)
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def written(prompter, prompt):
    return prompter.decode(prompter.encode_prompt(prompt)).replace(" ", "")


def test_all_messages_and_the_arguments_go_through_the_template(model_dir):
    plain = Prompter(str(model_dir), use_chat_template=True)
    thinking = Prompter(str(model_dir), use_chat_template=True, template_arguments={"enable_thinking": True})

    assert written(plain, CONVERSATION) == "1+12=2+3="
    assert written(thinking, CONVERSATION) == "1+12=2+3=7"
    # a text is one message of the user's
    assert written(plain, Prompt(index=0, text="3", answer="")) == "1+3="
    assert plain.encode("3").tolist() == plain.encode_prompt(Prompt(index=0, text="3", answer="")).tolist()


def test_lengths_are_those_of_what_is_encoded(model_dir):
    for uses_template in (True, False):
        prompter = Prompter(str(model_dir), use_chat_template=uses_template)
        prompts = [Prompt(index=0, text=text, answer="") for text in ("3", "12+34=")]

        assert prompter.num_tokens(prompts) == [prompter.encode_prompt(prompt).size for prompt in prompts]
    assert prompter.num_tokens([]) == []


def test_system_prompt_of_a_task_stands_before_its_prompts(model_dir):
    prompter = Prompter(str(model_dir), use_chat_template=True)
    plain, asked = (build_task(TaskConfig(digits=1, system_prompt=text)) for text in ("", "12"))

    assert written(prompter, asked.prompt(0)) == f"1+12=2+{plain.prompt(0).text}="
    assert asked.digest != plain.digest
    assert asked.score(asked.prompt(0), asked.prompt(0).answer)[0].value == 1.0


def test_what_the_template_cannot_write_names_the_key(model_dir):
    with pytest.raises(ConfigError, match="use_chat_template: prompts are messages"):
        Prompter(str(model_dir), use_chat_template=False).encode_prompt(CONVERSATION)
    # By its own word, and where it computes with what a message is not.
    for role in ("tool", "developer"):
        first = Message(role=role, content="1")
        asked = Prompt(index=0, text="3", answer="", messages=(first, *CONVERSATION.messages))
        with pytest.raises(
            PromptRefused, match=f"use_chat_template: the model's template refuses messages of {role}, system, user"
        ):
            Prompter(str(model_dir), use_chat_template=True).encode_prompt(asked)


def test_prompts_that_have_no_tokens_are_refused(model_dir):
    prompter = Prompter(str(model_dir), use_chat_template=False)
    halved, empty = (Prompt(index=0, text=text, answer="") for text in ("3\ud800", ""))

    with pytest.raises(PromptRefused, match="half a surrogate pair"):
        prompter.encode_prompt(halved)
    with pytest.raises(PromptRefused, match="no tokens"):
        prompter.encode_prompt(empty)
    assert prompter.num_tokens([halved, empty, Prompt(index=0, text="3", answer="")]) == [None, None, 1]


def test_arguments_that_nothing_takes_are_refused(model_dir):
    with pytest.raises(ConfigError, match="chat_template_arguments: prompts go through no template"):
        Prompter(str(model_dir), use_chat_template=False, template_arguments={"enable_thinking": True})
    with pytest.raises(ConfigError, match="chat_template_arguments: add_generation_prompt: heterorl sets it itself"):
        Prompter(str(model_dir), use_chat_template=True, template_arguments={"add_generation_prompt": False})
    # Also what the template is given by another name than the call has, and a template in place of the model's.
    for taken in ("messages", "chat_template"):
        with pytest.raises(ConfigError, match=f"chat_template_arguments: {taken}: heterorl sets it itself"):
            Prompter(str(model_dir), use_chat_template=True, template_arguments={taken: "{{ 1 }}"})


def test_contract_counts_the_arguments_of_the_template(model_dir):
    tokenizer = Prompter(str(model_dir), use_chat_template=True).tokenizer

    def digest(uses, **arguments):
        return chat_template_digest(tokenizer, use_chat_template=uses, template_arguments=arguments)

    assert digest(True) == chat_template_digest(tokenizer, use_chat_template=True)
    assert (
        len({digest(False), digest(True), digest(True, enable_thinking=True), digest(True, enable_thinking=False)}) == 4
    )


@pytest.mark.parametrize(("template", "is_open"), [(THINKING, True), (QWEN, False)], ids=["opened", "by-the-policy"])
def test_thoughts_that_the_prompt_opened_are_no_answer_when_they_are_cut(tmp_path, template, is_open):
    prompter = prompter_of(tmp_path, template, words_of(eos="<|im_end|>"))
    prompt = Prompt(index=0, text="1+1=", answer="2")

    def answer(text, of=prompt):
        return answer_of(prompter.completion(prompter.tokens(text), of))

    assert answer("perhaps \\boxed{2}") == ("" if is_open else "perhaps \\boxed{2}")
    assert answer("perhaps 3</think>2") == answer("perhaps 3</think>2", None) == "2"
    assert (answer("perhaps", None) == "") is is_open


def test_a_switch_in_the_prompt_closes_its_thoughts(tmp_path):
    prompter = prompter_of(tmp_path, SWITCHED, words_of(eos="<|im_end|>"))
    asked = Message(role="user", content="1+1=")
    plain, switched = (
        Prompt(index=0, text="1+1=", answer="2", messages=(Message(role="system", content=told), asked))
        for told in ("brief", "/no_think")
    )

    assert answer_of(prompter.completion(prompter.tokens("2"), switched)) == "2"
    assert answer_of(prompter.completion(prompter.tokens("2"), plain)) == ""


def test_thoughts_in_special_tokens_are_thoughts(tmp_path):
    opened, plain = (
        prompter_of(tmp_path / name, template, words_of(eos="<|im_end|>", are_tags_special=True))
        for name, template in (("opened", THINKING), ("plain", QWEN))
    )

    assert opened.completion(opened.tokens("perhaps 3</think>2<|im_end|>")) == "perhaps 3</think>2"
    assert opened.completion(opened.tokens("perhaps 3")) == "<think>perhaps 3"
    assert plain.completion(plain.tokens("<think>perhaps 3</think>2<|im_end|>")) == "<think>perhaps 3</think>2"


CHANNELS = ("<|start|>", "<|channel|>", "<|message|>", "<|return|>")
ANALYSIS = "<|channel|>analysis<|message|>not 3"
FINAL = "<|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize("is_special", [True, False], ids=["special", "added"])
@pytest.mark.parametrize(
    ("marks", "said", "text"),
    [
        (("[THINK]", "[/THINK]"), "[THINK]not 3[/THINK]2", "<think>not 3</think>2"),
        (("<|channel>", "<channel|>"), "<|channel>thought\n3<channel|>2", "<think>thought\n3</think>2"),
        (CHANNELS, f"{ANALYSIS}<|end|>{FINAL}2<|return|>", "<think>not 3</think>2"),
        (CHANNELS, ANALYSIS, "<think>not 3"),
        (CHANNELS, "<|channel|>analysis", "<think>analysis"),
        (CHANNELS, f"{ANALYSIS}<|end|>{FINAL}2<|end|>{FINAL}4<|return|>", "<think>not 3</think>2\n4"),
        (CHANNELS, "<|message|>2<|return|>", "2"),
        (CHANNELS, "2<|return|>", "2"),
        # The prompt opened a message, or began a header.
        (CHANNELS, f"2<|end|>{FINAL}4<|return|>", "2\n4"),
        (CHANNELS, f"2<|end|><|start|>assistant{ANALYSIS}", "2<think>not 3"),
        (CHANNELS, "2<|channel|>analysis", "2<think>analysis"),
        (CHANNELS, "2<|message|>4", "2\n4"),
        (CHANNELS, "assistant<|channel|>final<|message|>2<|return|>", "2"),
    ],
)
def test_thoughts_of_other_families_are_thoughts(tmp_path, marks, said, text, is_special):
    tokenizer = words(eos="<|end|>")
    tokenizer.add_tokens(list(marks), special_tokens=is_special)
    prompter = prompter_of(tmp_path, TEMPLATE, tokenizer)

    assert prompter.completion(prompter.tokens(said)) == text


@pytest.mark.parametrize(
    ("marks", "opening", "said"),
    [
        (("[THINK]", "[/THINK]"), "[THINK]", "not 3[/THINK]2"),
        (("<|channel>", "<channel|>"), "<|channel>thought\n", "not 3<channel|>2"),
        (CHANNELS, "<|start|>assistant<|channel|>analysis<|message|>", f"not 3<|end|>{FINAL}2"),
    ],
)
def test_a_prompt_may_open_thoughts_of_other_families(tmp_path, marks, opening, said):
    tokenizer = words(eos="<|end|>")
    tokenizer.add_tokens(list(marks), special_tokens=True)
    prompter = prompter_of(tmp_path, TEMPLATE + opening.replace("\n", "{{ '\\n' }}"), tokenizer)

    assert answer_of(prompter.completion(prompter.tokens(said))) == "2"
    assert prompter.completion(prompter.tokens("not 3")) == "<think>not 3"


def test_a_prompt_without_template_may_open_thoughts_too(model_dir):
    prompter = Prompter(str(model_dir), use_chat_template=False)
    opened, closed = (Prompt(index=0, text=text, answer="") for text in ("1 <think>\n", "1"))

    assert prompter.completion(prompter.tokens("7"), opened).startswith("<think>")
    assert prompter.completion(prompter.tokens("7"), closed) == prompter.decode(prompter.tokens("7"))
