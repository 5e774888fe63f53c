"""The private authority: files, modes, lifetimes, and its command line."""

import datetime
import os
import shutil
import stat

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from typer.testing import CliRunner

from heterorl.certs import authority_directory as book
from heterorl.certs.authority import LOCAL_HOSTS, hosts_of
from heterorl.certs.authority_directory import Authority
from heterorl.certs.enrolment import Enrolment
from heterorl.cli.main import app
from heterorl.common.errors import ConfigError
from heterorl.common.identity.spiffe import Identity, Role, read_identity
from tests.support.certificates import DAY, Certificates, now


def invoke(*arguments):
    return CliRunner().invoke(app, ["certs", *arguments])


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def own_umask():
    """As docs/two-sites.md sets it."""
    before = os.umask(0o077)
    yield
    os.umask(before)


def test_life_of_a_certificate_on_the_command_line(tmp_path, own_umask):
    root = tmp_path / "ca [x]"
    base = ["--dir", str(root)]

    assert invoke("init", "my-run", *base).exit_code == 0
    assert invoke("issue", "coordinator", "main", "--host", "c.example", "--host", "10.0.0.1", *base).exit_code == 0
    issued = invoke("issue", "sampler", "site-1", *base)
    assert f'tls.key = "{root}/sampler-site-1/node.key"' in issued.output
    first = read_identity((root / "sampler-site-1" / "node.crt").read_bytes())
    assert invoke("renew", str(root / "sampler-site-1"), *base, "--days", "3").exit_code == 0
    second = read_identity((root / "sampler-site-1" / "node.crt").read_bytes())
    listed = invoke("list", *base).output
    assert "renew now" in listed
    assert "coordinator" in listed
    assert (second.run, second.site, second.role) == (first.run, first.site, first.role)
    assert second.serial != first.serial
    assert invoke("revoke", str(root / "sampler-site-1"), *base).exit_code == 0

    # A node's directory means all its certificates, also the one that was renewed away.
    assert {f"{first.serial:x}", f"{second.serial:x}"} <= set((root / "revoked").read_text().split())
    assert invoke("list", *base).output.count("revoked") == 2
    again = invoke("renew", str(root / "sampler-site-1"), *base)
    assert isinstance(again.exception, ConfigError)
    assert "is revoked" in str(again.exception)
    assert invoke("issue", "sampler", "site-1", *base).exit_code == 0
    third = read_identity((root / "sampler-site-1" / "node.crt").read_bytes())
    assert third.serial not in (first.serial, second.serial)
    assert [mode(path) for path in sorted(root.rglob("*.key"))] == [0o600] * 3
    # Copied, they are read by other users.
    assert {mode(path) for path in (*root.rglob("*.crt"), *root.rglob("revoked"))} == {0o644}
    assert mode(root) == mode(root / "sampler-site-1") == 0o700


@pytest.mark.parametrize("columns", ["80", "200"])
def test_renewed_certificate_has_the_names_that_are_said_and_the_list_tells_both_apart(tmp_path, columns):
    base = ["--dir", str(tmp_path / "ca")]
    node = tmp_path / "ca" / "coordinator-main"
    assert invoke("init", "my-run", *base).exit_code == 0
    assert invoke("issue", "coordinator", "main", "--host", "old.example", *base).exit_code == 0
    old = read_identity((node / "node.crt").read_bytes())

    renewed = invoke("renew", str(node), "--host", "new.example", "--host", "10.0.0.1", *base)

    assert f"heterorl certs revoke {old.serial:x} refuses it" in renewed.output
    assert set(hosts_of((node / "node.crt").read_bytes())) == {"new.example", "10.0.0.1", *LOCAL_HOSTS}
    listed = CliRunner().invoke(app, ["certs", "list", *base], env={"COLUMNS": columns}).output
    (line,) = [text for text in listed.splitlines() if f"{old.serial:x}" in text]
    assert "old.example" in line
    assert "new.example, 10.0.0.1" in listed
    # Without names said, those of before.
    assert invoke("renew", str(node), *base).exit_code == 0
    assert "new.example" in hosts_of((node / "node.crt").read_bytes())


