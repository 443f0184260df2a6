"""The daemon: assembly, endpoints, RPC methods, the order of an end."""
