"""SAAP."""
