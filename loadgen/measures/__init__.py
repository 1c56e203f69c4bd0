"""What is measured, and what it comes to: without I/O, but for the counters of clusters and of this host."""
