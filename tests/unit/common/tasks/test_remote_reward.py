"""Rewards over HTTP: values or an error, never a zero for a failure; judges are asked once and at a pace."""

import dataclasses
import hashlib
import json
import sqlite3
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from pydantic import ValidationError

from heterorl.common.errors import ConfigError, RewardError
from heterorl.common.identity.signing import new_key
from heterorl.common.process.config_file import InvalidConfig, load
from heterorl.common.tasks.rewards import http_reward
from heterorl.common.tasks.rewards.http_reward import MAX_REPLY_BYTES, MAX_WORDS
from heterorl.common.tasks.rewards.judge_reward import JudgeStore, filled, question_digest, score_of
from heterorl.common.tasks.rewards.remote_reward import Terms, sign, statement
from heterorl.common.tasks.task import Message
from heterorl.common.tasks.task_config import TaskConfig, build_task
from heterorl.common.text.conversation import try_reward
from heterorl.common.types.rollout import RewardPart
from heterorl.learner.learner_config import LearnerConfig
from heterorl.sampler.prompt_evaluator import naming_set
from tests.support.reward_service import localhost_tls, serving

pytestmark = pytest.mark.process

KEY = "sk-very-secret"


@contextmanager
def task_of(reward, **options):
    task = build_task(
        TaskConfig(digits=1, rewards=[{"name": "style", **reward}], **{"reward_timeout_s": 20, **options})
    )
    try:
        yield task
    finally:
        task.close()


def http(server, **options):
    return {"kind": "http", "url": server.url, **options}


def lengths(document):
    return {"rewards": [len(text) / 10 for text in document["completions"]]}


def test_a_service_is_sent_what_it_judges_and_gives_one_value():
    with serving(lengths) as server, task_of(http(server, weight=0.5)) as task:
        prompt = task.prompt(3)

        assert task.score(prompt, "four") == (RewardPart(name="style", value=0.4, weight=0.5),)

    assert server.asked == [
        {
            "version": 1, "reward": "style", "prompt_index": 3, "prompt": prompt.text,
            "messages": [{"role": "user", "content": prompt.text}], "answer": prompt.answer, "completions": ["four"],
        }
    ]  # fmt: skip
    assert "Authorization" not in server.headers[0]


def test_a_url_alone_is_a_reward():
    with serving(lengths) as server:
        task = build_task(TaskConfig(digits=1, reward=f"{server.url}/score", reward_timeout_s=20))
        assert task.score(task.prompt(0), "12345") == (RewardPart(name="reward", value=0.5),)
        task.close()
    assert server.paths == ["/score"]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_service_of_this_machine_is_asked_through_no_proxy(monkeypatch, host):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "other.example")
    with serving(lengths, host=host) as server, task_of(http(server)) as task:
        assert task.score(task.prompt(0), "four")[0].value == 0.4


def test_a_service_elsewhere_is_asked_through_the_proxy(monkeypatch):
    with serving(lengths) as proxy, task_of({"kind": "http", "url": "http://judge.example"}) as task:
        monkeypatch.setenv("http_proxy", proxy.url)
        assert task.score(task.prompt(0), "four")[0].value == 0.4


def test_a_group_is_one_question_where_the_service_wants_it_so():
    with serving(lengths) as server, task_of(http(server, batch="group")) as task:
        rows = list(task.score_all(task.prompt(0), ["a", "bb", "ccc"]))

    assert [row[0].value for row in rows] == [0.1, 0.2, 0.3]
    assert [document["completions"] for document in server.asked] == [["a", "bb", "ccc"]]


def test_failures_that_pass_are_asked_again_within_the_time_limit():
    replies = [(503, {}, b"busy"), (429, {"Retry-After": "0"}, b"slow down"), None]

    def reply(document):
        failure = replies.pop(0)
        return failure or lengths(document)

    with serving(reply) as server, task_of(http(server)) as task:
        assert task.score(task.prompt(0), "four")[0].value == 0.4
    assert len(server.asked) == 3


@pytest.mark.parametrize("status", http_reward.RETRIED)
def test_each_status_that_passes_is_asked_again_and_the_page_names_it(status):
    replies = [(status, {"Retry-After": "0"}, b"later"), {"rewards": [0.5]}]

    with serving(lambda _: replies.pop(0)) as server:
        assert http_reward.Server(url=server.url).post({}, deadline=time.monotonic() + 20) == {"rewards": [0.5]}
    assert replies == []
    named = ", ".join(map(str, http_reward.RETRIED))
    assert f"| {named}, a failed connection " in (Path(__file__).parents[4] / "docs" / "rewards.md").read_text()


