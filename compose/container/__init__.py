"""What an image runs: one process of a cluster, with its addresses taken from the networks that its container is on."""
