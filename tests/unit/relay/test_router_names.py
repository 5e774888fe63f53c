"""Rpcs that a relay counts under their names: all of heterorl's."""

import importlib
import pkgutil

import heterorl.v1
from heterorl.relay import router


def test_every_rpc_of_the_protos_has_a_label_of_its_own():
    names = {each.name for each in pkgutil.iter_modules(heterorl.v1.__path__) if each.name.endswith("_pb2")}
    services = [
        service
        for name in names
        for service in importlib.import_module(f"heterorl.v1.{name}").DESCRIPTOR.services_by_name.values()
    ]

    assert len(services) >= 8
    assert {method.name for service in services for method in service.methods} == set(router.RPCS)
