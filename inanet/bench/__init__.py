"""Benchmarks: repetitions of everything that is compared are interleaved in one run, and medians are reported.

Absolute times of a shared machine prove nothing; ratios within one run do.
"""
