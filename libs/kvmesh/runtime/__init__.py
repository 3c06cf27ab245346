"""What every service process shares: its life cycle, logs, tasks and metrics endpoint."""
