"""A private certificate authority for runs that have none: keys, certificates, revocation, as plain files."""
