"""`heterorl doctor`: measures a node's link and machine, and names repairs.

Open `check` first: the result of one check. `examine` orders the checks; `link_checks` and `machine_checks` hold them.
"""
