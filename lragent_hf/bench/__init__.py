"""Benchmarks: verify first, then time, all contenders interleaved in one run. ``python -m lragent_hf.bench --help``."""
