"""Programs that take minutes to hours and are no tests: real processes killed, cut off and rotated, decoders fuzzed.

Each is a target of the Makefile that says what it needs, and short runs of most of them are tests in tests/faults.
"""