def test_an_answer_that_is_cut_off_is_asked_again():
    replies = [(200, {"Content-Length": "99"}, b'{"rewards": [0.'), {"rewards": [0.5]}]

    with serving(lambda _: replies.pop(0)) as server:
        assert http_reward.Server(url=server.url).post({}, deadline=time.monotonic() + 20) == {"rewards": [0.5]}


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422, 501, 505])
def test_any_other_status_is_an_error_at_once(status):
    with serving(lambda _: (status, {}, b"no")) as server:
        with pytest.raises(http_reward.ServerRefused, match=f"^status {status}: no"):
            http_reward.Server(url=server.url).post({}, deadline=time.monotonic() + 20)
        assert len(server.asked) == 1


@pytest.mark.parametrize("wait", ["-5", "nan", "Wed, 21 Oct 2015 07:28:00 GMT"])
def test_a_wait_that_is_no_number_of_seconds_is_not_waited_for(wait):
    replies = [(503, {"Retry-After": wait}, b"busy"), None]

    with serving(lambda document: replies.pop(0) or lengths(document)) as server, task_of(http(server)) as task:
        assert task.score(task.prompt(0), "four")[0].value == 0.4
    assert len(server.asked) == 2


@pytest.mark.parametrize("wait", ["30", "inf"])
def test_a_wait_beyond_the_time_limit_is_the_end(wait):
    with serving(lambda _: (503, {"Retry-After": wait}, b"busy")) as server, task_of(http(server)) as task:
        with pytest.raises(RewardError, match="status 503: busy; no time is left"):
            task.score(task.prompt(0), "four")
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((403, {}, b"no " + KEY.encode()), r"status 403: no \*\*\*"),
        ((302, {"Location": "http://127.0.0.1:1/"}, b""), "status 302"),
        ((200, {}, b"not json"), "the answer is not JSON"),
        ((200, {}, b"<p>" + KEY.encode()), r"not JSON: '<p>\*\*\*"),
        ((200, {}, b"." * (MAX_WORDS - 3) + KEY.encode()), r"not JSON: '\.+\*\*\*'"),
        ((403, {}, b"." * (MAX_WORDS - 3) + KEY.encode()), r"status 403: \.+\*\*\*"),
        ((200, {}, b"[" * 100_000), "the answer is not JSON"),
        ((200, {}, b"[1]"), "not a JSON object"),
        ((200, {}, b" " * (MAX_REPLY_BYTES + 1)), "more than 1048576 bytes"),
        ({"rewards": []}, "not a list of 1 numbers"),
        ({"rewards": [True]}, "True, which is not a finite number"),
        ({"rewards": ["1"]}, "not a finite number"),
        ((200, {}, b'{"rewards": [NaN]}'), "not a finite number"),
        ({"rewards": [1.5]}, r"a reward of 1.5, outside \[low, high\] = \[0, 1\]"),
        ({"rewards": [1.0], "signatures": "x"}, "not a list of one text"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_what_is_no_value_is_an_error_and_no_zero(reply, message, monkeypatch):
    monkeypatch.setenv("STYLE_KEY", KEY)
    with serving(lambda _: reply) as server, task_of(http(server, api_key_env="STYLE_KEY")) as task:
        with pytest.raises(RewardError, match=message) as raised:
            task.score(task.prompt(0), "x")
    assert KEY not in str(raised.value)
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert len(server.asked) == 1


def test_a_service_that_is_away_or_says_nothing_is_an_error_in_time(monkeypatch):
    silent = threading.Event()
    with serving(lambda _: silent.wait()) as server:
        # The worker is killed at its limit.
        with task_of(http(server), reward_timeout_s=600) as task:
            (worker,) = task.rewards[0].source.pool.workers
            assert (worker.timeout_s, worker.cpu_s) == (600.0, 0.0)
            worker.timeout_s = 0.5
            with pytest.raises(RewardError, match="no answer in 0.5 s"):
                task.score(task.prompt(0), "x")
        # Until then it asks again by its own clock, which only its waits move here.
        monkeypatch.setattr(http_reward, "time", Waits())
        for url, message in ((server.url, "timed out"), ("http://127.0.0.1:1", "refused")):
            deadline = http_reward.deadline_of({"timeout_s": 0.5})
            with pytest.raises(TimeoutError, match=f"{message}; no time is left"):
                http_reward.Server(url=url).post({}, deadline=deadline)
        silent.set()


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ((503, {"Retry-After": "inf"}, b"busy"), 1),
        ((429, {"Retry-After": "inf"}, b"slow down"), 1),
        ("silent", 1),
        ("away", 1),
        ((403, {}, b"no"), 2),
        ({"rewards": ["1"]}, 2),
    ],
    ids=str,
)
def test_a_start_during_an_outage_ends_so_that_a_service_manager_tries_again(reply, code):
    silent = threading.Event()
    with serving(lambda _: silent.wait() if reply == "silent" else reply) as server:
        url = "http://127.0.0.1:1" if reply == "away" else server.url
        options = {"reward_timeout_s": 0.5} if reply == "away" else {}
        with task_of({"kind": "http", "url": url}, **options) as task:
            if reply == "silent":
                task.rewards[0].source.pool.workers[0].timeout_s = 0.5
            with pytest.raises(ConfigError, match="^task: the reference answer of prompt 0 gets no reward") as raised:
                try_reward(task, None)
            with (
                pytest.raises(ConfigError, match="^evaluation.own.task: the reference answer") as named,
                naming_set("own"),
            ):
                raise raised.value
        silent.set()
    assert (raised.value.exit_code, named.value.exit_code) == (code, code)
    assert ("tries again by itself" in str(raised.value)) == (code == 1)


