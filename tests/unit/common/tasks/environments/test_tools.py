"""Tools: what the policy is shown of functions, and what it reads of calls."""

import functools
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from heterorl.common.errors import ConfigError, EnvironmentFailed
from heterorl.common.tasks.environments.environment import Action, ToolCall
from heterorl.common.tasks.environments.episodes import Episodes
from heterorl.common.tasks.environments.tools import answer_calls, functions_of, schema_of

TOOLS = '''
from __future__ import annotations
import json
from dataclasses import dataclass
from typing import Literal

@dataclass
class Place:
    x: int

def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Both are whole.

    Args:
        a: the first one,
            on two lines.
        b (int): the second one.

    Returns:
        Their sum: a number.
    """
    return a + b

def look(at: Place, how: Literal["near", "far"] = "near") -> dict:
    """Look at a place."""
    return {"at": at, "how": how}

def fail(text: str) -> str:
    """Fail."""
    raise KeyError(text)

def say(count: int) -> str:
    """Say much."""
    return "x" * count

def halve() -> str:
    """Raise no text."""
    raise ValueError(chr(0xD800))

class Silent(Exception):
    def __str__(self):
        return self.text

def hush() -> str:
    """Raise no message."""
    raise Silent

def _hidden(a: int) -> int:
    return a

def score(messages, answer, level=0):
    return {"right": float(messages[-1]["content"] == answer), "level": level, "turns": len(messages)}
'''


def module(text=TOOLS):
    made = sys.modules["made"] = ModuleType("made")
    made.__file__ = "made.py"
    exec(text, vars(made))  # noqa: S102 - the text above
    return made


def called(*calls, most=1000):
    messages = answer_calls(functions_of(module()), [ToolCall(*call) for call in calls], most=most)
    assert [message.name for message in messages] == [name for name, _ in calls]
    assert {message.role for message in messages} == {"tool"}
    return [message.content for message in messages]


ODD = """
import asyncio

async def later(a: int) -> int:
    "Add one, later."
    await asyncio.sleep(0)
    return a + 1

def raw() -> bytes:
    "Give bytes that are no text."
    return bytes([255])

def ring() -> list:
    "Give a list of itself."
    made = []
    made.append(made)
    return made

def thing() -> object:
    "Give an object without a text."
    return [object()]

def part() -> object:
    "Give an object with a text."
    from fractions import Fraction
    return Fraction(1, 3)

def half() -> list:
    "Give half a character."
    return [chr(0xD800)]

async def count(a: int):
    "Count, later."
    for number in range(a):
        yield number
"""


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("later", {"a": 1}, "2"),
        ("later", {"a": "x"}, "error: wrong arguments of later: a: Input should be a valid integer"),
        ("raw", {}, "error: PydanticSerializationError: "),
        ("ring", {}, "error: PydanticSerializationError: "),
        ("thing", {}, "error: PydanticSerializationError: Error serializing to JSON: TypeError: a object has no text"),
        ("part", {}, '"1/3"'),
        ("half", {}, "error: PydanticSerializationError: "),
        ("count", {"a": 3}, "[0,1,2]"),
    ],
)
def test_tools_that_are_async_or_return_no_json_are_answered_too(name, arguments, words):
    tools = functions_of(module(ODD))

    assert schema_of(tools[0])["function"]["parameters"]["required"] == ["a"]
    (message,) = answer_calls(tools, [ToolCall(name, arguments)], most=1000)
    assert message.content.startswith(words)


def test_public_functions_but_for_the_score_are_tools():
    assert [tool.__name__ for tool in functions_of(module())] == ["add", "look", "fail", "say", "halve", "hush"]
    with pytest.raises(ValueError, match="no public function except score"):
        functions_of(module("from json import dumps\ndef score(messages):\n    return 1\n"))


