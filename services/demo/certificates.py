"""Certificates of one demonstration: an authority in its directory, and a node for each process and for the view.

Guarantees: made anew for every demonstration and valid for a day; nothing outside its directory believes them.
"""

from __future__ import annotations

import datetime

from heterorl.certs.directory import Authority
from heterorl.common.identity.identity import Role
from heterorl.demo.config import NODES, RUN_ID, certificates_dir
from heterorl.demo.options import DemoOptions

LIFETIME = datetime.timedelta(days=1)


def make_certificates(options: DemoOptions, *, now: datetime.datetime) -> None:
    """Write the files that the configurations of the demonstration name; `now` is an aware instant.

    Raises:
        ConfigError: the directory holds an authority already.
        OSError: it cannot be written.
    """
    authority = Authority(certificates_dir(options))
    authority.init(run=RUN_ID, now=now, lifetime=LIFETIME)
    for role, site in NODES:
        authority.issue(role=Role(role), site=site, hosts=(), out=None, now=now, lifetime=LIFETIME)
