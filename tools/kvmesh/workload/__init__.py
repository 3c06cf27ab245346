"""Workloads: reading, writing, analysing, synthesising, generating and replaying them."""
