"""The demonstration's nodes find certificates where their configurations look, each of its own run, role and site."""

from pathlib import Path

import pytest

from heterorl.common.errors import ConfigError
from heterorl.common.identity.credentials import read_material
from heterorl.common.identity.spiffe import Role
from heterorl.common.identity.tls import ServerTlsConfig, check_tls
from heterorl.demo.demo_config import (
    NODES,
    SITES,
    TINY,
    DemoOptions,
    coordinator_tables,
    learner_tables,
    make_certificates,
    sampler_tables,
    tls_table,
)
from tests.support.certificates import now


def test_every_node_has_its_own_certificate_and_none_goes_without(tmp_path):
    options = DemoOptions(out=tmp_path)
    place = {"address": "127.0.0.1:1", "model_dir": tmp_path}

    make_certificates(options, now=now())

    coordinator = coordinator_tables(TINY, options)
    tables = {
        ("learner", "learner"): learner_tables(TINY, options, **place)["tls"],
        **{("sampler", site): sampler_tables(TINY, options, site=site, **place)["tls"] for site in SITES},
        ("operator", "demo"): tls_table(options, role="operator", site="demo"),
        ("coordinator", "main"): coordinator["tls"],
    }
    assert tables.keys() == set(NODES)
    for (role, site), table in tables.items():
        tls = ServerTlsConfig(**table)
        check_tls(tls, key="listen", address="127.0.0.1:0")
        identity = read_material(tls, number=0, now=now().timestamp()).identity
        assert (identity.run, identity.role, identity.site) == (coordinator["run_id"], Role(role), site)
    assert Path(coordinator["tls"]["revoked"]).exists()


def test_certificates_of_an_earlier_demonstration_are_never_taken_for_new_ones(tmp_path):
    make_certificates(DemoOptions(out=tmp_path), now=now())

    with pytest.raises(ConfigError, match="holds an authority"):
        make_certificates(DemoOptions(out=tmp_path), now=now())
