"""The chain of versions: lineage, publication, variants and pull plans.

Versions are numbered without gaps and never change. The lease's epoch fences each publication. Open `lineage` first,
then `chain`, which reads one variant of it.
"""