WRAPPED = """
from __future__ import annotations
import functools

def timed(function):
    @functools.wraps(function)
    def call(*values, **named):
        return function(*values, **named)
    return call

timed.__module__ = "elsewhere"

@functools.lru_cache
def double(a: int) -> int:
    "Double it."
    return 2 * a

@functools.cache
@timed
def triple(a: int) -> int:
    "Triple it."
    return 3 * a

@timed
def half(a: int) -> float:
    "Halve it."
    return a / 2

twice = double
"""


def test_an_exit_of_python_is_an_error_that_the_policy_reads():
    text = "import sys\ndef leave(code: int):\n    'Leave.'\n    sys.exit(code)\n"
    (message,) = answer_calls(functions_of(module(text)), [ToolCall("leave", {"code": 2})], most=1000)

    assert message.content == "error: SystemExit: 2"


def test_cached_and_wrapped_functions_are_tools_once():
    tools = functions_of(module(WRAPPED))
    shown = [schema_of(tool)["function"] for tool in tools]

    assert [(each["name"], each["description"]) for each in shown] == [
        ("double", "Double it."), ("triple", "Triple it."), ("half", "Halve it.")
    ]  # fmt: skip
    assert all(each["parameters"]["properties"] == {"a": {"type": "integer"}} for each in shown)
    calls = [ToolCall(name, {"a": value}) for name in ("double", "triple", "half") for value in (4, "x")]
    said = [message.content for message in answer_calls(tools, calls, most=1000)]
    assert said[::2] == ["8", "12", "2.0"]
    assert all("a: Input should be a valid integer" in words for words in said[1::2])
    with pytest.raises(ValueError, match=r"functools.partial.* has no name; write a function"):
        schema_of(functools.partial(tools[0], a=1))


def test_schema_is_of_annotations_and_docstring():
    add, look, *_ = (schema_of(tool) for tool in functions_of(module()))

    assert add == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.\n\nBoth are whole.\n\nReturns:\n    Their sum: a number.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "the first one, on two lines."},
                    "b": {"type": "integer", "default": 1, "description": "the second one."},
                },
                "required": ["a"],
            },
        },
    }
    parameters = look["function"]["parameters"]
    assert parameters["properties"]["how"]["enum"] == ["near", "far"]
    assert parameters["$defs"]["Place"]["properties"] == {"x": {"type": "integer"}}
    assert "title" not in json.dumps(parameters).replace('"title": "Place"', "")


def test_a_docstring_is_shown_whole_and_each_argument_has_its_own_words():
    (tool,) = functions_of(
        module('''
from typing import Callable

def f(a: int, b: str = "", c: int = 0) -> int:
    """Ask.

    Note: once a turn.

    Args:
        a: the first.
        b (Callable[[int], (int)]): the second.
        c: the third.

    Never ask with 0.
    """
    return a
''')
    )

    shown = schema_of(tool)["function"]
    assert shown["description"] == "Ask.\n\nNote: once a turn.\n\nNever ask with 0."
    words = {name: each["description"] for name, each in shown["parameters"]["properties"].items()}
    assert words == {"a": "the first.", "b": "the second.", "c": "the third."}


REPEATED = """
import asyncio
from pathlib import Path
import numpy as np

LOCK = asyncio.Lock()

def read(name: str) -> str:
    "Read a file next to this one."
    return (Path(__file__).parent / name).read_text()

def what() -> object:
    "Give a function."
    return [what]

def broken() -> int:
    "Name an object."
    raise KeyError(object())

async def both() -> int:
    "Wait for a lock twice."
    async def once():
        async with LOCK:
            await asyncio.sleep(0)
            return 1
    return sum(await asyncio.gather(once(), once()))

def numbers() -> object:
    "Give numbers of numpy."
    return {"whole": np.int64(2), "half": np.float32(0.5), "yes": np.bool_(True), "all": np.arange(2)}

def full() -> int:
    "Fill the memory."
    raise MemoryError
"""


