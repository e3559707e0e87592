"""Grafana dashboards, Prometheus rules and alerts as code. Reads the metric catalogue alone.

Nothing here runs in the cluster: `tailrace dashboards` writes files or talks to Grafana.
"""
