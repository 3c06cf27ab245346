"""Reads the outcomes of requests from the route stream: use by tenant or key, slow requests."""
