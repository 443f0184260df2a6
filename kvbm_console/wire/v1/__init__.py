"""Generated code of version 1 of the contract; written by ``proto/generate.py``."""
