"""Movers: what copies blocks, one module per kind. An operation carries data, never a callback."""
