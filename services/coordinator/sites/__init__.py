"""What is known of each site: its processes, its share, its quota, its canary, its quarantine, the log of audit.

One site can neither take the others' share nor bring the run to a stop. Quarantine is decided here: by `quarantine`
from the failures that the learner reports, until an operator releases the site; by `canary` from wrong log-probs, until
they are right. Open `sites` first, then `quarantine`.
"""
