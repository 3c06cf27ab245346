"""The planner: decides how many workers of which pool run, and has it done."""
