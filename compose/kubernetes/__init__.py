"""A cluster on Kubernetes: a kustomize base of the same roles, with overlays for two networks and for monitoring.

`python -m compose.kubernetes` writes anew what is generated of it; `kubectl apply -k compose/kubernetes/base` applies.
"""
