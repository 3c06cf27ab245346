"""Output of commands: the console of standard output and tables that fit it."""
