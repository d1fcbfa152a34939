"""In-context learning: a synthetic suite that needs no data, and the published one."""

from longrecall.tasks.in_context.demonstrations import Demonstrations, Example
from longrecall.tasks.in_context.published import DRAWS, MetaICL
from longrecall.tasks.in_context.sources import SOURCES
from longrecall.tasks.in_context.synthetic import MAPPINGS, InContext

__all__ = ["DRAWS", "MAPPINGS", "SOURCES", "Demonstrations", "Example", "InContext", "MetaICL"]
