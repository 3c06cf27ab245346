"""Commands that change a running mesh, its keys or its store."""
