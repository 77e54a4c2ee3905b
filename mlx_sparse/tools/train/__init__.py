"""Train the artefact of SAAP (docs/spec/saap.md) for ``mlx-sparse train-saap``."""
