"""A small real model whose ranks write and read the store."""
