"""Predicted time: models, hardware, compute, the planner's bounds, scaling of live clusters, fitted predictors. Pure."""
