"""Benchmarks: ratios against limits measured in the same run."""
