"""The command line: one module per group of commands, thin, over the modules that do the work.

`powergrad_cli` names the commands and imports the module of the one that was called. So these
modules import at the top whatever they need. Inside functions are imported only the modules that
draw, since matplotlib takes half a second, and third-party libraries that are slow or optional.
"""
