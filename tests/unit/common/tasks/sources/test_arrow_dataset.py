"""Data sets: which rows are prompts, what is held out, what the digest pins, and which errors name which key."""

import builtins
import itertools
import json
import logging
import os
import subprocess
import sys

import httpx2
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, Features, Value
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled, RepositoryNotFoundError

from heterorl.common.errors import ConfigError, DependencyMissing
from heterorl.common.tasks.task import Message
from heterorl.common.tasks.task_config import TaskConfig, build_task

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


class Place:
    """A directory with sets in it, and the cache that Arrow files go to."""

    def __init__(self, path):
        self.path = path

    def write(self, name, rows):
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), path)
        return path

    def build(self, name, *, measure=None, **changes):
        data = {"cache_dir": str(self.path / "cache"), **changes.pop("data", {})}
        return build_task(TaskConfig(name=name, data=data, **changes), measure=measure)


def sums(numbers):
    return [{"prompt": f"{number}+1=", "answer": number + 1, "level": number % 3} for number in numbers]


def texts(task):
    return (
        [task.prompt(index).text for index in range(task.num_prompts)],
        [task.evaluation_prompt(index).text for index in range(task.num_evaluation_prompts)],
    )


def test_directory_parquet_and_saved_set_hold_the_same_prompts(place):
    place.write("set/data/train-00000-of-00001.parquet", sums(range(10)))
    Dataset.from_list(sums(range(10))).save_to_disk(str(place.path / "saved"))

    found = [
        texts(place.build(name, evaluation_size=3))
        for name in (
            f"hf:{place.path}/set[train]", f"parquet:{place.path}/set/data/*.parquet", f"hf:{place.path}/saved",
        )
    ]  # fmt: skip

    assert found[0] == found[1] == found[2]
    assert (len(found[0][0]), len(found[0][1])) == (7, 3)
    assert {*found[0][0], *found[0][1]} == {f"{number}+1=" for number in range(10)}


def test_an_answer_that_is_a_class_is_its_name(place):
    """As the sets of multiple choice on the hub have it; -1 is a row without a class."""
    rows = {"prompt": list("abcdef"), "answer": [0, 3, -1, 1, 2, 0]}
    features = Features({"prompt": Value("string"), "answer": ClassLabel(names=["A", "B", "C", "D"])})
    classes = Dataset.from_dict(rows, features=features)
    classes.save_to_disk(str(place.path / "saved"))
    (place.path / "set").mkdir()
    classes.to_parquet(str(place.path / "set" / "train.parquet"))

    for name in ("hf:{}/saved", "hf:{}/set[train]", "parquet:{}/set/*.parquet"):
        task = place.build(name.format(place.path), evaluation_size=1, data={"where": {"answer": ["A", "B", "D"]}})
        prompts = [*map(task.prompt, range(task.num_prompts)), task.evaluation_prompt(0)]
        assert {prompt.text: prompt.answer for prompt in prompts} == {"a": "A", "b": "D", "d": "B", "f": "A"}


def test_prompts_and_answers_of_csv_are_text_as_written(place):
    (place.path / "set").mkdir()
    (place.path / "set" / "train.csv").write_text("prompt,answer,level\na,007,1\nb,NA,2\nc,,2\n05,1.50,2\n")

    task = place.build(f"hf:{place.path}/set[train]", evaluation_size=1, data={"at_most": {"level": 2}})

    prompts = [*map(task.prompt, range(task.num_prompts)), task.evaluation_prompt(0)]
    assert {prompt.text: prompt.answer for prompt in prompts} == {"a": "007", "b": "NA", "05": "1.50"}


def test_a_saved_set_is_read_without_a_trace_and_without_traces_of_others(place):
    saved = place.path / "saved"
    Dataset.from_list(sums(range(10))).select([7, 3, 5, 1]).save_to_disk(str(saved))
    files = sorted(saved.iterdir())

    first = place.build(f"hf:{saved}", evaluation_size=1)

    assert sorted(saved.iterdir()) == files
    # What another program's map() leaves beside the data.
    (saved / "cache-0123456789abcdef.arrow").write_bytes(b"anything")
    assert place.build(f"hf:{saved}", evaluation_size=1).digest == first.digest
    assert sorted(itertools.chain(*texts(first))) == ["1+1=", "3+1=", "5+1=", "7+1="]


