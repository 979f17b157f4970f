"""The command line: one thin module per group of commands.

`powergrad_cli` lists the commands and imports the module of the one that is called, so these
modules import what they need at the top. Only modules that draw are imported inside functions,
because matplotlib takes half a second, and third-party libraries that are slow or optional.
"""
