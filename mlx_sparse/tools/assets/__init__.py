"""Fetch models, texts and libraries. Files are pinned by hash and read as data, never installed or imported."""