class Waits:
    """A clock that stands still but for waits."""

    now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_a_server_is_believed_with_a_certificate_alone(tmp_path):
    context, ca_file = localhost_tls(tmp_path)
    with serving(lengths, tls=context) as server:
        with task_of(http(server, ca_file=str(ca_file))) as task:
            assert task.score(task.prompt(0), "four")[0].value == 0.4
        with task_of(http(server)) as task, pytest.raises(RewardError, match="TLS: .*CERTIFICATE_VERIFY_FAILED"):
            task.score(task.prompt(0), "four")
    assert len(server.asked) == 1


def test_a_key_is_read_from_a_file_and_is_in_neither_contract_nor_configuration_of_others(tmp_path, monkeypatch):
    (tmp_path / "key").write_text(KEY + "\n")
    with serving(lengths) as server, task_of(http(server, api_key_file=str(tmp_path / "key"))) as task:
        task.score(task.prompt(0), "x")
        assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
        with task_of({"kind": "http", "url": "https://other.example", "api_key_env": "OTHER"}) as other:
            assert other.digest == task.digest
            monkeypatch.delenv("OTHER", raising=False)
            with pytest.raises(
                ConfigError, match=r"^task.rewards\[0\]: the environment variable OTHER is not set here"
            ):
                other.score(other.prompt(0), "x")
        with task_of(http(server, version="2")) as other:
            assert other.digest != task.digest


def test_a_signed_value_is_proven_and_an_unsigned_one_refused_at_once(tmp_path):
    signer = new_key(tmp_path / "key")

    def reply(document):
        name = "style" if document["completions"] != ["wrong"] else "other"
        turns = [Message(**turn) for turn in document["messages"]]
        signatures = [
            sign(signer, name, turns, text, document["answer"], 0.25).hex() for text in document["completions"]
        ]
        return {"rewards": [0.25] * len(signatures), "signatures": signatures}

    with (
        serving(reply) as server,
        task_of(http(server, signed_by=[signer.public_key]), system_prompt="Be brief.") as task,
    ):
        prompt = task.prompt(0)
        (part,) = task.score(prompt, "x")
        with pytest.raises(RewardError, match=r"is signed by none of task.rewards\[0\].signed_by"):
            task.score(prompt, "wrong")

    def proves(*, name="style", prompt=prompt, completion="x", value=0.25):
        terms = Terms(name=name, low=0.0, high=1.0, signed_by=(signer.public_key,))
        return terms.proves(dataclasses.replace(part, value=value), prompt=prompt, completion=completion)

    assert proves()
    others = [
        dataclasses.replace(prompt, answer="9"),
        dataclasses.replace(prompt, messages=prompt.messages[1:]),
        dataclasses.replace(prompt, messages=(Message(role="system", content="Be long."), prompt.messages[1])),
        dataclasses.replace(prompt, messages=(Message(role="user", content="Be brief."), prompt.messages[1])),
    ]
    for change in ({"name": "y"}, {"completion": "y"}, {"value": 0.5}, *({"prompt": other} for other in others)):
        assert not proves(**change)


