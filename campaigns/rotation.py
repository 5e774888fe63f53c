"""Renew every certificate of a running run repeatedly, and restart its coordinator in between with either signal.

python -m campaigns.rotation --rounds 20 --out runs/rotation
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import signal
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from typer.testing import CliRunner

from heterorl.cli.main import app
from heterorl.common.rpc.calls import RetryPolicy
from heterorl.common.rpc.client import CoordinatorClient
from tests.support.certificates import Certificates
from tests.support.cluster import Cluster, account
from tests.support.ports import serves
from tests.support.prometheus import metrics_port
from tests.support.witness import Witness, contract_of

SAMPLERS = ["site-a", "site-b"]
PROCESSES = ("coordinator", "learner", *SAMPLERS)
NODES = ("coordinator-main", "learner-learner", "sampler-site-a", "sampler-site-b", "sampler-witness", "operator-desk")
READ_AGAIN = "changed certificates are in use"
PATIENT = RetryPolicy(budget_s=60.0, cap_s=0.2)


class Rotation:
    """A run with certificates, and with traffic of its samplers and of a witness."""

    def __init__(self, directory: Path) -> None:
        self.certificates = Certificates(directory / "certs", run="kills")
        self.cluster = Cluster(directory, certificates=self.certificates)
        self.refusals: Counter[str] = Counter()
        for role, site in (("sampler", "witness"), ("operator", "desk")):
            self.certificates.node(role, site)

    async def campaign(self, *, rounds: int) -> dict[str, Any]:
        """Rotate and restart; after each change wait for progress of samplers, learner and witness."""
        for name in PROCESSES:
            self.cluster.start(name)
        contract = contract_of(self.cluster.model_dir, digits=1, max_new_tokens=3, group_size=2)
        address = self.cluster.address
        async with (
            CoordinatorClient(address, tls=self.certificates.tls("operator", "desk"), policy=PATIENT) as operator,
            CoordinatorClient(address, tls=self.certificates.tls("sampler", "witness"), policy=PATIENT) as client,
        ):
            witness = Witness(client, contract, seed=1, operator=operator)
            try:
                await self.cluster.until(operator, lambda status: len(status.sites) == 2)
                pushing = asyncio.create_task(witness.run())
                await witness.reaches(1)
                for _ in range(rounds):
                    for ending in (signal.SIGTERM, signal.SIGKILL):
                        self.renew_all()
                        await self.progress(operator, witness)
                        self.count_refusals()
                        await self.end_coordinator(ending)
                        # New certificates are there before the new process is: links find both changed at once.
                        self.renew_all()
                        await serves(self.cluster.start("coordinator").process, self.cluster.address)
                        await self.progress(operator, witness)
                status = await operator.get_status()
                self.count_refusals()
                pushing.cancel()
                await asyncio.wait([pushing])
                codes = {name: self.cluster.children[name].exit_code for name in PROCESSES}
            finally:
                self.cluster.stop()
        logs = {name: self.cluster.children[name].log.read_text() for name in PROCESSES}
        return {
            "rotations": 4 * rounds,
            "restarts": 2 * rounds,
            **account(self.cluster, witness.acknowledged, SAMPLERS),
            "dropped": {reason.name: count for reason, count in status.ledger.dropped.items() if count},
            "groups_of_sites": {site.site: site.groups_accepted for site in status.sites},
            "witness_refused": [repr(error) for error in witness.refused],
            "identity_refusals": dict(self.refusals),
            "ended": {name: code for name, code in codes.items() if code is not None},
            "read_again": {name: log.count(READ_AGAIN) for name, log in logs.items()},
            "bad_lines": [line for log in logs.values() for line in log.splitlines() if _is_bad(line)],
        }

    def renew_all(self) -> None:
        for node in NODES:
            path = str(self.certificates.directory / node)
            options = ["certs", "renew", path, "--dir", str(self.certificates.directory)]
            result = CliRunner().invoke(app, options)
            assert result.exit_code == 0, result.output

    async def progress(self, operator: CoordinatorClient, witness: Witness) -> None:
        """Wait until the learner published, both samplers delivered and the witness got acknowledgements."""
        before = await operator.get_status()
        had = {site.site: site.groups_accepted for site in before.sites}
        await witness.reaches(len(witness.acknowledged) + 4)
        await self.cluster.until(
            operator,
            lambda status: (
                status.head_version >= before.head_version + 2
                and all(site.groups_accepted > had[site.site] for site in status.sites)
            ),
        )

    async def end_coordinator(self, ending: signal.Signals) -> None:
        child = self.cluster.children["coordinator"]
        child.process.send_signal(ending)
        code = await asyncio.to_thread(child.process.wait)
        child.file.close()
        assert code == (0 if ending is signal.SIGTERM else -signal.SIGKILL), child.log.read_text()

    def count_refusals(self) -> None:
        """Add the coordinator's counts, which end with its process."""
        ports = re.findall(r"metrics on port (\d+)", self.cluster.children["coordinator"].log.read_text())
        assert metrics_port(self.cluster.children["coordinator"].log) is not None
        with urllib.request.urlopen(f"http://127.0.0.1:{ports[-1]}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        for reason, count in re.findall(r'identity_refusals_total\{[^}]*reason="(\w+)"[^}]*\} (\S+)', text):
            if float(count):
                self.refusals[reason] += int(float(count))


def _is_bad(line: str) -> bool:
    return " ERROR " in line or line.startswith("Traceback") or "Check failed" in line


def is_kept(summary: dict[str, Any]) -> bool:
    """Whether every promise was kept."""
    nothing = ("lost", "duplicated", "dropped", "witness_refused", "identity_refusals", "ended", "bad_lines")
    return (
        not any(summary[name] for name in nothing)
        and summary["ledger_balanced"]
        and summary["dense"]
        and all(count >= summary["rotations"] // 2 for count in summary["read_again"].values())
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/rotation"))
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    summary = asyncio.run(Rotation(options.out).campaign(rounds=options.rounds))
    (options.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    Console().print(summary)
    return 0 if is_kept(summary) else 1


if __name__ == "__main__":
    raise SystemExit(main())