def test_a_saved_set_with_a_file_of_indices_is_refused(place):
    saved = place.path / "saved"
    Dataset.from_list(sums(range(10))).save_to_disk(str(saved))
    state = json.loads((saved / "state.json").read_text())
    (saved / "state.json").write_text(json.dumps({**state, "_indices_data_files": [{"filename": "indices.arrow"}]}))

    with pytest.raises(ConfigError, match="keeps its choice of rows in a file of indices"):
        place.build(f"hf:{saved}")


def test_answers_are_compared_as_text(place):
    place.write("rows.parquet", sums(range(10)))
    task = place.build(f"parquet:{place.path}/rows.parquet", evaluation_size=1)
    prompt = task.prompt(0)

    assert task.score(prompt, f" {prompt.answer} ")[0].value == 1.0
    assert task.score(prompt, prompt.answer + "0")[0].value == 0.0


def test_a_held_out_split_is_not_trained_on_though_the_set_repeats_it(place, caplog):
    place.write("set/data/train-00000-of-00001.parquet", sums(range(10)))
    place.write("set/data/test-00000-of-00001.parquet", sums([3, 20]))

    with caplog.at_level(logging.WARNING):
        training, held_out = texts(place.build(f"hf:{place.path}/set[train]", data={"evaluation_split": "test"}))

    assert held_out == ["3+1=", "20+1="]
    assert training == [f"{number}+1=" for number in range(10) if number != 3]
    assert "1 prompts are also held out" in caplog.text


def test_a_piece_of_a_split_is_a_split(place):
    place.write("set/train.parquet", sums(range(10)))

    task = place.build(f"hf:{place.path}/set[train[:40%]]", evaluation_size=1)

    assert task.num_prompts + task.num_evaluation_prompts == 4


def test_filters_keep_rows_by_value_and_by_bounds(place):
    place.write("rows.parquet", sums(range(12)))
    name = f"parquet:{place.path}/rows.parquet"

    def kept(**data):
        return sorted(itertools.chain(*texts(place.build(name, evaluation_size=1, data=data))))

    # levels are 0 1 2 0 1 2 ...
    assert kept(where={"level": 2}) == sorted(f"{number}+1=" for number in (2, 5, 8, 11))
    assert kept(where={"level": [0, 2]}) == sorted(f"{number}+1=" for number in range(12) if number % 3 != 1)
    assert kept(at_least={"answer": 9}, at_most={"answer": 11}) == sorted(["8+1=", "9+1=", "10+1="])


def test_bounds_hold_for_integers_beyond_2_to_the_53(place):
    # As times in nanoseconds.
    place.write(
        "rows.parquet", [{**row, "at": (1 << 60) + 1001 * number} for number, row in enumerate(sums(range(12)))]
    )
    data = {"at_least": {"at": float((1 << 60) + 9000)}}
    task = place.build(f"parquet:{place.path}/rows.parquet", evaluation_size=1, data=data)

    assert sorted(itertools.chain(*texts(task))) == sorted(f"{number}+1=" for number in (9, 10, 11))


def test_rows_without_a_prompt_or_an_answer_are_left_out_and_counted(place, caplog):
    place.write("rows.parquet", [
        *sums(range(4)), {"prompt": "", "answer": 1, "level": 0}, {"prompt": None, "answer": 1, "level": 0},
        {"prompt": "9+1=", "answer": None, "level": 0},
    ])  # fmt: skip

    with caplog.at_level(logging.WARNING):
        task = place.build(f"parquet:{place.path}/rows.parquet", evaluation_size=1)

    assert task.num_prompts + task.num_evaluation_prompts == 4
    assert (
        "3 rows without a prompt or an answer are left out, the first is row 4; 2 times: prompt is empty" in caplog.text
    )