def test_a_service_signs_the_bytes_that_are_described():
    """Services are programs of other people: another text would prove none of their values."""
    messages = [Message(role="system", content="Be brief."), Message(role="user", content="3+4=")]

    def digest(text):
        return hashlib.sha256(text.encode()).hexdigest()

    asked = digest(digest("system") + digest("Be brief.") + digest("user") + digest("3+4="))
    said = ("heterorl reward 2", "style", asked, digest("sieben \u20ac"), digest("7"), "3fd0000000000000")
    assert statement("style", messages, "sieben \u20ac", "7", 0.25) == "\n".join(said).encode()


def test_a_reward_of_whole_groups_cannot_be_signed(tmp_path):
    key = new_key(tmp_path / "key").public_key

    with pytest.raises(ValidationError, match="a signature is of one completion, not of a group"):
        TaskConfig(
            rewards=[{"name": "style", "kind": "http", "url": "https://x", "batch": "group", "signed_by": [key]}]
        )


def chat(words):
    return {"choices": [{"message": {"role": "assistant", "content": words}}]}


def judge(server, tmp_path, **options):
    rubric = "Rate 1 to 5.\n<text>{completion}</text> to {prompt}; right is {answer}."
    options = {"rubric": rubric, "model": "judge-1", "low": 1.0, "high": 5.0, **options}
    return {"kind": "judge", "url": f"{server.url}/v1/", "cache_file": str(tmp_path / "judge.sqlite"), **options}


def test_a_judge_is_asked_by_its_rubric_and_its_scale_becomes_zero_to_one(tmp_path):
    with serving(lambda _: chat('Good. {"score": 4}')) as server, task_of(judge(server, tmp_path)) as task:
        prompt = task.prompt(0)

        assert task.score(prompt, "{answer} \\1")[0].value == 0.75

    (document,) = server.asked
    assert server.paths == ["/v1/chat/completions"]
    assert document["messages"][0]["content"].startswith("Rate 1 to 5.\n<text>{answer} \\1</text> to ")
    assert (document["model"], document["temperature"], document["max_tokens"]) == ("judge-1", 0.0, 512)


def test_a_judge_gets_the_stated_fields_alone(tmp_path):
    options = {"request": {"max_completion_tokens": 4096}}
    with serving(lambda _: chat('{"score": 4}')) as server, task_of(judge(server, tmp_path, **options)) as task:
        task.score(task.prompt(0), "a")

    assert server.asked[0].keys() == {"model", "messages", "max_completion_tokens"}


def test_a_judge_keeps_its_model_and_messages(tmp_path):
    with serving(lambda _: chat("")) as server, pytest.raises(ValidationError, match="heterorl sets model itself"):
        TaskConfig(rewards=[{"name": "style", **judge(server, tmp_path, request={"model": "other"})}])


def test_what_was_judged_is_not_asked_again_even_by_another_process(tmp_path):
    with serving(lambda _: chat('{"score": 2}')) as server:
        for options in (
            {},
            {"high": 3.0},
            {"url": f"{server.url}/v2"},
            {"model": "judge-2"},
            {"rubric": "{completion}?"},
            {"request": {"reasoning_effort": "low"}},
        ):
            with task_of(judge(server, tmp_path, **options)) as task:
                for completion in ("a", "b", "a"):
                    task.score(task.prompt(0), completion)
        # All but that of the other url.
        assert len(server.asked) == 2 * 5
        (tmp_path / "judge.sqlite").unlink()
        with task_of(judge(server, tmp_path)) as task:
            task.score(task.prompt(0), "a")
            for written in (99.0, "many"):
                with sqlite3.connect(tmp_path / "judge.sqlite") as connection:
                    connection.execute("UPDATE judged SET score = ?", (written,))
                connection.close()
                # No judge may say so: it is asked again.
                assert task.score(task.prompt(0), "a")[0].value == 0.25
        assert len(server.asked) == 10 + 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("I like it", 'no JSON object with "score"'),
        ('{"score": "fine"}', "'fine' is not a number"),
        ('{"score": true}', "score is not a number"),
        ('{"score": 9}', r"the judge says 9, outside \[low, high\] = \[1, 5\]"),
        ('{"score": NaN}', "nan is not a finite number"),
        (None, "no text in the judge's words"),
    ],
)
def test_words_without_a_score_are_an_error_and_are_not_kept(words, message, tmp_path):
    with serving(lambda _: chat(words)) as server, task_of(judge(server, tmp_path)) as task:
        with pytest.raises(RewardError, match=message):
            task.score(task.prompt(0), "x")
        assert len(server.asked) == 2
        server.reply = lambda _: chat('{"score": 1}')
        assert task.score(task.prompt(0), "x")[0].value == 0.0


