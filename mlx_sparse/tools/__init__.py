"""Commands around the library: evaluate, bench, train, tune, advise, demo, doctor. Only cli.py imports them."""
