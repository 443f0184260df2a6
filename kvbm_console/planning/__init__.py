"""Traces through the tiered cache in virtual time, with policies and capacities side by side.

Law of this package: only the virtual clock decides, and nothing is awaited. The same input gives the same output, byte
by byte.
"""