def test_judges_are_asked_at_a_pace_that_processes_share(tmp_path, monkeypatch):
    first, second = (JudgeStore(str(tmp_path / "judge.sqlite"), max_entries=9) for _ in range(2))
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    waits = [store.take_place("a", interval_s=10.0, longest_s=25.0) for store in (first, second, first, second)]

    # No place is taken that the caller cannot wait for.
    assert waits == [0.0, 10.0, 20.0, None]
    now += 4.0
    assert second.take_place("a", interval_s=10.0, longest_s=40.0) == 26.0
    assert second.take_place("b", interval_s=10.0, longest_s=0.0) == 0.0
    # The machine starts again and its clock with it.
    now = 7.0
    assert first.take_place("a", interval_s=10.0, longest_s=0.0) == 0.0
    monkeypatch.undo()
    with serving(lambda _: chat('{"score": 1}')) as server:
        with task_of(judge(server, tmp_path, requests_per_minute=0.1), reward_timeout_s=60) as task:
            task.score(task.prompt(0), "a")
            with pytest.raises(
                RewardError, match="no place within .* 0.1 requests_per_minute: raise them or task.reward"
            ):
                task.score(task.prompt(0), "b")
    assert len(server.asked) == 1


def test_the_oldest_scores_give_way_and_a_damaged_cache_is_refused_by_its_key(tmp_path):
    store = JudgeStore(str(tmp_path / "some" / "judge.sqlite"), max_entries=32)
    for number in range(100):
        store.put(question_digest([number]), float(number))

    assert store.get(question_digest([99])) == 99.0
    assert store.get(question_digest([1])) is None
    with sqlite3.connect(tmp_path / "some" / "judge.sqlite") as connection:
        assert connection.execute("SELECT count(*) FROM judged").fetchone()[0] <= 34
    connection.close()
    (tmp_path / "judge.sqlite").write_bytes(b"no database" * 100)
    with serving(lambda _: chat('{"score": 1}')) as server, task_of(judge(server, tmp_path)) as task:
        with pytest.raises(ConfigError, match=r"^task.rewards\[0\]: cannot keep the judge's cache in .*judge.sqlite"):
            task.score(task.prompt(0), "x")


def test_a_cache_that_another_process_creates_is_no_error(tmp_path):
    path = tmp_path / "judge.sqlite"
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    store = JudgeStore(str(path), max_entries=9)
    other.execute("COMMIT")
    other.close()

    assert store.get(question_digest([1])) is None
    JudgeStore(str(path), max_entries=9).put(question_digest([1]), 2.0)
    assert store.get(question_digest([1])) == 2.0


@pytest.mark.parametrize(
    ("words", "pattern", "score"),
    [
        ('{"score": 1} no: {"other": {"score": 3}} {"score": 2}', "", 2.0),
        ('```json\n{"why": "{}", "score": "0.5"}\n``` {', "", 0.5),
        ('{"result": {"score": 3}}', "", 3.0),
        ('{"score": 4, "parts": {"style": {"score": 1}}}', "", 4.0),
        ('{"parts": [{"score": 1}], "score": 4, "why": "two\nlines"}', "", 4.0),
        ('{"score": 4}\n\nI gave "score": 4, since \\frac{1}{2} is "score": worthy.', "", 4.0),
        ('The set {1,2 is open. {"score": 4}\nI gave "score": 4.', "", 4.0),
        ("Score: 2 ... Final score: 4/5", r"score: (\d+)", 4.0),
        ('{"score": 4}\n\n**Score:** 4/5, underscore: 1', "", 4.0),
        ("3", r"[1-5]", 3.0),
        ('<think>{"score": 1} or 2?</think>\n{"score": 4}', "", 4.0),
        ('{"score": 1} or 2?</think>\n\n{"score": 4}', "", 4.0),
        ('{"why": "it begins with <think> and ends", "score": 4}', "", 4.0),
        ('{"score": 3, "why": "it has </think> without a start"}', "", 3.0),
        ('</think>{"score": 3, "why": "it has <think> and\n</think> here"}', "", 3.0),
        ("It lacks <think> and </think>. Score: 4", r"Score: (\d)", 4.0),
    ],
)
def test_the_last_score_counts(words, pattern, score):
    assert score_of(words, name="score", pattern=pattern) == score


