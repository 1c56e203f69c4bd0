"""The streaming client: what a request sends and what comes back, with its times."""
