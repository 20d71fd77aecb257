"""The strided copy."""