def tools_at(directory):
    directory.mkdir()
    (directory / "repeated.py").write_text(REPEATED)
    spec = importlib.util.spec_from_file_location("repeated", directory / "repeated.py")
    made = sys.modules["repeated"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return functions_of(made)


def test_answers_have_no_place_and_no_address_and_are_the_same_twice(tmp_path):
    calls = [ToolCall("read", {"name": "no.txt"}), *(ToolCall(name, {}) for name in ("what", "broken", "both", "both"))]
    here, there = (
        [each.content for each in answer_calls(tools_at(tmp_path / name), calls, most=10_000)] for name in ("a", "b")
    )

    assert here == there
    assert "No such file or directory: 'no.txt'" in here[0]
    assert here[1] == '["<function what at 0x>"]'
    assert here[2].endswith("<object object at 0x>")
    # A lock of the file belongs to one event loop.
    assert here[3:] == ["2", "2"]


def test_numbers_of_numpy_are_numbers_and_a_full_process_answers_nothing(tmp_path):
    tools = tools_at(tmp_path / "a")

    (said,) = answer_calls(tools, [ToolCall("numbers", {})], most=1000)
    assert json.loads(said.content) == {"whole": 2, "half": 0.5, "yes": True, "all": [0, 1]}
    with pytest.raises(MemoryError):
        answer_calls(tools, [ToolCall("full", {})], most=1000)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def f(a: int):\n    return a\n", "f has no docstring"),
        ('def f(a):\n    "Do."\n', "its parameter a has no type"),
        ('def f(*a: int):\n    "Do."\n', r"\*a: int cannot be given by name"),
        ('def f(a: "Lamp"):\n    "Do."\n', "f: its types cannot be shown: .*Lamp"),
        ('def f(a: int, /):\n    "Do."\n', "cannot be given by name"),
    ],
)
def test_a_function_that_cannot_be_shown_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        schema_of(functions_of(module(text))[0])


def test_calls_are_answered_in_order_as_text():
    assert called(("add", {"a": 1, "b": 2}), ("look", {"at": {"x": 1}}), ("say", {"count": 2}), ("add", {"a": "3"})) == [
        "3", '{"at":{"x":1},"how":"near"}', "xx", "4",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("add", {"a": "one"}, "error: wrong arguments of add: a: Input should be a valid integer"),
        ("add", {}, "error: wrong arguments of add: a: Missing required argument"),
        ("add", {"a": 1, "c": 2}, "error: wrong arguments of add: c: Unexpected keyword argument"),
        ("look", {"at": {"x": []}}, "error: wrong arguments of look: at.x: Input should be a valid integer"),
        ("fail", {"text": "lamp"}, "error: KeyError: 'lamp'"),
        ("sub", {"a": 1}, "error: there is no tool sub; there are add, look, fail, say, halve, hush"),
        ("hush", {}, "error: Silent: its message cannot be read"),
        ("_hidden", {"a": 1}, "error: there is no tool _hidden"),
        ("score", {"messages": []}, "error: there is no tool score"),
        ("fail", {"text": "x" * 10_000}, "error: KeyError: 'xx"),
        ("halve", {}, "error: ValueError: ?"),
    ],
)
def test_what_is_wrong_with_a_call_is_read_by_the_policy(name, arguments, words):
    (text,) = called((name, arguments))

    assert text.startswith(words)
    assert len(text) <= 500
    assert "http" not in text


def test_a_name_that_no_tool_has_is_not_repeated_whole():
    (message,) = answer_calls(functions_of(module()), [ToolCall("x" * 10_000, {})], most=1000)

    assert len(message.name) + len(message.content) < 700


def test_results_of_a_turn_have_one_bound_together():
    texts = called(("say", {"count": 60}), ("say", {"count": 60}), ("say", {"count": 30}), most=100)

    assert texts[0] == "x" * 60
    assert texts[1] == "error: the result has 60 characters, whic"[:40]
    assert texts[2] == ""


