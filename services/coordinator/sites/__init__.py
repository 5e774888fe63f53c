"""What the coordinator knows of each site: processes, share, quota, quarantine, metrics, and the audit log.

No site can take the others' share or stop the run. Open `sites` first, then `quarantine`.
"""
