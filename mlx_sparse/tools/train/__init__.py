"""SAAP's artefact, and how it is trained: docs/spec/saap.md. Behind ``mlx-sparse train-saap``."""
