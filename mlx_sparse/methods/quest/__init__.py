"""Quest."""
