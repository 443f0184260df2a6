"""Live console, debugger and flight recorder for the tiered KV cache of LLM inference engines."""

__version__ = "0.1.0"
