"""Benchmarks: this project's parts against the plainest way to do the same, and against others', in one run."""
