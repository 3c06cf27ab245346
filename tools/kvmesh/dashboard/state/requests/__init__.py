"""The requests of the last minutes: what became of each, and rows of them for tables. Pure."""
