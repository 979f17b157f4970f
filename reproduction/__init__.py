"""What was found in this repository, and its generated pages; not part of the package.

`python -m reproduction` fills the marked regions of README.md and docs/ from results/.
"""
