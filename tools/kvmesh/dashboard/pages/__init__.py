"""The pages of the dashboard: one module for each, which builds the elements and refreshes them."""
