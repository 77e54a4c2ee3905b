"""Fetch models, texts and libraries as data: pinned by hash, never installed or imported."""
