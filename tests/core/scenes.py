"""Beginnings of stories that many tests share."""

from typing import Any

from .engine_model import BLOCK
from .script import Script


def serve(script: Script, name: str, word: str, steps: int = 2) -> None:
    """A request from its arrival to its end, its blocks copied."""
    script.arrive(name, word)
    assert script.admit(name)
    script.move_all()
    script.step(steps)
    script.move_all()
    script.finish(name)
    script.move_all()


def forget_g1(script: Script, name: str = "filler") -> None:
    """A request whose prompt has no full block to keep takes all places that nobody holds and gives them back."""
    script.arrive(name, "", tail=script.engine.pool.free_blocks * BLOCK - 1)
    assert script.admit(name)
    script.finish(name)


def stored(word: str = "abcd", **config: Any) -> Script:
    """A leader whose G2 holds ``word`` and whose G1 does not any more."""
    script = Script(**{"g1": 8, "g2": 16, "offload_threshold": 0.0, **config})
    serve(script, "first", word)
    forget_g1(script)
    return script


def two_tiers(**config: Any) -> Script:
    """``abcdef`` stands whole in G3, its first four blocks also in G2, and nothing of it in G1."""
    script = Script(**{"g1": 8, "g2": 6, "g3": 16, "offload_threshold": 0.0, "staging_share": 1.0, **config})
    serve(script, "first", "abcdef")
    serve(script, "second", "mn", steps=1)
    forget_g1(script)
    return script
