"""The command line: one module per group of commands, thin, over the modules that do the work.

`powergrad_cli` names the commands and imports the module of the one that was called. So these
modules import at the top whatever they need; only third-party libraries that are slow or optional
are imported inside the functions that use them.
"""
