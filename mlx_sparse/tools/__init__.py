"""Implement the commands evaluate, bench, train, tune, advise, try and doctor. Only cli.py imports them."""
