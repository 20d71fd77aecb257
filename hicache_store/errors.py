"""The exceptions of the package: one small tree.

A miss is a value, never an exception. What is raised is either a configuration that cannot work
(at attach, naming the numbers and the way out) or a handle used where it cannot be used.
"""

from __future__ import annotations


class HicacheError(Exception):
    """Base of every exception this package raises on purpose."""


class ConfigurationError(HicacheError, ValueError):
    """A setting that cannot work: an option, a URL, a topology, an identity, a layout."""


class TopologyError(ConfigurationError):
    """Heads, layers or ranks that cannot be divided as asked."""


class IdentityError(ConfigurationError):
    """The namespace of the KV cannot be told safely."""


class NameFormatError(HicacheError, ValueError):
    """A text that is not the name of an object."""


class HandleError(HicacheError, RuntimeError):
    """A handle used after close, or in a forked child that does not own its threads."""


class DeadlineExceededError(HicacheError, TimeoutError):
    """A named wait ran past its deadline."""
