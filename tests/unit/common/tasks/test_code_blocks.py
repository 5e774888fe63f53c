"""Which block of a completion is its code, in the forms that models write."""

import textwrap

import pytest

from heterorl.common.tasks.answer_extraction import Block, blocks_of, python_of

CODE = "def f(x):\n    return x * x\n"
RIGHT = f"```python\n{CODE}```"


@pytest.mark.parametrize(
    "text",
    [
        RIGHT,
        f"Example:\n```text\n2 -> 4\n```\nSolution:\n{RIGHT}",
        f"Run it:\n```bash\npython x.py\n```\n{RIGHT}",
        f"```text\na\n```\nb\n```text\nc\n```\n{RIGHT}",
        f"```\nf(2) is 4\n```\n{RIGHT}",
        f"{RIGHT}\nwhich gives\n```json\n{{}}\n```\nDone.",
        f"{RIGHT}\n```text\n4\n```\nNote:\n```\nf is even\n```",
        f"```python\ndef f(x): ...\n```\nBetter:\n{RIGHT}",
        f"```text\n2 -> 4, and no end\n{RIGHT}",
        f"````markdown\n# Solution\n{RIGHT}\n````",
        f"Use ```f(2)``` so: {RIGHT}",
        f"Between ``` fences: {RIGHT}",
    ],
)
def test_blocks_around_it_do_not_hide_the_code(text):
    assert python_of(text) == CODE


@pytest.mark.parametrize(
    "fence",
    ["```", "```py", "```Python3", "``` python ", "   ```python", "```python title=x.py", "```{.python}",
     "```python:x.py", "```{python}"],
)  # fmt: skip
def test_a_fence_may_have_a_name_of_python_or_none(fence):
    assert python_of(f"{fence}\n{CODE}```") == CODE
    assert python_of(f"{fence}\r\n{CODE}```\r\n") == CODE


@pytest.mark.parametrize(
    "fence", ["```text", "```pythonic", "```c++", "~~python", "``python", "```python, says he", "```.", "so ~~~python"]
)
def test_another_fence_opens_no_python(fence):
    assert python_of(f"{fence}\n{CODE}```") is None


@pytest.mark.parametrize(
    "end", ["```", "````", "   ```", "      ```", "``` That is it.", "```text\n4\n```", "```\n```"]
)
def test_a_block_ends_where_models_end_it(end):
    assert python_of(f"Here it is: ```py\n{CODE}{end}").rstrip(" ") == CODE
    assert python_of(f"```\n{CODE.rstrip()}```").rstrip() == CODE.rstrip()
    assert python_of(f"```\n{CODE.rstrip()}``` That is it.").rstrip() == CODE.rstrip()


@pytest.mark.parametrize(
    "code",
    [
        'FENCE = "```"\n',
        "# as ```f(2)```\n",
        'def f(x):\n    """Square.\n\n    ```\n    f(2)\n    ```\n    """\n    return x * x\n',
        'def f(x):\n    """Square.\n\n    ```python\n    f(2)\n    ```\n    """\n    return x * x\n',
    ],
)
def test_back_ticks_inside_the_code_are_part_of_it(code):
    assert python_of(f"So:\n```python\n{code}```\nDone.") == code
    assert python_of(f"So:\n````python\n```\n{code}````\nDone.") == f"```\n{code}"


@pytest.mark.parametrize(
    "text",
    [
        f"~~~python\n{CODE}~~~",
        f"~~~~~ py\n{CODE}~~~~~\nDone.",
        f"1. First:\n\n   ~~~python\n{textwrap.indent(CODE, '   ')}   ~~~\n",
        f"1. First:\n\n   ```python\n{textwrap.indent(CODE, '   ')}   ```\n",
        f"- ```python\n{textwrap.indent(CODE, '  ')}  ```\n",
        f"* a\n    * b\n\n        ```python\n{textwrap.indent(CODE, '        ')}        ```\n",
        f"> Quoted:\n> ```python\n{textwrap.indent(CODE, '> ')}> ```\n",
        f"\t```python\n{textwrap.indent(CODE, chr(9))}\t```\n",
    ],
)
def test_a_block_of_tildes_in_a_list_or_in_a_quote_is_read_as_markdown_says(text):
    assert python_of(text) == CODE


def test_a_quoted_block_loses_only_the_signs_at_the_start_of_a_line():
    code = "def f(a, b):\n    return a > b\n"
    assert python_of(f"> ```python\n{code}```\n") == code
    assert python_of(f"> ```python\n{textwrap.indent(code, '> ')}> ```\n") == code


def test_back_ticks_between_tildes_and_tildes_between_back_ticks_are_code():
    assert python_of('~~~python\nA = """\n```\n"""\n~~~\n') == 'A = """\n```\n"""\n'
    assert python_of('```python\nA = """\n~~~\n"""\n```\n') == 'A = """\n~~~\n"""\n'
    assert python_of('```python\n    """a\n  b"""\n    x = 1\n```') == '"""a\nb"""\nx = 1\n'


def test_what_nothing_closes_goes_to_the_end_where_no_block_is_closed():
    assert python_of(f"```python\n{CODE}") == CODE
    assert python_of(f"As said:\n```\nf(2) is 4\n```\nSo:\n```python\n{CODE}") == CODE
    assert python_of("```python\n") is None
    assert python_of(f"{RIGHT}\nor\n```python\ndef g(") == CODE
    assert list(blocks_of("a ```py\none\n``` b ```\ntwo\n``` c")) == [
        Block(word="py", text="one\n"), Block(word="", text="two\n"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ["```" + " " * 300_000, "```" + " \t" * 150_000 + "x", "```\n" * 100_000, "``` x ```py\n" * 60_000,
     "```py\n" + "x ``` y\n" * 60_000, "`" * 300_000, "\n" * 300_000, "``` " * 60_000,
     " " * 300_000 + "x~~~", "- " * 150_000 + "x~~~", ("-" + " " * 50_000) * 4 + "x~~~"],
)  # fmt: skip
def test_long_completions_take_time_by_their_length(text):
    python_of(text + "\n" + RIGHT)
