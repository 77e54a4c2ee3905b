"""Tokenizers made by hand, each with a habit of real ones that tasks have to cope with."""

from __future__ import annotations

from tiny_models import VOCAB


class Words:
    """A number for each word, two bytes for each token, and a token before a text."""

    def decode(self, tokens: list[int]) -> str:
        return "ab" * len(tokens)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [2 + sum(word.encode()) % (VOCAB - 2) for word in text.split()]


class Letters:
    """A token for each letter."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))
