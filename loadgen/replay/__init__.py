"""Agents that play their sessions against a server, in a closed or an open loop."""
