"""A signed run as processes: keys by command, weights by signature, history by `verify-lineage --replay`."""

import base64
import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from heterorl.cli.main import app
from heterorl.cli.verify_data_dir import verify_directory
from heterorl.common.rpc.client import CoordinatorClient
from tests.support.cluster import Cluster
from tests.support.links import PLAINTEXT


def new_key(path: Path) -> str:
    result = CliRunner().invoke(app, ["keys", "new", str(path)])
    assert result.exit_code == 0
    return result.output.strip()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_signed_run_is_used_by_those_who_trust_it_and_passes_the_audit(tmp_path):
    public = new_key(tmp_path / "learner.key")
    stranger = new_key(tmp_path / "stranger.key")
    cluster = Cluster(tmp_path, learner={"signing_key": str(tmp_path / "learner.key")})
    cluster.sampler = {"trusted_keys": [public]}
    for name in ("coordinator", "learner", "site-a"):
        cluster.start(name)
    cluster.sampler = {"trusted_keys": [stranger]}
    cluster.start("site-b")
    async with CoordinatorClient(cluster.address, tls=PLAINTEXT) as client:
        try:
            await cluster.until(client, lambda status: status.head_version >= 4)
            refused = tmp_path / "logs" / "site-b.log"
            await cluster.until(client, lambda _: "none of the 1 trusted keys" in refused.read_text())
            status = await client.get_status()
        finally:
            cluster.stop()

    # Everything that was trained came from the site that trusts the learner.
    assert {site.site: site.groups_accepted > 0 for site in status.sites} == {"site-a": True, "site-b": False}
    assert (tmp_path / "site-b" / "versions.jsonl").read_bytes() == b""
    text = io.StringIO()
    code = verify_directory(
        tmp_path / "coordinator", keys=[public], is_replaying=True, console=Console(file=text, width=200)
    )
    assert code == 0, text.getvalue()
    assert "SOUND" in text.getvalue()
    body = b"".join((tmp_path / "learner.key").read_bytes().splitlines()[1:-1])
    logs = [path.read_bytes() for path in (tmp_path / "logs").iterdir()]
    assert any(public.encode() in log for log in logs)
    for secret in (body, base64.b64decode(body)[-32:], base64.b64decode(body)[-32:].hex().encode()):
        assert not any(secret in log for log in logs)
