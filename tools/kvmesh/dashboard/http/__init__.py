"""The HTTP side of the dashboard: who may see it, and the server."""
