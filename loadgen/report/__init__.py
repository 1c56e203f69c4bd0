"""What runs say to people and to programs."""
