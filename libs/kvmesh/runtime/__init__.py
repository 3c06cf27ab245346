"""Common parts of the service processes: life cycle, logs, tasks, warnings, metrics endpoint."""