def test_a_cell_that_python_cannot_read_leaves_out_its_row_alone(place, caplog):
    prompts = pa.array([b"0+1=", b"\xff\xfe", b"2+1=", b"3+1="]).view(pa.string())
    times = pa.array([0, 0, 1 << 60, 0], pa.timestamp("ms"))
    pq.write_table(pa.table({"prompt": prompts, "answer": [1, 2, 3, 4], "at": times}), place.path / "rows.parquet")

    with caplog.at_level(logging.WARNING):
        task = place.build(f"parquet:{place.path}/rows.parquet", evaluation_size=1)

    assert sorted(itertools.chain(*texts(task))) == ["0+1=", "2+1=", "3+1="]
    assert "1 rows without a prompt or an answer are left out, the first is row 1" in caplog.text
    rows = [task.prompt(0), task.prompt(1), task.evaluation_prompt(0)]
    assert {row.text: row.columns["at"] is None for row in rows} == {"0+1=": False, "2+1=": True, "3+1=": False}


CONVERSATIONS = [
    {"messages": [{"role": "system", "content": "Add."}, {"role": "user", "content": f"{number}+1="}], "answer": number}
    for number in range(6)
]
BAD = [
    {"messages": [], "answer": 1},
    {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}], "answer": 1},
    {"messages": [{"role": "judge", "content": "1"}, {"role": "user", "content": "2"}], "answer": 1},
    {"messages": [{"role": "user", "content": None}, {"role": "user", "content": "2"}], "answer": 1},
]


def test_message_lists_are_prompts_and_bad_ones_are_left_out(place, caplog):
    # Bad ones in the middle: each row is judged by its own messages.
    place.write("rows.parquet", [*CONVERSATIONS[:3], *BAD, *CONVERSATIONS[3:]])

    with caplog.at_level(logging.WARNING):
        task = place.build(f"parquet:{place.path}/rows.parquet", evaluation_size=1, data={"messages": "messages"})

    prompts = [task.prompt(index) for index in range(task.num_prompts)] + [task.evaluation_prompt(0)]
    assert sorted(prompt.text for prompt in prompts) == [f"{number}+1=" for number in range(6)]
    assert all(prompt.messages[0] == Message(role="system", content="Add.") for prompt in prompts)
    assert all(prompt.messages[-1].content == prompt.text for prompt in prompts)
    assert "4 rows" in caplog.text


@pytest.mark.parametrize(
    ("messages", "flaw"),
    [
        ([("user", "1"), ("assistant", "2")], "the last message is not the user's"),
        ([("judge", "1"), ("user", "2")], "a message has another role than "),
        ([("user", None), ("user", "2")], "a message has no text as content"),
        ([], "there are no messages"),
    ],
)
def test_the_commonest_flaw_of_rows_that_are_left_out_is_named(place, caplog, messages, flaw):
    said = [{"role": role, "content": content} for role, content in messages]
    asked = [{"role": "user", "content": "1"}]
    bad = [{"messages": said, "answer": "1"}] * 3 + [{"messages": asked, "answer": ""}]
    good = [{"messages": [{**asked[0], "content": str(number)}], "answer": "1"} for number in range(2)]
    place.write("bad.parquet", bad)
    place.write("mixed.parquet", [*bad, *good])

    with caplog.at_level(logging.WARNING):
        place.build(f"parquet:{place.path}/mixed.parquet")
    assert f"4 rows without a prompt or an answer are left out, the first is row 0; 3 times: {flaw}" in caplog.text
    if said:
        with pytest.raises(ConfigError, match=f"no prompt is left of 4 rows; 3 times: {flaw}"):
            place.build(f"parquet:{place.path}/bad.parquet")


def test_jsonl_takes_message_lists_and_names_the_line_of_a_bad_one(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, CONVERSATIONS)))
    config = TaskConfig(name=f"jsonl:{path}", evaluation_size=1, data={"messages": "messages"})
    task = build_task(config)

    assert task.prompt(0).messages[0] == Message(role="system", content="Add.")
    for bad in BAD:
        path.write_text("\n".join(map(json.dumps, [*CONVERSATIONS, bad])))
        with pytest.raises(ConfigError, match=r"task.name: .*line 7: "):
            build_task(config)


