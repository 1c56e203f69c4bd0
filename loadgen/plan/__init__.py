"""The planner: how many nodes of each role serve a load."""
