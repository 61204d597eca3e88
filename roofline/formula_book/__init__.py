"""The entries of the formula book: which components stand for a name, with letters for dimensions.

Each entry builds the very components that models are made of; a formula is only another reading of them.
"""

from roofline.formula_book import dense, experts, latent, recurrent
from roofline.formula_book.entry import Entry

BOOK: dict[str, Entry] = {**dense.ENTRIES, **latent.ENTRIES, **recurrent.ENTRIES, **experts.ENTRIES}

__all__ = ["BOOK", "Entry"]
