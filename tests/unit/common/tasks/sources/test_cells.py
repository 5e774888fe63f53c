"""Cells of data sets as prompts and answers: how numbers are written, what is absent, and which columns are taken."""

import datetime
import decimal
import json
import logging
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from heterorl.common.errors import ConfigError
from heterorl.common.tasks.source_config import DataConfig, SourceConfig
from heterorl.common.tasks.sources import arrow_rows
from heterorl.common.tasks.sources.arrow_rows import ArrowRows
from heterorl.common.tasks.sources.row_reader import answer_text
from heterorl.common.tasks.sources.rows_task import RowsTask
from heterorl.common.tasks.task_config import TaskConfig, build_task

ASKED = [f"q{number}" for number in range(6)]


def parquet(path, columns):
    pq.write_table(pa.table(columns), path / "rows.parquet")
    return f"parquet:{path / 'rows.parquet'}"


def jsonl(path, rows):
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"jsonl:{path / 'rows.jsonl'}"


def built(name, *, data=None, measure=None, **changes):
    return build_task(TaskConfig(name=name, data=data or {}, evaluation_size=1, **changes), measure=measure)


def table_task(columns, **data):
    """A task over a table that no file could hold."""
    config = SourceConfig(name="parquet:x", data=DataConfig(**data))
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    return RowsTask(ArrowRows(table, "d"), None, config, evaluation_size=1, measure=None)


def prompts(task):
    every = [task.prompt(index) for index in range(task.num_prompts)]
    return sorted(
        [*every, *(task.evaluation_prompt(index) for index in range(task.num_evaluation_prompts))],
        key=lambda prompt: prompt.text,
    )


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (72.0, "72"), (1e5, "100000"), (0.1, "0.1"), (-2.50, "-2.5"), (-0.0, "0"), (1e-7, "0.0000001"), (1e300, "1e+300"),
        (3, "3"), (" 7 ", " 7 "), (decimal.Decimal("72.00"), "72"), ([1, "a"], '[1, "a"]'), ({"b": 1, "a": 2}, '{"b": 1, "a": 2}'),
        (True, "True"), ([False], "[false]"), ([], ""), ([None, [""]], ""), ({"value": " "}, ""), ({"a": [None, 0]}, '{"a": [null, 0]}'),
        ([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}], "4"), ([{"role": "user"}], '[{"role": "user"}]'),
        (None, ""), (math.nan, ""), (math.inf, ""), ("", ""), (" \n", ""), (decimal.Decimal("NaN"), ""),
    ],
)  # fmt: skip
def test_a_number_is_written_as_a_person_writes_it_and_absence_is_no_answer(cell, text):
    assert answer_text(cell) == text


@pytest.mark.parametrize("kind", [pa.float64(), pa.float32(), pa.float16(), pa.decimal128(9, 3)])
def test_a_column_of_numbers_is_read_alike_whatever_its_type(tmp_path, kind):
    cells = [72, 0.5, None, 100, 2.25, -3]
    values = [cell if cell is None or pa.types.is_floating(kind) else decimal.Decimal(str(cell)) for cell in cells]
    if pa.types.is_float16(kind):
        values = pa.array(values, pa.float32()).cast(kind)
    task = built(parquet(tmp_path, {"prompt": ASKED, "answer": pa.array(values, kind)}))

    assert [prompt.answer for prompt in prompts(task)] == ["72", "0.5", "100", "2.25", "-3"]


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32()])
def test_a_short_float_has_no_digits_of_a_long_one(tmp_path, kind):
    answers = pa.array([0.1, 0.7, 1.3, 2, 3, 4], pa.float32()).cast(kind)
    task = table_task({"prompt": ASKED, "answer": answers})

    assert [prompt.answer for prompt in prompts(task)] == ["0.1", "0.7", "1.3", "2", "3", "4"]


@pytest.mark.parametrize(
    "answers",
    [
        ["1", "", "3", " \n", None, "6"],
        [1.0, math.nan, 3.0, math.inf, None, 6.0],
        [1, None, 3, None, None, 6],
        [["1"], [], ["3"], [None], None, ["", "6"]],
        [
            {"a": "1", "b": [1]},
            {"a": "", "b": []},
            {"a": "3", "b": None},
            {"a": " ", "b": [None]},
            None,
            {"a": None, "b": [6]},
        ],
    ],
)
def test_rows_of_a_table_without_an_answer_are_left_out_and_counted(tmp_path, caplog, answers):
    with caplog.at_level(logging.WARNING):
        task = built(parquet(tmp_path, {"prompt": ASKED, "answer": answers}))

    assert [prompt.answer for prompt in prompts(task)] == [answer_text(answers[row]) for row in (0, 2, 5)]
    assert "3 rows without a prompt or an answer are left out, the first is row 1" in caplog.text