def test_certificate_that_its_authority_cuts_short_says_so(tmp_path):
    base = ["--dir", str(tmp_path / "ca")]
    assert invoke("init", "my-run", "--days", "10", *base).exit_code == 0
    end = x509.load_pem_x509_certificate((tmp_path / "ca" / "ca.crt").read_bytes()).not_valid_after_utc

    outputs = [
        invoke("issue", "sampler", "eu", *base).output, invoke("renew", str(tmp_path / "ca" / "sampler-eu"), *base).output
    ]  # fmt: skip

    assert all(f"valid until {end:%Y-%m-%d %H:%M}" in text and "authority ends then too" in text for text in outputs)
    assert "ends then" not in invoke("renew", str(tmp_path / "ca" / "sampler-eu"), "--days", "3", *base).output
    assert f"the authority ends {end:%Y-%m-%d %H:%M}" in invoke("list", *base).output


@pytest.mark.parametrize("what", ["--site=eu", "sampler-eu", "serial"])
def test_revoked_node_keeps_no_unused_token(tmp_path, what):
    certificates = Certificates(tmp_path / "ca")
    enrolment = Enrolment(tmp_path / "ca")
    node = certificates.node("sampler", "eu")
    until = now().timestamp() + 3600
    for site in ("eu", "eu", "us"):
        enrolment.create(role=Role.SAMPLER, site=site, address="", days=1, expires=until)
    serial = f"{certificates.identity('sampler', 'eu').serial:x}"
    words = {"sampler-eu": str(node), "serial": serial}.get(what, what)

    assert invoke("revoke", words, "--dir", str(tmp_path / "ca")).exit_code == 0

    left = [row.uri.split("/")[4] for _, row in enrolment.list()]
    # One certificate is not the node.
    assert sorted(left) == (["eu", "eu", "us"] if what == "serial" else ["us"])


def test_renewed_certificate_is_of_what_was_issued_and_not_of_what_the_directory_claims(tmp_path):
    certificates = Certificates(tmp_path / "ca")
    node = certificates.node("sampler", "a")
    issued = read_identity((node / "node.crt").read_bytes())
    forged = certificates.odd(uris=["spiffe://run/site/a/role/operator"], dns=["evil.example"], serial=issued.serial)
    (node / "node.crt").write_bytes(forged.cert)

    Authority(tmp_path / "ca").renew(node, now=now(), lifetime=DAY)

    assert read_identity((node / "node.crt").read_bytes()).role is Role.SAMPLER
    assert hosts_of((node / "node.crt").read_bytes()) == ()


def test_certificate_says_what_the_node_is_and_no_more(tmp_path):
    certificates = Certificates(tmp_path / "ca")
    coordinator, sampler = (
        x509.load_pem_x509_certificate(certificates.pair(*node).cert)
        for node in (("coordinator", "main"), ("sampler", "a"))
    )

    def names(certificate, kind):
        return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(
            kind
        )

    def usages(certificate):
        return {usage._name for usage in certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value}

    assert names(sampler, x509.UniformResourceIdentifier) == ["spiffe://run/site/a/role/sampler"]
    assert names(sampler, x509.DNSName) == names(sampler, x509.IPAddress) == []
    assert names(coordinator, x509.DNSName) == ["localhost"]
    assert usages(sampler) == {"clientAuth"}
    assert usages(coordinator) == {"clientAuth", "serverAuth"}
    assert not sampler.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


@pytest.fixture(scope="module")
def issued(tmp_path_factory):
    """Two authorities with one sampler each, made once: each file costs two fsyncs."""
    directory = tmp_path_factory.mktemp("issued")
    for name in ("ca", "other"):
        Certificates(directory / name).node("sampler", "a")
    return directory


def test_an_authority_whose_key_is_kept_elsewhere_is_not_replaced(tmp_path):
    authority = Authority(tmp_path / "ca")
    authority.init(run="run", now=now(), lifetime=DAY)
    authority.issue(role=Role.SAMPLER, site="a", hosts=(), out=None, now=now(), lifetime=DAY)
    (tmp_path / "ca" / "ca.key").unlink()

    with pytest.raises(ConfigError, match=r"holds an authority.*put its ca\.key back"):
        authority.init(run="run", now=now(), lifetime=DAY)


