"""The state of a mesh as an observer sees it: fleet, activity, and what became of requests."""
