"""The tree of the prefixes of recent prompts, and who holds them. Pure."""
