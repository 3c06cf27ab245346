"""Commands about models, their adapters and their output."""