def test_no_certificate_outlives_its_authority(tmp_path):
    authority = Authority(tmp_path / "ca")
    authority.init(run="run", now=now(), lifetime=DAY)
    target = authority.issue(role=Role.SAMPLER, site="a", hosts=(), out=None, now=now(), lifetime=30 * DAY)

    ends = [x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc for path in target.glob("*.crt")]
    assert len(ends) == 2
    assert ends[0] == ends[1]
    with pytest.raises(ConfigError, match="has expired"):
        authority.issue(role=Role.SAMPLER, site="b", hosts=(), out=None, now=now() + 2 * DAY, lifetime=DAY)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("init", "run"), "holds an authority"),
        (("init", "a/b", "--dir", "{}/new"), "not 1 to 64 letters"),
        (("issue", "sampler", "a/b"), "not 1 to 64 letters"),
        (("issue", "sampler", ""), "not 1 to 64 letters"),
        (("issue", "sampler", "b", "--host", "x.example"), "does not serve"),
        (("issue", "coordinator", "b", "--host", "b\u00fccher.example"), "neither a DNS name nor"),
        (("issue", "coordinator", "b", "--host", "b.example:50051"), "neither a DNS name nor"),
        (("issue", "coordinator", "b", "--host", "a.example,b.example"), "neither a DNS name nor"),
        (("issue", "coordinator", "b", "--host", ""), "neither a DNS name nor"),
        (("issue", "sampler", "a"), "holds a certificate"),
        (("renew", "{}/ca/sampler-a", "--host", "x.example"), "does not serve"),
        (("issue", "sampler", "b", "--dir", "{}/none"), "holds no authority"),
        (("list", "--dir", "{}/none"), "holds no authority"),
        (("revoke", "zz"), "neither a file nor a serial"),
        (("revoke", "12ab"), "is not of this authority"),
        (("renew", "{}/none"), "a node that joined by token has its files itself"),
        (("renew", "{}/other/sampler-a"), "no certificate of this authority"),
        (("revoke", "{}/other/sampler-a/node.crt"), "is not of this authority"),
        (("revoke", "{}/other/sampler-a"), "is not of this authority"),
    ],
)
def test_mistakes_are_named(tmp_path, issued, arguments, message):
    for name in ("ca", "other"):
        shutil.copytree(issued / name, tmp_path / name)
    texts = [argument.format(tmp_path) for argument in arguments]
    base = () if "--dir" in texts else ("--dir", str(tmp_path / "ca"))

    result = invoke(*texts, *base)

    assert isinstance(result.exception, ConfigError), result.output
    assert message in str(result.exception)


def test_certificate_that_no_other_machine_can_dial_says_so(tmp_path, issued):
    shutil.copytree(issued / "ca", tmp_path / "ca")
    for options, is_alone in ((["issue", "coordinator", "a"], True), (["issue", "relay", "b", "--host", "b.x"], False)):
        output = invoke(*options, "--dir", str(tmp_path / "ca")).output
        assert ("# only this machine can dial it; heterorl certs renew" in output) == is_alone


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "key"
    book.write_file(path, b"old", mode=book.SECRET)
    monkeypatch.setattr(os, "fsync", _fail)

    with pytest.raises(OSError, match="no space"):
        book.write_file(path, b"new", mode=book.SECRET)

    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def _fail(_handle):
    raise OSError("no space")


@pytest.mark.parametrize("last", ["ca.crt", "node.key", "revoked"])
def test_an_issue_that_was_cut_short_is_repeated(tmp_path, monkeypatch, last):
    authority = Authority(tmp_path / "ca")
    authority.init(run="run", now=now(), lifetime=DAY)
    write = book.write_file

    def cut(path, data, *, mode):
        write(path, data, mode=mode)
        if (path.parent.name, path.name) == ("coordinator-main", last):
            raise KeyboardInterrupt

    def issue():
        return authority.issue(role=Role.COORDINATOR, site="main", hosts=(), out=None, now=now(), lifetime=DAY)

    monkeypatch.setattr(book, "write_file", cut)
    with pytest.raises(KeyboardInterrupt):
        issue()
    monkeypatch.setattr(book, "write_file", write)

    node = issue()

    key = load_pem_private_key((node / "node.key").read_bytes(), password=None)
    certificate = x509.load_pem_x509_certificate((node / "node.crt").read_bytes())
    assert certificate.public_key() == key.public_key()
    assert (node / "revoked").exists()


@pytest.mark.parametrize("written", ["12ab", "12ab  # by hand"])
def test_a_list_that_a_person_wrote_keeps_its_last_line(tmp_path, written):
    certificates = Certificates(tmp_path / "ca")
    serial = certificates.identity("sampler", "a").serial
    certificates.authority.revoked_path.write_text(written)

    certificates.authority.revoke(f"{serial:x}")

    assert certificates.authority.is_revoked(serial)
    assert certificates.authority.is_revoked(0x12AB)


def test_list_shows_states_by_the_clock(tmp_path):
    certificates = Certificates(tmp_path / "ca")
    certificates.node("sampler", "a")
    (entry,) = certificates.authority.list()

    assert isinstance(entry.identity, Identity)
    assert entry.state(now()) == "valid"
    assert entry.state(now() + datetime.timedelta(days=2)) == "expired"
