"""Files that cannot be used: read only in part, or not for now. The old ones stay, until the new ones can be used."""

import datetime
import errno
import ssl
import time
from pathlib import Path

import pytest

from heterorl.common.errors import ConfigError
from heterorl.common.identity import credentials
from heterorl.common.identity.credentials import MaterialFiles, Revocations, read_material
from heterorl.common.identity.spiffe import Refusal, carried, read_identity
from tests.support.certificates import Certificates, now

VERSION, CURVE, POINT = (bytes.fromhex(text) for text in ("a003020102", "06082a8648ce3d030107", "03420004"))


def damaged(pem, part):
    """The certificate with another last byte in a part of it."""
    data = ssl.PEM_cert_to_DER_cert(pem.decode())
    place = data.index(part) + len(part) - 1
    return ssl.DER_cert_to_PEM_cert(data[:place] + b"\x49" + data[place + 1 :]).encode()


@pytest.fixture
def certificates(tmp_path):
    return Certificates(tmp_path / "certs")


@pytest.mark.parametrize("part", [VERSION, CURVE, POINT], ids=["version", "curve", "point"])
def test_running_node_keeps_its_certificate_where_the_changed_one_cannot_be_read(certificates, part, caplog):
    tls = certificates.tls("sampler")
    files, path = MaterialFiles(tls), Path(tls.cert)
    before = files.current()

    path.write_bytes(damaged(path.read_bytes(), part))

    assert files.current() is before
    assert "the changed ones are unusable: tls.cert: " in caplog.text


@pytest.mark.parametrize("part", [CURVE, POINT], ids=["curve", "point"])
def test_authority_that_cannot_be_read_does_not_hide_the_others(certificates, part):
    tls = certificates.tls("sampler")
    authorities = damaged(certificates.ca, part) + certificates.ca
    Path(tls.ca).write_bytes(authorities)

    material = read_material(tls, number=0, now=now().timestamp())

    relay = certificates.identity("relay", "eu-1")
    assert carried(relay, [material.cert], authorities).uri == material.identity.uri


def test_version_that_no_certificate_has_is_no_identity(certificates):
    pem = damaged(certificates.pair("sampler", "eu-1").cert, VERSION)

    assert isinstance(read_identity(pem), Refusal)
    assert isinstance(carried(certificates.identity("relay", "eu-1"), [pem], certificates.ca), Refusal)


def test_certificate_is_taken_once_the_clock_is_right(certificates, monkeypatch, caplog):
    tls = certificates.tls("sampler")
    monkeypatch.setattr(credentials, "AGAIN_S", 0.0)
    files = MaterialFiles(tls)
    hour = datetime.timedelta(hours=1)
    early = certificates.odd(uris=["spiffe://run/site/eu-1/role/sampler"], begin=hour)
    Path(tls.cert).write_bytes(early.cert)
    Path(tls.key).write_bytes(early.key)
    assert [files.current().number for _ in range(3)] == [0] * 3

    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 2 * hour.total_seconds())

    assert [files.current().number for _ in range(3)] == [1] * 3
    assert caplog.text.count("the changed ones are unusable") == 1


def test_start_before_the_clock_is_right_is_worth_another_one(certificates):
    """After a boot with a wrong clock a service manager must start the service again: no file is wrong."""
    tls = certificates.tls("sampler")
    identity = read_material(tls, number=0, now=now().timestamp()).identity

    for instant, code, action in (
        (identity.not_before - 1.0, 1, "set this machine's clock"), (identity.not_after + 1.0, 2, "certs renew"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=action) as refused:
            read_material(tls, number=0, now=instant)
        assert refused.value.exit_code == code


def test_list_of_revoked_that_could_not_be_read_is_read_again(tmp_path, monkeypatch, caplog):
    path = tmp_path / "revoked"
    path.write_text("")
    monkeypatch.setattr(credentials, "AGAIN_S", 0.0)
    revoked = Revocations(path)
    path.write_text("1f\n")

    def none_left(*_, **__):
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", none_left)
        assert 0x1F not in revoked
        assert 0x1F not in revoked

    assert 0x1F in revoked
    assert caplog.text.count("the old list of revoked certificates stays in use") == 1