@pytest.mark.parametrize("absent", [None, "", " \t", math.nan, math.inf, [], [None], {"value": ""}])
def test_a_line_without_an_answer_is_refused(tmp_path, absent):
    rows = [{"prompt": asked, "answer": absent if asked == "q3" else "1"} for asked in ASKED]

    with pytest.raises(ConfigError, match=r"rows.jsonl, line 4: answer is null, blank or no finite number \("):
        built(jsonl(tmp_path, rows))


def test_a_prompt_of_blanks_is_none(tmp_path):
    asked = ["a", " \n", "b", "", "c"]
    task = built(parquet(tmp_path, {"prompt": asked, "answer": ["1"] * 5}))
    assert [prompt.text for prompt in prompts(task)] == ["a", "b", "c"]

    with pytest.raises(ConfigError, match="line 2: prompt is empty"):
        built(jsonl(tmp_path, [{"prompt": text, "answer": "1"} for text in asked]))

    said = [[{"role": "user", "content": text}] for text in asked]
    task = built(parquet(tmp_path, {"messages": said, "answer": ["1"] * 5}))
    assert [prompt.text for prompt in prompts(task)] == ["a", "b", "c"]


@pytest.mark.parametrize("name", ["messages", "prompt"])
def test_a_list_of_messages_is_a_prompt_by_itself(tmp_path, name):
    rows = [{name: [{"role": "user", "content": asked}], "answer": "1"} for asked in ASKED]

    for task in (built(jsonl(tmp_path, rows)), built(parquet(tmp_path, pa.Table.from_pylist(rows).to_pydict()))):
        assert [prompt.text for prompt in prompts(task)] == ASKED
        assert all(prompt.messages[0].role == "user" for prompt in prompts(task))


def test_a_column_prompt_comes_before_a_column_messages(tmp_path):
    rows = [{"prompt": asked, "messages": [{"role": "user", "content": "x"}], "answer": "1"} for asked in ASKED]

    task = built(jsonl(tmp_path, rows))
    assert [prompt.text for prompt in prompts(task)] == ASKED
    assert prompts(task)[0].columns["messages"] == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": "a", "answer": "1"}], "line 1: has no prompt; its columns are: question, answer"),
        ([["prompt", "answer"]], "line 1 is JSON, but no object"),
        ([{"prompt": "a", "answer": "1"}, {"prompt": "b"}], "line 2: has no answer"),
        ([{"prompt": {"a": 1}, "answer": "1"}], "line 1: prompt is neither text nor a list of messages"),
    ],
)
def test_what_is_missing_is_named_without_words_of_python(tmp_path, rows, message):
    with pytest.raises(ConfigError, match=message):
        built(jsonl(tmp_path, rows))


LENGTH = {"rewards": [{"kind": "http", "name": "length", "url": "http://127.0.0.1:9/"}]}


def test_rows_need_an_answer_only_where_the_reward_does(tmp_path):
    name = jsonl(tmp_path, [{"prompt": asked} for asked in ASKED])
    table = parquet(tmp_path, {"prompt": ASKED})

    for each in (name, table):
        assert [prompt.answer for prompt in prompts(built(each, **LENGTH))] == [""] * 6
        with pytest.raises(ConfigError, match="no (column )?answer"):
            built(each)
        with pytest.raises(ConfigError, match="no (column )?solution"):
            built(each, data={"answer": "solution"}, **LENGTH)
        with pytest.raises(ConfigError, match="task.data.answer: is empty, but the reward compares"):
            built(each, data={"answer": ""})
    judge = {"kind": "judge", "name": "j", "url": "http://127.0.0.1:9/", "model": "m"}
    assert built(name, rewards=[{**judge, "rubric": "{completion}"}]).num_prompts == 5
    with pytest.raises(ConfigError, match="line 1: has no answer"):
        built(name, rewards=[{**judge, "rubric": "{completion} {answer}"}])


def test_a_set_with_gaps_among_its_answers_can_be_read_without_them(tmp_path):
    rows = [{"prompt": asked, "answer": None if asked == "q2" else 1} for asked in ASKED]
    name = jsonl(tmp_path, rows)

    with pytest.raises(ConfigError, match=r'line 3: answer is null.*task.data.answer = "" reads no answers at all'):
        built(name, **LENGTH)
    assert {prompt.answer for prompt in prompts(built(name, data={"answer": ""}, **LENGTH))} == {""}


def test_the_other_columns_of_a_row_go_with_its_prompt_and_into_the_digest(tmp_path):
    rows = [{"prompt": asked, "answer": 1.0, "level": number, "tags": ["a"]} for number, asked in enumerate(ASKED)]

    task = built(jsonl(tmp_path, rows))
    table = built(parquet(tmp_path, pa.Table.from_pylist(rows).to_pydict()))
    for each in (task, table):
        assert dict(prompts(each)[2].columns) == {"answer": 1.0, "level": 2, "tags": ["a"]}
        assert "prompt" not in prompts(each)[2].columns
    rows[0]["level"] = 7
    assert built(jsonl(tmp_path, rows)).digest != task.digest


