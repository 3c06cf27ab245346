"""Loops of templates over messages, whose rounds an earlier rendering may have run."""
