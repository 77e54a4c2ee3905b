"""Provide what the methods share; nothing here depends on a method.

`base` is the base class of all methods, `decide` decides between sparse and dense, and `registry` finds the functions.
The rooms `select`, `attend` and `blocks` contain the shared steps, with one module per backend (oracle, ops, metal).
"""
