"""The parts of ``benchmarks/attention.py``."""