def refusing(some):
    """Counts letters, and refuses prompts with a question mark, as a template may."""
    return [None if "?" in prompt.text else len(prompt.text) for prompt in some]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_long_prompts_of_every_source_are_left_out_and_counted(tmp_path, caplog, kind):
    asked = ["a", "bb", "ccc", "d?", "eeeeee", "fffffff"]
    rows = [{"prompt": text, "answer": "1"} for text in asked]
    name = jsonl(tmp_path, rows) if kind == "jsonl" else parquet(tmp_path, {"prompt": asked, "answer": ["1"] * 6})

    with caplog.at_level(logging.WARNING):
        task = built(name, data={"max_prompt_tokens": 3}, measure=refusing)
    assert [prompt.text for prompt in prompts(task)] == ["a", "bb", "ccc"]
    assert "2 of 6 prompts have more than 3 tokens and are left out" in caplog.text
    assert "the template refuses 1 of 6 prompts" in caplog.text
    with pytest.raises(ConfigError, match="task.data.max_prompt_tokens: counts tokens, and no tokenizer is here"):
        built(name, data={"max_prompt_tokens": 3})
    with pytest.raises(ConfigError, match="no prompt .*is left"):
        built(name, data={"max_prompt_tokens": 1}, measure=lambda some: [9 for _ in some])


def test_bools_are_answers_of_tables_and_lines(tmp_path):
    answers = [number % 2 == 0 for number in range(6)]
    rows = [{"prompt": asked, "answer": answer} for asked, answer in zip(ASKED, answers, strict=True)]

    for task in (built(jsonl(tmp_path, rows)), built(parquet(tmp_path, {"prompt": ASKED, "answer": answers}))):
        assert [prompt.answer for prompt in prompts(task)] == ["True", "False"] * 3


@pytest.mark.parametrize("name", ["answer", "unused"])
def test_two_columns_of_one_name_are_refused_by_it(name):
    table = pa.Table.from_arrays([pa.array(ASKED)] * 4, names=["prompt", "answer", name, name][:4])

    with pytest.raises(ConfigError, match=f"there are [23] columns {name} .rename"):
        table_task(table)


def said_in(kind, length=-1):
    """Messages whose texts are of one type, in lists of one length."""
    fields = pa.struct([("role", kind), ("content", kind)])
    return pa.array([[{"role": "user", "content": asked}] for asked in ASKED], pa.list_(fields, length))


@pytest.mark.parametrize(
    "column", [pa.array(ASKED, pa.string_view()), said_in(pa.string(), 1), said_in(pa.string_view())]
)
def test_prompts_are_read_from_each_form_of_texts_and_lists(column):
    answers = pa.array(["1"] * 6, pa.string_view())

    assert [prompt.text for prompt in prompts(table_task({"prompt": column, "answer": answers}))] == ASKED


def test_decimals_have_bounds():
    price = pa.array([decimal.Decimal(number) / 2 for number in range(6)], pa.decimal128(9, 2))
    task = table_task({"prompt": ASKED, "answer": ASKED, "price": price}, at_least={"price": 1.5})

    assert [prompt.text for prompt in prompts(task)] == ASKED[3:]


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        ({"ok": True}, (0, 2, 4)), ({"level": 3}, (3,)), ({"level": [3.0, 2.5, 1e30]}, (3,)), ({"share": [0.5, 1]}, (1, 2)),
        ({"kind": "2"}, (2,)), ({"ok": 1}, "ok .*is .*, and 1 is a number"), ({"ok": [True, 0]}, "and 0 is a number"),
        ({"level": ["3", "4"]}, "level .*is .*, and '3' is text"), ({"level": True}, "and True is a bool"),
        ({"kind": 2}, "kind .*is .*, and 2 is a number"), ({"kind": [False]}, "and False is a bool"),
    ],
)  # fmt: skip
def test_where_keeps_the_same_rows_of_tables_and_of_lines(tmp_path, where, rows):
    cells = [
        {
            "prompt": asked,
            "answer": asked,
            "ok": number % 2 == 0,
            "level": number,
            "share": number / 2,
            "kind": str(number),
        }
        for number, asked in enumerate(ASKED)
    ]
    # Held out by another file, so that one row is enough.
    held_out = tmp_path / "held"
    held_out.mkdir()
    other = [{**cell, "prompt": f"other {cell['prompt']}"} for cell in cells]
    table = pa.Table.from_pylist
    names = {
        jsonl(tmp_path, cells): jsonl(held_out, other),
        parquet(tmp_path, table(cells).to_pydict()): parquet(held_out, table(other).to_pydict()),
    }
    for name, evaluation in names.items():
        task = {"name": name, "data": {"where": where}, "evaluation_path": evaluation.partition(":")[2]}
        if isinstance(rows, str):
            with pytest.raises(ConfigError, match=f"task.data.where.{next(iter(where))}: .*{rows}"):
                built(**task)
        else:
            kept = built(**task)
            assert [kept.prompt(index).text for index in range(kept.num_prompts)] == [ASKED[row] for row in rows]


