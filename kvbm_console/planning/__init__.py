"""What would have happened: traces through the tiered cache in virtual time, policies and capacities side by side.

Law of this package: no clock but the virtual one decides anything, nothing is awaited, and the same input gives the
same output, byte by byte.
"""
