"""A private certificate authority for runs that have none: keys, certificates, revocation, as plain files.

Open `authority` first: what is signed, and for whom. `join` and `desk` are the two ends of an enrolment.
"""
