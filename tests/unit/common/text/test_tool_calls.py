"""Calls of tools in a turn's text: what is read, what is a problem in words, and how a run's parser is found."""

import json
import random
from typing import get_args

import pytest

from heterorl.common.errors import ConfigError
from heterorl.common.tasks.task_config import TaskConfig
from heterorl.common.text.conversation import try_turns
from heterorl.common.text.tool_calls import (
    MAX_CALL_BYTES,
    MAX_CALLS,
    MAX_DEPTH,
    MAX_DIGITS,
    PARSERS,
    Parser,
    parse_action,
    parser_for,
)
from tests.support.conversations import CHATML, LLAMA3, QWEN3, TOOLS, prompter_of, words_of


def call(name="f", **arguments):
    return json.dumps({"name": name, "arguments": arguments})


def tagged(*calls):
    return "".join(f"<tool_call>\n{each}\n</tool_call>" for each in calls)


@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [
        ("7", "7", []),
        ("", "", []),
        (f"a {tagged(call('f', x=1))} b", "a  b", [("f", {"x": 1})]),
        (tagged(call("f", x="</tool>"), call("g")), "", [("f", {"x": "</tool>"}), ("g", {})]),
        # As SmolLM2 has it: several in one pair of tags.
        (tagged(f"[{call('f')}, {call('g', y=[1.5, None])}]"), "", [("f", {}), ("g", {"y": [1.5, None]})]),
        (tagged('{"name": "f"}'), "", [("f", {})]),
        (tagged('{"name": "f", "parameters": {"x": "\\"[["}}'), "", [("f", {"x": '"[['})]),
        # Thoughts of a call are none.
        (f"<think>{tagged(call('no'))}</think>{tagged(call())}", f"<think>{tagged(call('no'))}</think>", [("f", {})]),
        (f"so {tagged(call('no'))}</think>12", f"so {tagged(call('no'))}</think>12", []),
        (f"{tagged(call())}<think>or {tagged(call('no'))}", f"<think>or {tagged(call('no'))}", [("f", {})]),
        (call(), call(), []),
        ("</tool_call>", "</tool_call>", []),
    ],
)  # fmt: skip
def test_calls_between_tags_are_read(text, rest, calls):
    assert parse_action(text, parser="hermes") == (rest, tuple(calls), "")


