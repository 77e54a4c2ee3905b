"""Fixtures that several test files share."""

pytest_plugins = ["fixtures_smollm2"]