def test_messages_with_tool_calls_are_no_prompts(place, tmp_path):
    """They were left out of the prompt, which then showed the model an empty turn and a result of no call."""
    call = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
    asked, result = {"role": "user", "content": "2+1="}, {"role": "tool", "content": "3"}
    rows = [
        {"messages": [asked, {"role": "assistant", "content": "", "tool_calls": [call]}, result, asked], "answer": "3"},
        *({"messages": [{"role": "user", "content": f"{n}?", "tool_calls": []}], "answer": str(n)} for n in range(4)),
    ]
    place.write("chats.parquet", rows)
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[1:]))

    found = texts(place.build(f"parquet:{place.path}/chats.parquet"))
    assert sorted(itertools.chain(*found)) == ["0?", "1?", "2?", "3?"]
    assert sorted(itertools.chain(*texts(place.build(f"jsonl:{path}")))) == ["0?", "1?", "2?", "3?"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match="line 1: a message has tool_calls"):
        place.build(f"jsonl:{path}")


def test_columns_by_name_in_jsonl(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"q{number}", "solution": number}) for number in range(4)))

    task = build_task(
        TaskConfig(name=f"jsonl:{path}", evaluation_size=1, data={"prompt": "question", "answer": "solution"})
    )

    assert task.prompt(0).text == f"q{task.prompt(0).answer}"


def test_prompts_longer_than_the_bound_are_left_out(place):
    place.write("rows.parquet", [{"prompt": "x" * number, "answer": 1} for number in range(1, 9)])
    name = f"parquet:{place.path}/rows.parquet"

    def measure(prompts):
        return [len(prompt.text) for prompt in prompts]

    task = place.build(name, measure=measure, evaluation_size=1, data={"max_prompt_tokens": 5})

    assert sorted(map(len, itertools.chain(*texts(task)))) == [1, 2, 3, 4, 5]
    with pytest.raises(ConfigError, match="task.data.max_prompt_tokens"):
        place.build(name, data={"max_prompt_tokens": 5})


def test_the_system_prompt_counts_in_the_bound_of_a_prompt(place, tmp_path):
    rows = [{"prompt": "x" * number, "answer": 1} for number in range(1, 9)]
    place.write("rows.parquet", rows)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def measure(prompts):
        return [sum(len(each.content) for each in prompt.messages) or len(prompt.text) for prompt in prompts]

    for name in (f"parquet:{place.path}/rows.parquet", f"jsonl:{path}"):
        task = place.build(name, measure=measure, system_prompt="Add", data={"max_prompt_tokens": 5})
        assert sorted(map(len, itertools.chain(*texts(task)))) == [1, 2]


def test_digest_is_of_content_and_not_of_places(place):
    place.write("a/train.parquet", sums(range(10)))
    place.write("b/c/train.parquet", sums(range(10)))
    place.write("other/train.parquet", sums([*range(9), 99]))

    def digest(name, **changes):
        return place.build(f"hf:{place.path}/{name}", evaluation_size=2, **changes).digest

    first = digest("a")
    assert first == digest("b/c")
    assert len({first, digest("other"), digest("a", data={"where": {"level": [0, 1]}}), digest("a", match="math_verify"),
                digest("a", data={"answer": "level"})}) == 5  # fmt: skip


def test_a_pattern_finds_each_file_whatever_its_name_and_depth(place):
    names = ["top.parquet", "a/part[1].parquet", "a/part1.parquet", "a/b/q?*.parquet"]
    for number, name in enumerate(names):
        place.write(f"set/{name}", sums([2 * number, 2 * number + 1]))

    found = texts(place.build(f"parquet:{place.path}/set/**/*.parquet"))

    assert sorted(itertools.chain(*found)) == [f"{number}+1=" for number in range(8)]


