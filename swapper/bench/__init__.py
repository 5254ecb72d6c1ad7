"""Measures drives and machines, for the command line and `benchmarks/`."""
