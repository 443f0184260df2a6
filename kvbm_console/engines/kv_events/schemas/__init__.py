"""The schemas of KV-cache events, a module for each; ``batch`` finds them here."""