def test_another_content_under_the_same_path_and_time_is_read(place):
    rows = {}
    for first in (0, 10):
        os.utime(place.write("set/train.parquet", sums(range(first, first + 4))), (0, 0))
        rows[first] = [texts(place.build(f"{kind}", evaluation_size=1)) for kind in (
            f"parquet:{place.path}/set/train.parquet", f"hf:{place.path}/set",
        )]  # fmt: skip

    for first, found in rows.items():
        assert sorted(itertools.chain(*found[0])) == [f"{number}+1=" for number in range(first, first + 4)]
        assert found[0] == found[1]


def test_messages_written_as_text_are_refused_also_where_the_column_is_found_by_itself(place, tmp_path):
    rows = [{"messages": json.dumps([{"role": "user", "content": f"{n}+1="}]), "answer": str(n + 1)} for n in range(3)]
    place.write("rows.parquet", rows)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    with pytest.raises(ConfigError, match="task.data.messages: row 0: messages is no list of messages"):
        place.build(f"parquet:{place.path}/rows.parquet")
    with pytest.raises(ConfigError, match="line 1: "):
        place.build(f"jsonl:{path}")


@pytest.mark.parametrize(("name", "data", "key"), [
    ("hf:acme/sums", {}, "task.name: hf:acme/sums names no commit"),
    ("hf:acme/sums@main[test]", {}, "task.name: hf:acme/sums@main[test] names no commit"),
    ("hf:acme/sums@main@x", {}, "task.name"),
    ("hf:/nowhere/at/all", {}, "task.name: /nowhere/at/all is not a directory"),
    ("hf:{set}[nope]", {}, "task.name: cannot read split nope"),
    ("hf:{set}", {"evaluation_split": "nope"}, "task.data.evaluation_split"),
    ("hf:{set}", {"subset": "nope"}, "task.name"),
    ("hf:{set}", {"prompt": "question"}, "task.data.prompt: row 0: has no question; its columns are: prompt, answer"),
    ("hf:{set}", {"prompt": "level"}, "task.data.prompt: row 0: level is neither text nor a list of messages"),
    ("hf:{set}", {"messages": "prompt"}, "task.data.messages: row 0: prompt is no list of messages"),
    ("hf:{set}", {"where": {"kind": 1}}, "task.data.where.kind"),
    ("hf:{set}", {"where": {"level": "easy"}}, "task.data.where.level"),
    ("hf:{set}", {"at_least": {"prompt": 1}}, "task.data.at_least.prompt"),
    ("hf:{set}", {"where": {"level": 7}}, "task.name: no prompt is left of 10 rows"),
    ("parquet:{set}/no.parquet", {}, "task.name: there is no file"),
    ("parquet:{set}/text.parquet", {}, "task.name"),
    ("parquet:{set}/train.parquet", {"evaluation_split": "test"}, "task.data.evaluation_split: files have no splits"),
])  # fmt: skip
def test_errors_name_the_key(place, name, data, key):
    place.write("set/train.parquet", sums(range(10)))
    (place.path / "set" / "text.parquet").write_text("no parquet")
    if not name.startswith("parquet:"):
        (place.path / "set" / "text.parquet").unlink()

    with pytest.raises(ConfigError) as caught:
        place.build(name.replace("{set}", str(place.path / "set")), data=data)

    assert str(caught.value).startswith(key)


