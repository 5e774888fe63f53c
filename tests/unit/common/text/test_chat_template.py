"""Chat templates: the text of transformers' renderer where no clock is asked, and the run's date where one is."""

import json
import time

import pytest
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from heterorl.common.errors import ConfigError
from heterorl.common.generation.tiny_model import write_tiny_model
from heterorl.common.tasks.task import Message, Prompt
from heterorl.common.text.chat_template import DATE, ChatTemplate
from heterorl.common.text.prompter import Prompter, chat_template_digest
from tests.support.templates import DATED, MARKED, NO_SYSTEM, QWEN, THINKING
from tests.support.tokenizers import sentencepiece, words

ASKED = [{"role": "user", "content": " 1 < 2 & 'é' "}]
TALK = [
    {"role": "system", "content": "12"}, *ASKED, {"role": "assistant", "content": "<think>3</think>\n4"},
    {"role": "user", "content": "5"},
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return words(eos="<|end|>", bos_token="<s>")


@pytest.mark.parametrize(
    "template", [QWEN, THINKING, DATED.replace("strftime_now is defined", "false"), MARKED], ids=len
)
@pytest.mark.parametrize("messages", [ASKED, TALK], ids=["one", "several"])
@pytest.mark.parametrize("arguments", [{}, {"enable_thinking": False, "date_string": "1 May"}], ids=["plain", "given"])
@pytest.mark.parametrize("begins_answer", [True, False])
def test_the_text_is_that_of_transformers(tokenizer, template, messages, arguments, begins_answer):
    tokenizer.chat_template = template

    written = ChatTemplate(tokenizer, arguments=arguments).write(messages, begins_answer=begins_answer)

    assert written == PreTrainedTokenizerFast.apply_chat_template(
        tokenizer, messages, tokenize=False, add_generation_prompt=begins_answer, **arguments
    )


def test_a_template_refuses_messages_by_its_own_words(tokenizer):
    tokenizer.chat_template = NO_SYSTEM
    template = ChatTemplate(tokenizer, arguments={})

    assert template.write(ASKED, begins_answer=True).endswith("<|im_start|>model\n")
    with pytest.raises(TemplateError, match="System role not supported"):
        template.write(TALK, begins_answer=True)


@pytest.mark.parametrize("known", ["system", "developer"])
def test_a_developers_message_is_the_systems_where_the_template_knows_no_developer(tokenizer, known):
    tokenizer.chat_template = (
        f"{{% for each in messages %}}{{% if each.role in ('{known}', 'user') %}}"
        "{{ each.role + ':' + each.content }}{% endif %}{% endfor %}"
    )
    messages = [{"role": "developer", "content": "12"}, {"role": "user", "content": "34"}]

    assert ChatTemplate(tokenizer, arguments={}).write(messages, begins_answer=True) == f"{known}:12user:34"


@pytest.fixture
def zone(monkeypatch):
    """Set the machine's time zone; the one it had comes back."""

    def put(name):
        monkeypatch.setenv("TZ", name)
        time.tzset()

    yield put
    monkeypatch.undo()
    time.tzset()


def test_the_date_is_the_runs_in_every_time_zone(tokenizer, zone):
    tokenizer.chat_template = DATED
    found = {}
    for name in ("Pacific/Kiritimati", "Etc/GMT+12"):
        zone(name)
        for told in ("", "2026-11-25", "2026-11-25T23:59:01"):
            arguments = {"strftime_now": told} if told else {}
            template = ChatTemplate(tokenizer, arguments=arguments)
            text = template.write(ASKED, begins_answer=True).partition("Today: ")[2].partition("<")[0]
            digest = chat_template_digest(tokenizer, use_chat_template=True, template_arguments=arguments)
            found.setdefault(told, set()).add((text, digest))

    assert {told: {text for text, _ in each} for told, each in found.items()} == {
        "": {"01 Jan 2025 00:00"}, "2026-11-25": {"25 Nov 2026 00:00"}, "2026-11-25T23:59:01": {"25 Nov 2026 23:59"},
    }  # fmt: skip
    assert len({digest for each in found.values() for _, digest in each}) == 3


def test_the_digest_has_the_date_only_where_the_template_may_write_it(tokenizer):
    def digest(template, **arguments):
        tokenizer.chat_template = template
        return chat_template_digest(tokenizer, use_chat_template=True, template_arguments=arguments)

    assert digest(DATED) == digest(DATED, strftime_now=DATE) != digest(DATED, strftime_now="2026-11-25")
    assert digest(QWEN) != digest(QWEN, strftime_now=DATE)


@pytest.mark.parametrize("told", ["yesterday", 20261125, "25.11.2026", None])
def test_what_is_no_date_names_the_key(tokenizer, told):
    tokenizer.chat_template = DATED

    with pytest.raises(ConfigError, match=r"chat_template_arguments\.strftime_now: .* is not a date of ISO 8601"):
        ChatTemplate(tokenizer, arguments={"strftime_now": told})


@pytest.mark.parametrize("template", ["{% for m in messages %}", "{{ [1, 2] | random }}", "{{ messages | unknown }}"])
def test_a_template_that_cannot_be_used_names_the_model(tokenizer, template):
    tokenizer.chat_template = template

    with pytest.raises(ConfigError, match="model_dir: the chat template cannot be used"):
        ChatTemplate(tokenizer, arguments={})


def test_a_template_cannot_draw_text_at_random(tokenizer):
    tokenizer.chat_template = "{{ lipsum() }}"

    with pytest.raises(TemplateError):
        ChatTemplate(tokenizer, arguments={}).write(ASKED, begins_answer=True)


def test_of_several_templates_the_default_is_taken(tokenizer):
    tokenizer.chat_template = {"tool_use": "tools", "default": QWEN}
    several = ChatTemplate(tokenizer, arguments={}).write(ASKED, begins_answer=True)
    tokenizer.chat_template = QWEN

    assert several == ChatTemplate(tokenizer, arguments={}).write(ASKED, begins_answer=True)


def saved(directory, tokenizer, **generation):
    write_tiny_model(directory, seed=0, hidden_size=32)
    tokenizer.save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return str(directory)


def test_the_token_that_ends_an_answer_in_the_template_is_an_end(tmp_path, caplog):
    tokenizer = words(eos="<|end|>", chat_template=QWEN)
    model_dir = saved(tmp_path / "model", tokenizer, eos_token_id=0)

    ends = Prompter(model_dir, use_chat_template=True).end_token_ids

    assert ends == (0, tokenizer.convert_tokens_to_ids("<|im_end|>"))
    assert Prompter(model_dir, use_chat_template=False).end_token_ids == (0,)
    assert "ends an answer" not in caplog.text


@pytest.mark.parametrize("behind", ["", " done", "###"])
def test_a_template_without_a_token_behind_the_answer_is_said(tmp_path, caplog, behind):
    template = "{% for m in messages %}{{ m.content }}" + behind + "{% endfor %}"
    model_dir = saved(tmp_path / "model", words(eos="<|end|>", chat_template=template), eos_token_id=0)

    assert Prompter(model_dir, use_chat_template=True).end_token_ids == (0,)
    assert f"the template ends an answer by {behind!r}, which is not a special token" in caplog.text


def test_a_template_that_writes_no_answer_has_no_end_of_its_own(tmp_path, caplog):
    template = "{% if messages|length > 1 %}{{ raise_exception('one only') }}{% endif %}{{ messages[0].content }}"
    model_dir = saved(tmp_path / "model", words(eos="<|end|>", chat_template=template), eos_token_id=0)

    assert Prompter(model_dir, use_chat_template=True).end_token_ids == (0,)
    assert "ends an answer" not in caplog.text


def ids(model_dir, text):
    return Prompter(model_dir, use_chat_template=False).encode(text).tolist()


def test_a_prompt_without_template_begins_with_bos_once_and_ends_with_no_end(tmp_path):
    from tokenizers.processors import TemplateProcessing

    both = TemplateProcessing(single="<s> $A <|end|>", pair=None, special_tokens=[("<|end|>", 0), ("<s>", 3)])
    tokenizer = words(eos="<|end|>", bos_token="<s>", post=both)
    model_dir = saved(tmp_path / "model", tokenizer)
    plain = tokenizer.encode("one plus", add_special_tokens=False)

    assert tokenizer.encode("one plus") == [3, *plain, 0]
    assert ids(model_dir, "one plus") == ids(model_dir, "<s>one plus") == [3, *plain]
    prompts = [Prompt(index=0, text=text, answer="") for text in ("one plus", "<s>one", "")]
    prompter = Prompter(model_dir, use_chat_template=False)
    assert prompter.num_tokens(prompts) == [prompter.encode_prompt(prompt).size for prompt in prompts]


def test_prompts_that_the_template_refuses_have_no_length(tmp_path):
    model_dir = saved(tmp_path / "model", words(eos="<|end|>", chat_template=NO_SYSTEM.replace("{{ bos_token }}", "")))
    prompter = Prompter(model_dir, use_chat_template=True)
    asked = Prompt(index=0, text="one", answer="")
    refused = Prompt(index=1, text="two", answer="", messages=(Message(role="system", content="x"),))

    assert prompter.num_tokens([refused, asked, refused]) == [None, prompter.encode_prompt(asked).size, None]
    assert prompter.num_tokens([refused]) == [None]


def test_the_text_of_a_completion_is_what_was_written(tmp_path):
    model_dir = saved(tmp_path / "model", sentencepiece(clean_up_tokenization_spaces=True))
    prompter = Prompter(model_dir, use_chat_template=False)

    for text in ("x = 4 , 4 .", "print('a !')", "x 's", "a ?", "do n't"):
        assert prompter.decode(prompter.tokens(text)) == text