def test_a_cell_below_null_is_null_in_tables_and_lines(tmp_path):
    rows = [{"prompt": asked, "answer": "1", "about": {"level": 3}} for asked in ASKED]
    rows[4]["about"] = None

    for name in (jsonl(tmp_path, rows), parquet(tmp_path, pa.Table.from_pylist(rows).to_pydict())):
        task = built(name, data={"where": {"about.level": 3}})
        assert [prompt.text for prompt in prompts(task)] == [*ASKED[:4], ASKED[5]]


def test_dates_decimals_and_short_floats_are_chosen_by_their_texts():
    days = pa.array([datetime.date(2024, 1, number + 1) for number in range(6)])
    price = pa.array([decimal.Decimal(number) / 10 for number in range(6)], pa.decimal128(9, 2))
    share = pa.array([number / 10 for number in range(6)], pa.float32())
    table = {"prompt": ASKED, "answer": ASKED, "day": days, "price": price, "share": share}

    for where, row in (({"day": "2024-01-03"}, 2), ({"price": 0.3}, 3), ({"share": 0.3}, 3)):
        (name,) = where
        task = table_task(table, where={name: [where[name], *({"day": ["2024-01-01"]}.get(name, [0.0]))]})
        assert [prompt.text for prompt in prompts(task)] == [ASKED[0], ASKED[row]]


def test_an_answer_of_bytes_is_refused():
    with pytest.raises(ConfigError, match="task.data.answer: row 0: answer is bytes, no answer"):
        table_task({"prompt": ASKED, "answer": pa.array([b"1"] * 6)})


def test_rows_that_mix_answers_and_none_are_refused(tmp_path):
    rows = [{"prompt": asked, **({"answer": 1} if asked == "q3" else {})} for asked in ASKED]

    with pytest.raises(ConfigError, match="line 4: there is answer, but rows before have none"):
        built(jsonl(tmp_path, rows), **LENGTH)
    with pytest.raises(ConfigError, match="line 2: has no answer; its columns are: prompt"):
        built(jsonl(tmp_path, rows[3:] + rows[:3]), **LENGTH)


def test_a_table_is_converted_in_batches_of_the_columns_that_are_read(monkeypatch):
    converted = []
    convert = arrow_rows._Columns.__missing__

    def noted(columns, name):
        cells = convert(columns, name)
        converted.append((name, len(cells)))
        return cells

    monkeypatch.setattr(arrow_rows._Columns, "__missing__", noted)
    asked = [f"q{number}" for number in range(1000)]
    task = table_task(
        {"prompt": asked, "answer": asked, "level": list(range(1000)), "unused": asked}, at_least={"level": 7.0}
    )

    assert task.num_prompts + task.num_evaluation_prompts == 993
    assert {name for name, _ in converted} == {"prompt", "answer", "level"}
    assert max(count for _, count in converted) <= 256


@pytest.mark.parametrize(
    "column",
    [
        pa.array([0.1], pa.float32()).dictionary_encode(),
        pa.array([{"d": 0.1}], pa.struct([("d", pa.float32())])),
        pa.array([[0.1, None]], pa.list_(pa.float32())),
    ],
)
def test_short_floats_inside_a_cell_have_their_own_digits(column):
    ((_, row),) = ArrowRows(pa.table({"r": column}), "digest")

    assert row["r"] in (0.1, {"d": 0.1}, [0.1, None])


@pytest.mark.parametrize("wanted", ["2020-01-01", "2020-01-01T00:00:00", "2020-01-01 00:00:00"])
def test_a_filter_takes_an_instant_in_each_iso_form(tmp_path, wanted):
    days = pa.array([f"2020-01-0{1 + number // 3}" for number in range(6)]).cast(pa.timestamp("us"))

    task = built(parquet(tmp_path, {"prompt": ASKED, "answer": ASKED, "day": days}), data={"where": {"day": wanted}})

    assert task.num_prompts + task.num_evaluation_prompts == 3


def test_a_filter_of_bytes_is_refused_by_its_key(tmp_path):
    name = parquet(tmp_path, {"prompt": ASKED, "answer": ASKED, "raw": [b"x"] * 6})

    with pytest.raises(ConfigError, match=r"^task\.data\.where\.raw: row 0: raw is bytes"):
        built(name, data={"where": {"raw": "x"}})
