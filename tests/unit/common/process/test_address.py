"""host:port: what is one, and what no other machine can reach."""

import pytest

from heterorl.common.errors import ConfigError
from heterorl.common.process.address import check_address, is_loopback


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


@pytest.mark.parametrize("address", ["coord.example:50051", "[::1]:0", "10.0.0.1:65535"])
def test_host_and_port_are_accepted(address):
    check_address("--coordinator", address)


@pytest.mark.parametrize("address", ["", "coord", "coord:", ":1", "coord:65536", "co ord:1", "coord:1\n"])
def test_anything_else_is_refused_by_its_option(address):
    with pytest.raises(ConfigError, match="--coordinator"):
        check_address("--coordinator", address)
