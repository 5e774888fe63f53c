"""A wrong model_dir is one line that says what is not there, at once."""

import os
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from heterorl.common.errors import ConfigError
from heterorl.common.model.model_directory import check_model_dir, copy_files
from heterorl.common.text.prompter import Prompter

pytestmark = pytest.mark.process


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "https_proxy", "http_proxy", "HTTPS_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)


def problem_of(model_dir):
    with pytest.raises(ConfigError) as caught:
        check_model_dir(model_dir)
    text = str(caught.value)
    assert text.startswith("model_dir: ")
    assert len(text.splitlines()) == 1
    return text


def test_what_is_not_there_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()

    assert "is not set" in problem_of("")
    assert f"there is no directory {tmp_path}/nothing" in problem_of(f"{tmp_path}/nothing")
    assert f"{tmp_path}/empty has no config.json" in problem_of(f"{tmp_path}/empty")
    assert "is a file" in problem_of(f"{tmp_path}/file")
    assert "there is no directory ./models/start" in problem_of("./models/start")
    assert "there is no directory models/start/7" in problem_of("models/start/7")


def test_a_directory_with_a_configuration_is_looked_into_no_further(tmp_path):
    (tmp_path / "config.json").write_text("{}")

    check_model_dir(str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        Prompter(str(tmp_path), use_chat_template=False)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("whole", ["model.safetensors", "pytorch_model.bin"])
def test_a_file_of_weights_that_did_not_arrive_is_named(tmp_path, whole):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "here").touch()
    index = tmp_path / f"{whole}.index.json"
    index.write_text('{"weight_map": {"a": "here", "b": "not-here", "c": "not-here"}}')

    assert f"not-here is not in {tmp_path}, and {index.name} names it" in problem_of(str(tmp_path))

    # The whole file is what is read where both are there; and an index that is none, its reader refuses.
    (tmp_path / whole).touch()
    check_model_dir(str(tmp_path))
    (tmp_path / whole).unlink()
    for text in ("{", "[]", '{"weight_map": 3}'):
        index.write_text(text)
        check_model_dir(str(tmp_path))


def test_a_link_of_the_cache_that_was_copied_without_its_file_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    link = tmp_path / "model.safetensors"
    link.symlink_to("../../blobs/abc")

    assert f"{link} is a link to ../../blobs/abc, which does not exist (copy the directory" in problem_of(tmp_path)


def test_a_tokenizer_that_cannot_be_read_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": 3}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')

    with pytest.raises(ConfigError, match="cannot load a tokenizer") as caught:
        Prompter(str(tmp_path), use_chat_template=False)
    assert len(str(caught.value).splitlines()) == 1


@contextmanager
def hub(status, monkeypatch):
    """A hub that gives one answer; its requests."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            asked.append(self.path)
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}).start()
        try:
            yield asked
        finally:
            server.shutdown()


def test_a_model_of_the_hub_takes_one_request(monkeypatch):
    with hub(200, monkeypatch) as asked:
        check_model_dir("someone/some-model")

    assert asked == ["/someone/some-model/resolve/main/config.json"]


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_model_that_the_hub_does_not_have_needs_its_operator(monkeypatch, status):
    with hub(status, monkeypatch), pytest.raises(ConfigError) as caught:
        check_model_dir("someone/some-modle")

    assert caught.value.exit_code == 2
    text = str(caught.value)
    assert "has no such model, or not for this user: " in text
    assert str(status) in text
    assert text.endswith("(correct it, or set HF_TOKEN)")


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_hub_that_is_busy_is_asked_again_by_the_next_start(monkeypatch, status):
    with hub(status, monkeypatch), pytest.raises(ConfigError, match=f"does not answer: .*{status}") as caught:
        check_model_dir("someone/some-model")

    assert caught.value.exit_code == 1


def test_a_proxy_without_a_way_to_the_hub_does_not_stop_a_service_for_good(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="does not answer") as caught:
        check_model_dir("someone/some-model")

    assert caught.value.exit_code == 1


@pytest.mark.parametrize("name", ["some--model", "someone/some..model"])
def test_a_name_that_no_hub_can_have_is_no_outage(monkeypatch, name):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="there is no directory") as caught:
        check_model_dir(name)

    assert caught.value.exit_code == 2


def test_hub_id_that_is_not_cached_is_refused_where_the_hub_is_switched_off(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    assert "switched off" in problem_of("someone/some-model")


@pytest.fixture
def snapshot(monkeypatch, tmp_path):
    """The files of someone/some-model in the cache, of a hub that does not answer."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    snapshot = tmp_path / "cache" / "models--someone--some-model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    return snapshot


def test_a_model_of_the_cache_needs_no_network(snapshot):
    check_model_dir("someone/some-model")


def test_files_of_the_hub_are_copied_as_they_are(snapshot, tmp_path):
    names = ("tokenizer.json", "tokenizer_config.json", "additional_chat_templates/tool_use.jinja", "spiece.model")
    (snapshot / "additional_chat_templates").mkdir()
    for name in (*names, "model.safetensors"):
        (snapshot / name).write_text(name)
    (tmp_path / "out").mkdir()

    copy_files("someone/some-model", tmp_path / "out")

    copied = {path.relative_to(tmp_path / "out").as_posix(): path.read_text() for path in tmp_path.glob("out/**/*.*")}
    assert copied == {name: name for name in names}


@pytest.mark.timeout(120)
def test_a_service_says_it_in_one_line(tmp_path):
    config = tmp_path / "node.toml"
    config.write_text('model_dir = "someone/some-model"\nmetrics_port = 0\n[tls]\ninsecure = true\n')

    result = subprocess.run(
        [sys.executable, "-m", "heterorl", "learner", "--config", str(config)],
        capture_output=True, text=True, check=False,
        env={"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip

    # The hub may answer a later start.
    assert result.returncode == 1
    assert [line for line in result.stderr.splitlines() if "INFO" not in line] == [
        "error: model_dir: there is no directory someone/some-model, and the hub at 127.0.0.1 does not answer: "
        "[Errno 111] Connection refused (correct it if it is mistyped; else restore the way to the hub, and the next "
        "start asks again)"
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
@pytest.mark.parametrize(("closed", "is_named"), [("model.safetensors", True), (".", False), ("..", False)])
def test_what_another_user_may_not_read_is_named(closed, is_named):
    # tmp_path lies below directories that root alone may enter.
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "site" / "model"
        model.mkdir(parents=True)
        for file in ("config.json", "model.safetensors"):
            (model / file).write_text("{}")
        Path(name).chmod(0o755)
        (model / closed).chmod(0o600)
        process = os.fork()
        if process == 0:
            os.setuid(65534)
            try:
                check_model_dir(str(model))
            except ConfigError as error:
                named = model / closed if is_named else model
                os._exit(0 if f"may not read {named} (chmod -R a+rX {model}" in str(error) else 2)
            os._exit(3)
        _, status = os.waitpid(process, 0)

    assert os.waitstatus_to_exitcode(status) == 0