def test_parquet_files_that_do_not_fit_are_named(place):
    place.write("a.parquet", sums(range(4)))
    place.write("c.parquet", [{**row, "more": 1} for row in sums(range(4, 8))])
    place.write("types.parquet", [{**row, "answer": "x"} for row in sums(range(4, 8))])
    empty = pa.table({"prompt": pa.array([], pa.string()), "answer": pa.array([], pa.int64())})
    pq.write_table(empty, place.path / "empty.parquet")
    place.write("nulls.parquet", [{**row, "answer": None} for row in sums(range(4, 8))])
    directory = f"parquet:{place.path}"

    with pytest.raises(ConfigError, match=r"answer is null in each row of .*nulls.parquet, .* unlike .*types.parquet"):
        place.build(f"{directory}/[nt]*.parquet")
    with pytest.raises(ConfigError, match=r"c.parquet and .*a.parquet have not the same columns: .* has more"):
        place.build(f"{directory}/[ac].parquet")
    with pytest.raises(ConfigError, match=r"empty.parquet has no rows"):
        place.build(f"{directory}/empty.parquet")
    with pytest.raises(ConfigError, match=f"cannot read {place.path} as Parquet"):
        place.build(directory)
    pq.write_table(
        pa.table({"prompt": ["x"], "at": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64()))}),
        place.path / "map.parquet",
    )
    with pytest.raises(ConfigError, match=r"map<string, int64.*leave that column out"):
        place.build(f"{directory}/map.parquet")
    # The library's words are kept over its lines.
    with pytest.raises(ConfigError, match="cannot read split train of parquet: .*x"):
        place.build(f"{directory}/[at]*.parquet")
    assert sorted(itertools.chain(*texts(place.build(f"{directory}/[ae]*.parquet")))) == [f"{n}+1=" for n in range(4)]


def test_without_the_library_its_extra_is_named(place, monkeypatch):
    place.write("rows.parquet", sums(range(4)))
    real = builtins.__import__

    def without(name, *rest, **more):
        if name == "datasets":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    said = r"datasets is not installed \(in a clone of heterorl: pip install '\.\[data\]'\)"
    with pytest.raises(DependencyMissing, match=said):
        place.build(f"parquet:{place.path}/rows.parquet")


HUB = """
import json, sys
from heterorl.common.tasks.task_config import TaskConfig, build_task
task = build_task(TaskConfig(name=sys.argv[1], evaluation_size=2, data={"cache_dir": sys.argv[2]}))
print(json.dumps([task.num_prompts, task.digest]))
"""


def read_offline(place, name):
    """Build a task in a process that may not use the network, as a site does whose cache was filled elsewhere."""
    words = [sys.executable, "-P", "-c", HUB, name, str(place.path / "cache")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(words, capture_output=True, text=True, env=environment, check=False)


def refusal(status):
    request = httpx2.Request("GET", "http://hub")
    return RepositoryNotFoundError("refused", response=httpx2.Response(status, request=request))


@pytest.mark.parametrize(
    ("cause", "exit_code"),
    [
        (httpx2.ConnectError("nothing listens"), 1),
        (httpx2.ProxyError("no way"), 1),
        (refusal(503), 1),
        (refusal(404), 2),
        (OfflineModeIsEnabled("switched off"), 2),
        (PermissionError("the cache"), 2),
    ],
    ids=lambda each: f"{type(each).__name__}",
)
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_hub_that_is_away_is_asked_by_the_next_start(place, monkeypatch, cause, exit_code, is_wrapped):
    def snapshot_download(*given, **options):
        if is_wrapped:
            raise LocalEntryNotFoundError("nothing is cached") from cause
        raise cause

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(ConfigError, match="^task.name: cannot get acme/none at .* from the hub: .*correct") as caught:
        place.build(f"hf:acme/none@{COMMIT}")

    assert caught.value.exit_code == exit_code


@pytest.mark.process
@pytest.mark.slow
def test_a_commit_is_read_from_the_cache_without_a_network(place):
    place.write(f"cache/hub/datasets--acme--sums/snapshots/{COMMIT}/data/train-0.parquet", sums(range(10)))

    found = read_offline(place, f"hf:acme/sums@{COMMIT}[train]")

    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)[0] == 8
    # A branch is refused by the name of its commit.
    (place.path / "cache/hub/datasets--acme--sums/refs").mkdir()
    (place.path / "cache/hub/datasets--acme--sums/refs/main").write_text(COMMIT)
    for branch in ("", "@main"):
        moving = read_offline(place, f"hf:acme/sums{branch}")
        assert f"(write hf:acme/sums@{COMMIT}[train], its commit today; or a directory)" in moving.stderr
    # What is not in the cache is said, with the key.
    absent = read_offline(place, f"hf:acme/none@{COMMIT}")
    assert "task.name: cannot get acme/none" in absent.stderr
