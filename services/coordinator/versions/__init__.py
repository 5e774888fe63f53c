"""The chain of versions: who may extend it, what was published, in which variants, and the way to each.

Versions are dense and never change. A publication is fenced by the lease's epoch. Open `lineage` first, then `chain`,
which is one variant of it.
"""
