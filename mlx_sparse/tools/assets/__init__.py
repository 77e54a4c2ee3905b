"""Models, texts and libraries that are fetched as data: hash-pinned, never installed or imported."""
