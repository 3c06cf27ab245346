"""Processes that have imported vLLM, and fork in place of new interpreters (ADR 63)."""
