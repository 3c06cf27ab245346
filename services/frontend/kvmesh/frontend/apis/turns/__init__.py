"""Turns of conversations, whose bodies repeat earlier ones."""
