"""The dashboard: a web page with the fleet, requests, sessions and plan of a mesh, live."""