@pytest.mark.parametrize(
    "words",
    [
        'An example is {"score": 1}. {"reason": "it says "ten" here", "score": 5}',
        'A wrong one gets {"score": 1}. This is right: {"score": 5,}',
        '{"parts": {"score": 1}, "score" : 5,}',
        '{"parts": {"score": 1}, "score": 5',
        '{"score": 1, "why": "}"} is one, but {"score": 5,}',
        'e.g. {"score": 1}. {"reason": "it lacks a } at its end", "score": 5',
        'e.g. {"score": 1}} and so {"score": 5,}',
        'Example {"score": 1}\n```\n"score": 5\n```',
        '{"score": 1} ... "score": 5',
        'Not {"score": 1}: "score": null',
        'The completion says {"score": 5}. It is a trick.\n\nScore: 1',
        'The completion says {"score": 5}. **Score:** 1',
        'The completion says {"score": 5}. score = 1',
        'e.g. {"score": 1}\n```json\n{"score": 5, "why": "cut he',
        "e.g. {\"score\": 1} so {'score': 5}",
    ],
)
def test_a_verdict_that_is_no_json_is_not_read_from_the_object_before_it(words):
    with pytest.raises(ValueError, match='the last "score" is in no JSON object'):
        score_of(words, name="score", pattern="")


@pytest.mark.parametrize("end", ["", "</think>", "</think>\n\nNone"])
@pytest.mark.parametrize("pattern", ["", r"score.*?(\d)"])
def test_thoughts_that_are_cut_are_no_verdict(pattern, end):
    with pytest.raises(ValueError, match="^no "):
        score_of(f'<think>\nA wrong one gets {{"score": 1}}, and this{end}', name="score", pattern=pattern)


def test_what_stands_in_a_text_is_no_place_of_the_rubric():
    assert filled(
        "{prompt}|{completion}|{json}", {"prompt": "{completion}", "completion": "{prompt}", "answer": ""}
    ) == ("{completion}|{prompt}|{json}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rubric": ""}, r"task.rewards\[0\].rubric: set either rubric or rubric_file"),
        ({"rubric": "no place"}, r"rubric: has no \{completion\}"),
        ({"rubric": "", "rubric_file": "/no/such"}, r"task.rewards\[0\].rubric_file: cannot read"),
    ],
)
def test_a_rubric_that_cannot_be_used_is_refused_by_its_key(change, message, tmp_path):
    with serving(lengths) as server, pytest.raises(ConfigError, match=message):
        with task_of(judge(server, tmp_path, **change)):
            pass


@pytest.mark.parametrize("first", ["{completion}", "{completion}a"])
def test_a_rubric_is_not_cut(first, tmp_path):
    # The first one is cut within a character, the second one between two.
    (tmp_path / "rubric.md").write_text(first + "\u00e9" * 40_000, encoding="utf-8")
    with serving(lengths) as server, pytest.raises(ConfigError, match="rubric_file: longer than 65536 bytes"):
        with task_of(judge(server, tmp_path, rubric="", rubric_file=str(tmp_path / "rubric.md"))):
            pass


@pytest.mark.parametrize(
    "change",
    [{"url": "ftp://x"}, {"low": 2.0}, {"pattern": "("}, {"api_key_env": "A-B"}],
    ids=lambda each: next(iter(each)),
)
def test_keys_are_checked_when_they_are_read(change, tmp_path):
    reward = {"kind": "judge", "name": "j", "url": "https://x", "model": "m", "rubric": "{completion}", **change}
    path = tmp_path / "node.toml"
    rows = "".join(f"{name} = {json.dumps(value)}\n" for name, value in reward.items())
    path.write_text(f"[[task.rewards]]\n{rows}")
    with pytest.raises(InvalidConfig, match=r"task.rewards\[0\]"):
        load(LearnerConfig, path)
