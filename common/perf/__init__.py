"""Planned time: models, hardware, compute, bounds of a cluster, scaling of live ones, fitted predictors. Pure."""
