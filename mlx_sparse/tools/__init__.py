"""Commands around the library: evaluate, bench, train, tune, advise, try, doctor. Only cli.py imports them."""
