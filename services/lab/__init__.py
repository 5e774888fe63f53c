"""The laboratory: algorithms against delays, many seeds, one report."""
