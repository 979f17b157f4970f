"""The paper, reproduced with the package, and the generated pages; not part of the package.

`python -m reproduction` lists, shows, runs and draws it; `pages` fills README.md and docs/.
"""
