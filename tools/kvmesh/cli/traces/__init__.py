"""Traces as arguments of commands."""
