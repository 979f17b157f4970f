"""Runs, and the pool that executes them."""
