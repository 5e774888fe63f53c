"""What is known of each site: its processes, its share, its quota, its quarantine, its metrics, the log of audit.

One site can neither take the others' share nor bring the run to a stop. Open `sites` first, then `quarantine`.
"""
