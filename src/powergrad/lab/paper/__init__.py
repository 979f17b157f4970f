"""The paper: every table row and figure with its recipe, published numbers and command."""
