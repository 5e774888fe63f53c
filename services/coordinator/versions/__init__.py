"""The chain of versions: who may extend it, what was published, in which variants, and how to pull each version.

Versions are numbered without gaps and never change. The lease's epoch fences each publication. Open `lineage` first,
then `chain`, which reads one variant of it.
"""
