"""Records filter norms while training, and counts dead filters, features and layers.

:class:`FilterMonitor` writes the norm of every filter to disk while a network is trained,
:class:`Recording` reads the norms back, and :func:`census` reports which units of a model, a
checkpoint or a recording are dead, in what way, since when, and whether they recovered.
``powergrad inspect PATH`` prints the census.
"""

from powergrad.monitor.counts import Census, Event, LayerCount, Unit
from powergrad.monitor.dead import census
from powergrad.monitor.recording import FilterMonitor, Recording

__all__ = [
    "Census",
    "Event",
    "FilterMonitor",
    "LayerCount",
    "Recording",
    "Unit",
    "census",
]
