"""Shared code of the services.

A test checks that each folder has two services that use it. Open `api.py` first: the coordinator as its callers see it.
`errors.py` has all errors; each message says what to do.
"""
