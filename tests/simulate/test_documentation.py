"""kvbm_console/simulation/REFERENCE.md is what the tables say, and every key of the documents is in them."""

from kvbm_console.simulation.documentation import FILE, text


def test_the_file_is_fresh() -> None:
    assert FILE.read_text(encoding="utf-8") == text(), "run python -m kvbm_console.simulation.documentation"
