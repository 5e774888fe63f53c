"""A private certificate authority: keys, certificates and revocation as plain files.

Open `authority` first: what is signed, and for whom. `enrolment_client` and `enrolment_server` are the two ends of a
node's enrolment.
"""
