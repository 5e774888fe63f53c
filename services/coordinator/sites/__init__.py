"""The sites: processes, shares, quotas, quarantine, pushed metrics, and the audit log.

No site can take the others' share or stop the run. Open `sites` first, then `quarantine`.
"""
