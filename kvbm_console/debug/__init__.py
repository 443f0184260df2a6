"""The debugger around the core: sessions, leases, deadlines of the wall clock."""
