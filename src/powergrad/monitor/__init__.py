"""Which filters, features and layers are zeroed out: recorded while training, counted at any time.

:class:`FilterMonitor` writes the norm of every filter to disk while a network is trained,
:class:`Recording` reads it back, and :func:`census` reports what is dead in a model, a checkpoint
or a recording, how, since when, and whether it came back. ``powergrad inspect PATH`` prints it.
"""

from powergrad.monitor.dead import census
from powergrad.monitor.recording import FilterMonitor, Recording
from powergrad.monitor.results import Census, Event, LayerCount, Unit
from powergrad.monitor.thresholds import Thresholds

__all__ = [
    "Census",
    "Event",
    "FilterMonitor",
    "LayerCount",
    "Recording",
    "Thresholds",
    "Unit",
    "census",
]
