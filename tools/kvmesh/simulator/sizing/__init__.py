"""Sizing: the cheapest fleet that keeps promises for a workload, by simulation."""
