"""Places that keep opaque bytes under opaque names."""
