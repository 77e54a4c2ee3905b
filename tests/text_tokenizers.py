"""Tokenizers made by hand, each with habits of real ones that tasks have to cope with."""

from __future__ import annotations

import re

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


class Pieces:
    """Words with the blank before them, numbers in pieces of ``digits``, the blank before a number alone.

    With ``blank``, every text gets one in front, as sentencepiece gives it. Every text is opened with a token.
    """

    OPENING = 0

    def __init__(self, digits: int, *, blank: bool) -> None:
        self.blank = blank
        self._split = re.compile(rf"[0-9]{{1,{digits}}}| ?[A-Za-z]+| ?[^A-Za-z0-9\s]|\s")
        self._pieces = ["<s>"]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        known = {piece: i for i, piece in enumerate(self._pieces)}
        tokens = []
        for piece in self._split.findall(" " * (self.blank and bool(text)) + text):
            if piece not in known:
                known[piece] = len(self._pieces)
                self._pieces.append(piece)
            tokens.append(known[piece])
        return [self.OPENING] * add_special_tokens + tokens

    def decode(self, tokens: list[int]) -> str:
        return "".join(self._pieces[token] for token in tokens)
