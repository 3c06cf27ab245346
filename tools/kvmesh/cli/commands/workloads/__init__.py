"""Commands that read, send and simulate workloads."""
