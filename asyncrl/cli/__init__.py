"""The `asyncrl` command."""
