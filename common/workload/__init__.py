"""What agents ask for: trajectories, their readers, arrivals, and prompts of real text."""
