"""Divide the keys into pages, bound the score of every page, and attend to the pages with the largest bounds.

The elementwise minimum and maximum of a page bound the score of each of its keys, so no large score is overlooked. A
decode step reads two rows per page and the complete rows of only the selected pages.

Equations: docs/spec/quest.md, (quest.1) to (quest.6).
"""
