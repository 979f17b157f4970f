"""The workbench: recipes, networks, data, training runs and studies. Needs ``powergrad[lab]``."""
