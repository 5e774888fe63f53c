"""Requests in the chat format: what is refused by the name of its field, what extends a conversation, what comes back."""

import json

import pytest

from heterorl.common.tasks.environments.environment import Action, ToolCall
from heterorl.common.tasks.environments.openai_chat import History, RequestRefused, chunks, completion, read_request
from heterorl.common.tasks.task import Message

ASKED = {"role": "user", "content": "Guess."}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALLS = Action("<think>sum</think>Let me add.", (ToolCall("add", {"b": 2, "a": 1}),))


def request(*messages, **fields):
    return read_request({"model": "policy", "messages": list(messages), **fields})


def refused(function, *args, **fields):
    with pytest.raises(RequestRefused) as caught:
        function(*args, **fields)
    return caught.value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("logit_bias", {"50256": -100}),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("logprobs", True),
        ("top_logprobs", 5),
        ("stop", ["\n"]),
        ("tool_choice", "required"),
        ("parallel_tool_calls", False),
        ("modalities", ["text", "audio"]),
        ("guided_json", {"type": "object"}),
        ("guided_regex", "a+"),
        ("structured_outputs", {"choice": ["a"]}),
        ("regex", "a+"),
        ("stop_token_ids", [1]),
        ("min_tokens", 5),
        ("ignore_eos", True),
        ("top_k", 5),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("continue_final_message", True),
        ("add_generation_prompt", False),
    ],
)
def test_what_would_change_the_distribution_is_refused_by_its_name(name, value):
    error = refused(request, ASKED, **{name: value})

    assert (error.status, error.body["error"]["param"]) == (400, name)
    assert name in error.body["error"]["message"]


def test_what_the_run_decides_itself_is_taken_and_ignored():
    fields = {
        "temperature": 0, "top_p": 0.1, "max_tokens": 5, "max_completion_tokens": 5, "seed": 7, "n": 1, "logprobs": False,
        "response_format": {"type": "text"}, "tool_choice": "auto", "user": "x", "stop": None, "presence_penalty": 1,
        "guided_json": None, "stop_token_ids": [], "min_tokens": 0, "top_k": -1, "ignore_eos": False, "cache_salt": "x",
    }  # fmt: skip
    assert request(ASKED, **fields) == request(ASKED)


def test_no_choice_of_no_tools_changes_nothing():
    assert request(ASKED, tool_choice="none") == request(ASKED, tool_choice="none", tools=[]) == request(ASKED)
    assert refused(request, ASKED, tool_choice="none", tools=[TOOL]).body["error"]["param"] == "tool_choice"


def test_a_speaker_keeps_the_name():
    history = History()
    named = {**ASKED, "name": "alice"}
    assert history.extend(request(named)) == (Message(role="user", content="Guess.", name="alice"),)
    answer = history.answer(Action("50"))

    # Frameworks name the assistant as they like.
    added = history.extend(request(named, {**answer, "name": "agent"}, {**ASKED, "name": "bob"}))
    assert added == (Message(role="user", content="Guess.", name="bob"),)
    assert refused(request, {**ASKED, "name": "\ud800"}).status == 400
    assert "name" not in str(History().extend(request({**ASKED, "name": None}))[0].name)


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        {},
        {"messages": []},
        {"messages": "Guess."},
        {"messages": ["Guess."]},
        {"messages": [{"content": "Guess."}]},
        {"messages": [{"role": "user", "content": 7}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": [{"role": "assistant", "tool_calls": [7]}]},
        {"messages": [{"role": "assistant", "tool_calls": 7}]},
        {"messages": [ASKED], "tools": "add"},
        {"messages": [ASKED], "tools": [{"type": "function"}]},
    ],
)
def test_what_is_no_request_is_refused(body):
    assert refused(read_request, body).status == 400


def test_a_conversation_grows_by_what_follows_the_answer():
    history = History()
    system = {"role": "developer", "content": "Be short."}
    assert history.extend(request(system, ASKED)) == (
        Message(role="system", content="Be short."),
        Message(role="user", content="Guess."),
    )
    answer = history.answer(Action("<think>half</think>\n\n50 "))
    assert answer == {"role": "assistant", "content": "\n\n50 "}

    added = history.extend(
        request(
            system,
            {"role": "user", "content": [{"type": "text", "text": "Gue"}, {"type": "text", "text": "ss."}]},
            {**answer, "content": "50", "refusal": None, "annotations": []},
            {"role": "user", "content": "lower"},
        )
    )
    assert added == (Message(role="user", content="lower"),)


