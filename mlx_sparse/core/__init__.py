"""Provide what the methods share: base classes, the registry, and selection and attention on every backend."""
