"""Long programs that are not tests: they kill, cut off and rotate real processes, and fuzz decoders.

Each has a Makefile target that states its needs; tests/faults runs short versions of most.
"""
