"""The workbench: recipes, networks, data, training runs, studies. Needs ``powergrad[lab]``."""
