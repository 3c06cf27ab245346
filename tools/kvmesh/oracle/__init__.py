"""The oracle: simulates candidate fleets on recent requests, for planners."""
