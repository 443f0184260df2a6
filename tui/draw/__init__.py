"""Drawing primitives: spans, glyph tables, bars, trends and tables. Law: pure functions of their arguments."""
