"""Returns: when the prompts of sessions will be read again."""
