"""What agents ask for: trajectories (real, synthetic, parts of them), when they start and pause, and prompt tokens."""
