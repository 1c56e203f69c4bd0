"""Experiments on clusters of their own: systems in paired and interleaved rounds, rates of arrival, sweeps."""
