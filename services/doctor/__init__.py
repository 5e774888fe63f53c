"""`heterorl doctor`: measures the link and the machine of a node, and says how to repair each fault.

Open `check` first: the result of one check. `examine` orders the checks; `link_checks` and `machine_checks` hold them.
"""