@pytest.fixture
def opened(tmp_path):
    made = []

    def make(text=TOOLS, **changes):
        (tmp_path / "mytools.py").write_text(text)
        limits = {"step_timeout_s": 60.0, "memory_bytes": 1 << 28, "max_observation_chars": 1000, "num_processes": 2}
        made.append(Episodes("mytools.py", directory=Path(tmp_path), **{**limits, **changes}))
        return made[-1]

    yield make
    for each in made:
        each.close()


def turn(text, *calls):
    return Action(text, tuple(ToolCall(*call) for call in calls))


@pytest.mark.process
def test_an_episode_goes_on_while_turns_call_tools_and_is_scored_at_its_end(opened):
    episodes = opened()
    assert [tool["function"]["name"] for tool in episodes.tools] == ["add", "look", "fail", "say", "halve", "hush"]
    assert (episodes.needs, episodes.keeps_prompts, episodes.is_deterministic) == (("answer",), True, True)

    with episodes.open({"prompt": "1 + 2?", "answer": "3", "level": 2, "other": 1}, seed=1) as episode:
        assert episode.first is None
        observation = episode.step(turn("I add.", ("add", {"a": 1, "b": 2}), ("fail", {"text": "x"}), ("add", {})))
        texts = [message.content for message in observation.messages]
        assert texts[:2] == ["3", "error: KeyError: 'x'"]
        assert texts[2].startswith("error: wrong arguments")
        assert not observation.done
        assert episode.step(turn("3")).done
        # The prompt, two turns, three results.
        assert {part.name: part.value for part in episode.score()} == {"right": 1.0, "level": 2.0, "turns": 6.0}
    with episodes.open({"prompt": "1 + 2?", "answer": "3"}, seed=1) as episode:
        assert {part.name: part.value for part in episode.score()} == {"right": 0.0, "level": 0.0, "turns": 1.0}


@pytest.mark.process
@pytest.mark.parametrize(
    ("text", "right"), [("<think>3?</think>2", 0.0), ("<think>3", 0.0), ("<think>2?</think>3", 1.0)]
)
def test_a_score_gets_answers_without_thoughts(opened, text, right):
    lenient = TOOLS.replace('messages[-1]["content"] == answer', 'answer in messages[-1]["content"]')
    with opened(lenient).open({"prompt": "1 + 2?", "answer": "3"}, seed=1) as episode:
        episode.step(turn(text))
        assert episode.score()[0].value == right


@pytest.mark.process
def test_a_score_says_which_columns_it_needs(opened):
    needing = TOOLS.replace("level=0", "level")

    assert opened(needing).needs == ("answer", "level")
    with (
        opened(needing).open({"prompt": "?", "answer": ""}, seed=1) as episode,
        pytest.raises(EnvironmentFailed, match="level"),
    ):
        episode.score()
    everything = TOOLS.replace("level=0", "**columns").replace('"level": level', '"level": columns["deep"]')
    with opened(everything).open({"deep": 7, "answer": ""}, seed=1) as episode:
        assert {part.name: part.value for part in episode.score()}["level"] == 7.0


@pytest.mark.process
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def f(a: int) -> int:\n    'Do.'\n", "has no function score"),
        ("def f(a: int) -> int:\n    return a\ndef score(messages):\n    return 0\n", "f has no docstring"),
        ("def score(messages):\n    return 0\n", "no public function except score"),
        (
            "def f(a: int) -> int:\n    'Do.'\ng = f\ndef f(b: int) -> int:\n    'Do.'\n"
            "def score(messages):\n    return 0\n",
            "two tools have the name f",
        ),
    ],
)
def test_a_file_that_is_no_tools_is_refused_at_the_start(opened, text, words):
    with pytest.raises(ConfigError, match=f"^task.environment: mytools.py: .*{words}"):
        opened(text)
