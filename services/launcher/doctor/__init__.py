"""`dualpath doctor`: what this host really has, against what the configuration needs. A module a subject; in each,
read_*() finds out and pure functions judge.
"""
