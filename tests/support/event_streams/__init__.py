"""Streams of KV events recorded from the engines' own caches, with what those caches then find."""
