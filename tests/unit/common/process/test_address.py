"""host:port: what is one, and what no other machine can reach."""

import errno
import socket

import pytest
from pydantic import ValidationError

from heterorl.common.errors import AddressUnusable, ConfigError
from heterorl.common.identity.credentials import obstacle_at
from heterorl.common.process.address import check_address, is_loopback, listen_error
from heterorl.common.process.config_file import load
from heterorl.common.process.tracing import TracingConfig
from heterorl.common.tasks.source_config import RemoteRewardBase
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.learner.learner_config import LearnerConfig
from heterorl.relay.relay_config import RelayConfig
from heterorl.sampler.sampler_config import SamplerConfig


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:1", True), ("127.8.9.1:1", True), ("[::1]:1", True), ("localhost:1", True), ("0.0.0.0:1", False),
        ("[::]:1", False), ("10.0.0.1:1", False), ("example.org:1", False), ("localhost.example.org:1", False),
        ("dns:///localhost:1", False), ("ipv4:127.0.0.1,10.0.0.1:1", False), ("127.0.0.1.example.org:1", False),
    ],
)  # fmt: skip
def test_loopback_is_what_no_other_machine_can_reach(address, expected):
    assert is_loopback(address) is expected


@pytest.mark.parametrize("address", ["coord.example:50051", "[::1]:1", "10.0.0.1:65535", "a:1,b:2", "a.example.:1"])
def test_host_and_port_are_accepted(address):
    check_address("--coordinator", address, is_list=True)


def test_port_0_is_for_who_listens():
    check_address("--listen", "[::1]:0", is_listening=True)
    with pytest.raises(ConfigError, match=r"--coordinator: the port of .* must be from 1 to 65535"):
        check_address("--coordinator", "[::1]:0")


@pytest.mark.parametrize("port", [65536, 99999])
@pytest.mark.parametrize(
    ("schema", "key", "text"),
    [
        (CoordinatorConfig, "listen", "127.0.0.1:{}"),
        (RelayConfig, "listen", "0.0.0.0:{}"),
        (RelayConfig, "coordinator", "coord.example:{}"),
        (LearnerConfig, "coordinator", ["a.example:{}", "b.example:50051"]),
        (SamplerConfig, "coordinator", "a.example:{},b.example:50051"),
        (TracingConfig, "otlp_endpoint", "http://127.0.0.1:{}"),
        (RemoteRewardBase, "url", "http://127.0.0.1:{}/score"),
    ],
)
def test_every_address_of_a_configuration_has_a_port_that_can_be(schema, key, text, port):
    def table(number):
        said = [each.format(number) for each in text] if isinstance(text, list) else text.format(number)
        return {key: said}

    def problems(number):
        try:
            schema.model_validate(table(number))
        except ValidationError as error:
            return [entry["msg"] for entry in error.errors() if key in entry["loc"]]
        return []

    assert problems(50051) == []
    assert len(problems(port)) == 1


@pytest.mark.parametrize(
    "url",
    [
        "https://user:hunter2@score.example/v1",
        "https://hunter2@score.example/v1",
        "https://score.example/v1?token=hunter2",
        "https://score.example/v1?a=b&API_KEY=hunter2",
        "https://score.example/v1?api%2Dke%79=hunter2",
        "https://score.example/v1#secret=hunter2",
    ],
)
def test_url_with_a_secret_is_refused_and_not_repeated(url):
    reward = f'task.rewards=[{{name = "judge", kind = "http", url = "{url}"}}]'
    with pytest.raises(ConfigError, match=r"task\.rewards.*has a user, password or key") as refused:
        load(SamplerConfig, None, [reward])

    assert "hunter2" not in f"{refused.value} {refused.value.action}"


def test_url_of_a_service_may_have_a_query():
    url = "https://score.example/v1?api-version=2024-10-21&tokens=5"
    assert RemoteRewardBase(name="judge", url=url).url == url


@pytest.mark.parametrize(
    "address",
    ["", "coord", "coord:", ":1", "coord:65536", "coord:\uff11", "co ord:1", "coord:1\n", "a,b:1", "a:1,", "http://a:1",
     "a..b:1", ".a:1", "a..:1", f"{'a' * 64}.example:1"],
)  # fmt: skip
@pytest.mark.parametrize("is_list", [False, True])
def test_anything_else_is_refused_by_its_option(address, is_list):
    with pytest.raises(ConfigError, match="--coordinator"):
        check_address("--coordinator", address, is_list=is_list)


def test_a_server_that_cannot_listen_says_why():
    def problem(address, error=None):
        return listen_error("listen", address, error or obstacle_at(address))

    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = problem(f"127.0.0.1:{taken.getsockname()[1]}")
        assert "is already in use" in str(found)
        assert found.exit_code == 2
    # An address of documents: a network that comes up later may bring one.
    for address in ("192.0.2.1:0", "[2001:db8::1]:0"):
        assert isinstance(problem(address), AddressUnusable)
        assert problem(address).exit_code == 1
    assert isinstance(problem("nowhere:1", socket.gaierror(socket.EAI_NONAME, "no such name")), AddressUnusable)
    assert "choose a port from 1024 on" in str(problem("127.0.0.1:80", PermissionError(errno.EACCES, "denied")))
