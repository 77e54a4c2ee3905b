"""What people use around the library: evaluate, bench, train, tune, demo, doctor. Only cli.py imports it."""
