"""The experiment of docs/protocol.md: its regimes, its rule, and what it found."""
