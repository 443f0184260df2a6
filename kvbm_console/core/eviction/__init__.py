"""Eviction policies behind one interface; ``policy`` has the interface, the names and the parameters."""
