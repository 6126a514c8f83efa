"""Names to local files, and what those files say of themselves. No torch."""

from hunch.hub.names import ModelFiles, resolve
from hunch.hub.wheel import KNOWN, cache_directory

__all__ = ["KNOWN", "ModelFiles", "cache_directory", "resolve"]
