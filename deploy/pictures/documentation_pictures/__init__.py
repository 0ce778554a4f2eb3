"""Draws the pictures of the documentation and notes what each was drawn from, so that none is older than its subject.

Dashboards are drawn with what a Prometheus answers: no Grafana is needed. Panels, queries and fields are those of the
JSON that the chart ships; only what `grafana.panels` builds is drawn.
"""
