"""Grafana: dashboards as code, and how it finds them and Prometheus (provisioning/).

`python -m compose.grafana` writes dashboards/ out of overview.py and data_plane.py.
"""
