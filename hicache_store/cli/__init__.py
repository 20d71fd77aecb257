"""The ``hicache`` command."""
