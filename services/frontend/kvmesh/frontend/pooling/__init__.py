"""Requests for vectors and scores: their inputs, and their run on workers."""
