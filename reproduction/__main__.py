"""``python -m reproduction`` writes the pages."""

from reproduction.pages import write_pages

write_pages()
