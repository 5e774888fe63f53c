"""Who is revoked is refused at the next call: a real coordinator, set up by what `certs` prints, and nodes that joined."""

import asyncio
import shutil
import tomllib

import pytest
from typer.testing import CliRunner

from heterorl.certs.enrolment import Enrolment
from heterorl.certs.enrolment_client import join
from heterorl.certs.enrolment_server import EnrolmentServer
from heterorl.cli.main import app
from heterorl.common.errors import NotRegistered, Unauthenticated
from heterorl.common.identity.spiffe import Role, read_identity
from heterorl.common.identity.tls import TlsConfig, files_in
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.demo.processes import start, stop
from tests.support.ports import free_port


def certs(directory, *arguments):
    result = CliRunner().invoke(app, ["certs", *arguments, "--dir", str(directory / "certs")])
    assert result.exit_code == 0, result.exception
    return result.output


async def joined(directory, role, site):
    """A node that joined by token: the authority has no directory of it."""
    office, out = directory / "certs", directory / "far away" / f"{role}-{site}"
    async with EnrolmentServer(office).listening("127.0.0.1:0") as port:
        token = Enrolment(office).create(role=role, site=site, address="", days=1, expires=2e9)
        await join(token, address=f"127.0.0.1:{port}", out=out)
    return out


async def outcome(address, node, call):
    async with CoordinatorClient(address, tls=TlsConfig(**files_in(node))) as client:
        try:
            await call(client)
        except (NotRegistered, Unauthenticated) as error:
            return type(error)
    return None


def lease(client):
    return client.lease_work(site="eu-1", incarnation="i", max_groups=1, policy_version=0)


async def test_nodes_that_joined_are_refused_at_the_next_call_once_the_list_was_copied(tmp_path):
    certs(tmp_path, "init", "my-run")
    printed = certs(tmp_path, "issue", "coordinator", "main", "--host", "127.0.0.1")
    # The coordinator's directory is copied as a whole, as README has it; the list is in it.
    shutil.copytree(tmp_path / "certs" / "coordinator-main", tmp_path / "tls")
    lines = "\n".join(line.strip() for line in printed.splitlines() if line.strip().startswith("tls."))
    tls = tomllib.loads(lines.replace(str(tmp_path / "certs" / "coordinator-main"), str(tmp_path / "tls")))["tls"]
    assert tls["revoked"] == str(tmp_path / "tls" / "revoked")
    operator, site = await joined(tmp_path, Role.OPERATOR, "bob"), await joined(tmp_path, Role.SAMPLER, "eu-1")
    address = f"127.0.0.1:{free_port()}"
    data = tmp_path / "data"
    tables = {"run_id": "my-run", "data_dir": str(data), "listen": address, "metrics_port": 0, "tls": tls}
    child = start("coordinator", name="coordinator", tables=tables, directory=tmp_path)
    try:
        while not (data / "address").exists():
            child.check()
            await asyncio.sleep(0.05)
        assert await outcome(address, operator, lambda client: client.get_status()) is None
        assert await outcome(address, site, lease) is NotRegistered

        said = certs(tmp_path, "revoke", "--site", "bob", "--role", "operator")
        assert "spiffe://my-run/site/bob/role/operator" in said
        assert "tls.revoked" in said
        serial = read_identity((site / "node.crt").read_bytes()).serial
        certs(tmp_path, "revoke", f"{serial:x}")
        # Nothing is refused before the list is where the coordinator looks.
        assert await outcome(address, operator, lambda client: client.get_status()) is None
        shutil.copy(tmp_path / "certs" / "revoked", tls["revoked"])

        assert await outcome(address, operator, lambda client: client.get_status()) is Unauthenticated
        assert await outcome(address, site, lease) is Unauthenticated
    finally:
        stop([child])
    # What the authority would copy the next time holds them too.
    assert (tmp_path / "certs" / "coordinator-main" / "revoked").read_text() == (tmp_path / "tls/revoked").read_text()


def test_node_is_named_by_site_and_role_or_by_nothing(tmp_path):
    certs(tmp_path, "init", "my-run")
    base = ["--dir", str(tmp_path / "certs")]

    for arguments, problem in (
        (["revoke"], "either WHAT or --site"),
        (["revoke", "ab", "--site", "eu-1"], "either WHAT or --site"),
        (["revoke", "--site", "eu-1"], "no sampler eu-1 has a certificate"),
    ):
        assert problem in str(CliRunner().invoke(app, ["certs", *arguments, *base]).exception)


@pytest.mark.parametrize("columns", ["80", "200"])
def test_serial_numbers_can_be_copied_from_the_list(tmp_path, columns):
    certs(tmp_path, "init", "my-run")
    certs(tmp_path, "issue", "sampler", "a-site-with-a-long-name-in-a-far-data-centre")
    (serial,) = [path.stem for path in (tmp_path / "certs" / "issued").iterdir()]

    listed = CliRunner().invoke(app, ["certs", "list", "--dir", str(tmp_path / "certs")], env={"COLUMNS": columns})

    assert serial in listed.output


def test_doctor_says_what_becomes_of_revoked_certificates(tmp_path):
    certs(tmp_path, "init", "my-run")
    certs(tmp_path, "issue", "coordinator", "main", "--host", "127.0.0.1")
    node = tmp_path / "certs" / "coordinator-main"
    base = [f'listen="127.0.0.1:{free_port()}"', f'data_dir="{tmp_path}"', "run_id=my-run"]
    base += [f'tls.{key}="{path}"' for key, path in files_in(node).items()]

    def line(*settings):
        words = ["doctor", "--role", "coordinator"]
        for setting in (*base, *settings):
            words += ["--set", setting]
        return " ".join(CliRunner().invoke(app, words, env={"COLUMNS": "200"}).output.split())

    assert "warn tls.revoked is not set" in line()
    assert "ok 0 certificates refused" in line(f'tls.revoked="{node}/revoked"')
    assert "fail tls.revoked: cannot read" in line(f'tls.revoked="{node}/nothing"')
