"""Which payloads of a chain may go by what the store says, and their retirement, as store operations."""

from __future__ import annotations

from heterorl.common.types.policy import PayloadRef
from heterorl.coordinator.payloads import index
from heterorl.coordinator.payloads.retention import Needs, Retirement, decide_retirement
from heterorl.coordinator.versions import lineage
from heterorl.coordinator.versions.chain import TRAINED, Chain


def decide(chain: Chain, needs: Needs) -> Retirement:
    """Choose what nobody needs: all of a flavour that ended before the oldest version that may still be asked for."""
    graph = index.graph(chain)
    oldest = lineage.num_versions(chain.connection) - 1 - needs.window
    if chain.flavour != TRAINED and (not graph.lineage or graph.lineage[-1] < oldest):
        gone = tuple(payload for payload in graph.payloads if payload.digest not in needs.leased)
        return Retirement(payloads=gone, way=(), reason=f"flavour {chain.flavour} is published no more")
    return decide_retirement(graph, needs)


def carry_out(chain: Chain, needs: Needs, *, proved: tuple[PayloadRef, ...]) -> None:
    """Retire what nobody needs, unless the way that is then depended on is another than was proved.

    Decided again in the transaction that retires: versions and leases may have come in between.
    """
    retirement = decide(chain, needs)
    if retirement.way[: len(proved)] == proved and bool(retirement.way) == bool(proved):
        index.retire(chain, retirement.payloads)
