"""Copies of a model's weights in chunks, which workers take from each other."""