def test_calls_go_out_with_ids_and_results_come_back_with_names():
    history = History()
    history.extend(request(ASKED, tools=[TOOL]))
    answer = history.answer(CALLS)
    (call,) = answer["tool_calls"]
    assert answer["content"] == "Let me add."
    assert (call["type"], call["function"]["name"]) == ("function", "add")
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}

    # Written in another order, with other spaces, it is the same call.
    again = {**call, "function": {"name": "add", "arguments": '{"a":1,"b":2}'}}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
    added = history.extend(request(ASKED, {**answer, "tool_calls": [again]}, result, tools=[TOOL]))
    assert added == (Message(role="tool", content="3", name="add"),)


def test_a_turn_of_calls_alone_has_no_content():
    history = History()
    history.extend(request(ASKED, tools=[TOOL]))

    assert history.answer(Action("\n", CALLS.tool_calls))["content"] is None


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "user", "content": "Other."}], "messages[0] differs"),
        ([ASKED], "add none"),
        ([ASKED, {"role": "assistant", "content": "49"}, {"role": "user", "content": "lower"}], "messages[1] differs"),
        ([ASKED, {"role": "user", "content": "lower"}], "messages[1] differs"),
        ([ASKED, {"role": "assistant", "content": "50"}], "add none"),
        (
            [ASKED, {"role": "assistant", "content": "50"}, {"role": "assistant", "content": "x"}, ASKED],
            "messages[2] has the role 'assistant'",
        ),
        (
            [
                ASKED,
                {"role": "assistant", "content": "50"},
                {"role": "tool", "tool_call_id": "call_9_9", "content": "3"},
            ],
            "messages[2].tool_call_id",
        ),
    ],
)
def test_a_rewritten_history_is_refused_and_changes_nothing(messages, words):
    history = History()
    history.extend(request(ASKED))
    history.answer(Action("50"))
    known = list(history.known)

    error = refused(history.extend, request(*messages))
    assert (error.status, error.body["error"]["param"]) == (400, "messages")
    assert words in str(error)
    assert history.known == known


def test_other_arguments_of_a_call_are_another_history():
    history = History()
    history.extend(request(ASKED, tools=[TOOL]))
    answer = history.answer(CALLS)
    for arguments in ('{"a":1,"b":3}', "{", None):
        call = {**answer["tool_calls"][0], "function": {"name": "add", "arguments": arguments}}
        assert "messages[1] differs" in str(
            refused(history.extend, request(ASKED, {**answer, "tool_calls": [call]}, ASKED, tools=[TOOL]))
        )


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ({"x": 1.0, "n": 12345678901234567890}, '{"x":1,"n":12345678901234567000}'),
        ({}, ""),
        ({}, "{}"),
        ({"x": 2}, {"x": 2.0}),
    ],
)
def test_numbers_that_javascript_wrote_again_are_the_same_history(arguments, written):
    history = History()
    history.extend(request(ASKED, tools=[TOOL]))
    answer = history.answer(Action("", (ToolCall("add", arguments),)))
    call = {**answer["tool_calls"][0], "function": {"name": "add", "arguments": written}}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}

    added = history.extend(request(ASKED, {**answer, "tool_calls": [call]}, result, tools=[TOOL]))

    assert [each.content for each in added] == ["3"]


def test_other_tools_in_a_later_request_are_refused():
    history = History()
    history.extend(request(ASKED, tools=[TOOL]))
    answer = history.answer(Action("50"))

    assert refused(history.extend, request(ASKED, answer, ASKED)).body["error"]["param"] == "tools"


def test_examples_may_stand_before_the_first_question_and_made_up_calls_may_not():
    shown = [ASKED, {"role": "assistant", "content": "50"}, ASKED]
    assert [message.role for message in History().extend(request(*shown))] == ["user", "assistant", "user"]
    calls = [{"id": "x", "function": {"name": "add", "arguments": "{}"}}]
    assert "tool_calls" in str(
        refused(History().extend, request(ASKED, {"role": "assistant", "tool_calls": calls}, ASKED))
    )
    assert "role 'tool'" in str(refused(History().extend, request(ASKED, {"role": "tool", "content": "3"})))


def test_an_answer_says_why_it_ended():
    asked = request(ASKED)
    made = {"number": 3, "created": 1}
    text = {"role": "assistant", "content": "50"}
    calls = {**text, "tool_calls": []}

    reasons = [
        completion(message, asked, is_cut=is_cut, **made)["choices"][0]["finish_reason"]
        for message, is_cut in ((text, False), (text, True), (calls, False))
    ]
    assert reasons == ["stop", "length", "tool_calls"]


def test_the_pieces_of_a_stream_make_the_answer():
    history = History()
    asked = request(ASKED, tools=[TOOL], stream=True, stream_options={"include_usage": True})
    history.extend(asked)
    message = history.answer(CALLS)

    first, last, usage = chunks(message, asked, number=1, is_cut=False, created=1)
    delta = first["choices"][0]["delta"]
    assert [call.pop("index") for call in delta["tool_calls"]] == [0]
    assert delta == message
    assert last["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "tool_calls"}
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 0)
