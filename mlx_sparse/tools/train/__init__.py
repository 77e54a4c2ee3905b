"""Train the artefact of SAAP (docs/spec/saap.md), behind ``mlx-sparse train-saap``."""