@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [
        ('{"name": "f", "parameters": {"x": 1}}', "", [("f", {"x": 1})]),
        ('<think>{"name": 1}</think>\n{"name": "f", "arguments": {}}', '<think>{"name": 1}</think>', [("f", {})]),
        # An answer that is JSON, or text with JSON in it.
        ('{"move": "left"}', '{"move": "left"}', []),
        ('{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
        ('I call {"name": "f"}', 'I call {"name": "f"}', []),
        (tagged(call()), tagged(call()), []),
    ],
)
def test_an_answer_that_is_a_call_is_read(text, rest, calls):
    assert parse_action(text, parser="json") == (rest, tuple(calls), "")


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("{", "is no JSON"),
        ("", "is no JSON"),
        ('{"name": "f",}', "is no JSON"),
        ('{"name": "f", "arguments": {"x": NaN}}', "is no JSON"),
        ('{"name": "f", "arguments": {"x": -Infinity}}', "is no JSON"),
        ('{"name": "f", "arguments": {"x": 1e999}}', "is no JSON"),
        ('{"name": "f", "arguments": {"x": %s}}' % ("9" * (MAX_DIGITS + 1)), "is no JSON"),
        ('{"name": "f", "arguments": {"x": "\\ud800"}}', "is no JSON"),
        ('{"name": "f", "arguments": {"x": "\ud800"}}', "is no Unicode text"),
        ("12", "is no object"),
        ("[12]", "is no object"),
        ('{"arguments": {}}', "has no name"),
        ('{"name": 1}', "has no name"),
        ('{"name": ""}', "has no name"),
        ('{"name": "f", "arguments": "{}"}', "has arguments that are no object"),
        ('{"name": "f", "arguments": null}', "has arguments that are no object"),
        ('{"name": "f", "arguments": {"x": %s}}' % ("[" * MAX_DEPTH), f"is deeper than {MAX_DEPTH}"),
        ("[" * 100_000, "bytes of at most"),
        ('{"name": "f", "arguments": {"x": "%s"}}' % ("\u00e9" * (MAX_CALL_BYTES // 2)), "bytes of at most"),
        (f"[{','.join([call()] * (MAX_CALLS + 1))}]", f"has more than {MAX_CALLS} calls"),
    ],
    ids=lambda value: value[:40],
)  # fmt: skip
def test_a_call_that_cannot_be_read_is_a_problem_in_words(written, problem):
    said = parse_action(f"a{tagged(call('good'), written)}b", parser="hermes")

    assert said.text == "ab"
    assert said.calls == (), "of a turn's calls all are made or none"
    assert said.problem.startswith("No tool was called: call 2 ")
    assert problem in said.problem
    assert said.problem.endswith('Write <tool_call>{"name": "TOOL", "arguments": {...}}</tool_call>')
    if written.startswith("{") and "name" in written and "arguments" in written:
        assert problem in parse_action(written, parser="json").problem


def test_the_deepest_call_that_is_allowed_is_read():
    deep = f'{{"name": "f", "arguments": {{"x": {"[" * (MAX_DEPTH - 2)}{"]" * (MAX_DEPTH - 2)}}}}}'

    assert parse_action(tagged(deep), parser="hermes").problem == ""
    # Brackets in texts are no depth, also behind a quotation mark that is escaped; behind an escaped backslash they are.
    flat = '"' + "[" * (MAX_DEPTH + 1)
    assert parse_action(tagged(call("f", x=flat)), parser="hermes").calls == (("f", {"x": flat}),)
    assert "is deeper" in parse_action(tagged(call("f", x="\\")[:-2] + ', "y": ' + flat[1:]), parser="hermes").problem


def test_the_number_of_calls_is_bounded():
    assert len(parse_action(tagged(*[call()] * MAX_CALLS), parser="hermes").calls) == MAX_CALLS
    for texts in (
        [call()] * (MAX_CALLS + 1),
        [*[call()] * MAX_CALLS, "{"],
        [f"[{call()},{call()}]"] * (MAX_CALLS // 2 + 1),
    ):
        said = parse_action(tagged(*texts), parser="hermes")
        assert (said.calls, f"at most {MAX_CALLS} calls" in said.problem) == ((), True)


@pytest.mark.parametrize("before", ["", "<think>so</think>"])
def test_a_call_around_an_end_of_thoughts_is_a_problem(before):
    text = before + tagged(call("f", x="a</think>b"))

    assert parse_action(text, parser="hermes")[:2] == (text, ())
    assert "a call has </think> in it" in parse_action(text, parser="hermes").problem


def test_a_call_that_is_not_closed_is_a_problem():
    said = parse_action(f"a{tagged(call())}b<tool_call>{call()}", parser="hermes")

    assert said == ("ab", (), said.problem)
    assert "call 2 has no </tool_call>" in said.problem


PIECES = ("<tool_call>", "</tool_call>", "<think>", "</think>", call(), '{"name"', ": ", '"f"', "[", "]", "{", "}", "\\",
          '"', ",", "1", "e9", "NaN", "null", "\n", "\ud800", "\u00b5", "x")  # fmt: skip


def test_no_text_raises_and_what_is_read_can_be_written():
    chance = random.Random(1)
    found = set()
    for _ in range(5000):
        text = "".join(chance.choices(PIECES, k=chance.randrange(25)))
        for parser in ("hermes", "json"):
            said = parse_action(text, parser=parser)
            json.dumps(said.calls, allow_nan=False, ensure_ascii=False).encode()
            assert not (said.calls and said.problem)
            assert said.calls or said.problem or said.text == text
            found.add((parser, bool(said.calls), bool(said.problem)))

    assert len(found) == 6, "calls, problems and plain texts of either parser"


@pytest.fixture
def prompter(tmp_path):
    return lambda template, **more: prompter_of(tmp_path / "model", template, words_of(eos="<|im_end|>", **more))


XML = QWEN3.replace("""<tool_call>\\n{"name": "' }}""", """<tool_call>\\n<function=' }}""")


@pytest.mark.parametrize(("template", "parser"), [(QWEN3, "hermes"), (LLAMA3, "json")])
def test_the_parser_is_the_one_that_reads_the_templates_calls(prompter, template, parser):
    assert parser_for(prompter(template), tools=TOOLS, setting="auto") == parser


def test_a_template_that_writes_no_calls_needs_the_key(prompter):
    with pytest.raises(ConfigError, match="task.tool_parser: the model's template writes no calls") as error:
        parser_for(prompter(CHATML), tools=TOOLS, setting="auto")
    assert "hermes, json" in error.value.action
    assert parser_for(prompter(CHATML), tools=TOOLS, setting="json") == "json"
    # Granite writes a list.
    written = f"[{call('f', x=1)}, {call('g')}]"
    assert parse_action(written, parser="json").calls == (("f", {"x": 1}), ("g", {}))
    assert parse_action("[1, 2]", parser="json").text == "[1, 2]"


def test_the_key_takes_every_parser():
    keys = get_args(TaskConfig.model_fields["tool_parser"].annotation)

    assert keys == ("auto", *PARSERS) == ("auto", *get_args(Parser))


def test_a_form_that_no_parser_reads_names_the_key(prompter):
    assert XML != QWEN3
    found = prompter(XML)

    with pytest.raises(ConfigError, match="task.tool_parser: no parser reads .*<function=probe0tool") as error:
        parser_for(found, tools=TOOLS, setting="auto")
    assert "hermes, json" in error.value.action
    assert parser_for(found, tools=TOOLS, setting="hermes") == "hermes"
    with pytest.raises(ConfigError, match="task.tool_parser: no parser reads"):
        try_turns(found, tools=TOOLS)
    assert try_turns(found, tools=TOOLS, tool_parser="json") == "json"


def test_tags_that_decoded_text_leaves_out_name_the_key(prompter):
    found = prompter(QWEN3, are_tags_special=True)

    for setting, problem in (("auto", "no parser reads the form"), ("hermes", "of the form of hermes the tokenizer")):
        with pytest.raises(ConfigError, match=f"task.tool_parser: {problem}"):
            parser_for(found, tools=TOOLS, setting=setting)
    assert parser_for(found, tools=TOOLS, setting="json") == "json"


def test_without_a_template_no_parser_is_found(tmp_path, prompter):
    from heterorl.common.text.prompter import Prompter

    prompter(QWEN3)

    with pytest.raises(ConfigError, match="use_chat_template: tools are shown by a template"):
        parser_for(Prompter(str(tmp_path / "model"), use_chat_template=False), tools=TOOLS, setting="auto")
