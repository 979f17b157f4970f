"""The paper, whole: every table row and figure, its recipe, its published numbers, its command."""
