"""Fixtures that several test files share."""

pytest_plugins = ["fixtures_msl", "fixtures_smollm2"]
