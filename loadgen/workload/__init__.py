"""What is played: where trajectories come from, and how much of them one run plays."""
