"""Beginnings of stories that many tests share, and one whole story."""

from collections.abc import Callable
from typing import Any

from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.ids import ResetMode
from kvbm_console.core.leader import Leader

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


def story(hosts: int = 1, make: Callable[[LeaderConfig, int], Leader] | None = None) -> Script:
    """A whole life: copies down and up, clones, evictions below, preemptions, a reset midway and one at the end."""
    script = Script(g1=12, g2=6, offload_threshold=0.0, hosts=hosts, make=make, twin=make is None)
    for turn in range(2):
        for number, word in enumerate(("abcd", "mnop", "abxy")):
            serve(script, f"s{turn}{number}", word)
        forget_g1(script, f"f{turn}")
        script.arrive(f"a{turn}", "abxy")
        script.admit(f"a{turn}")
        script.step(2)
        script.arrive(f"b{turn}", "mn")
        script.admit(f"b{turn}")
        script.move_all()
        script.step(3)
        script.clone(f"b{turn}", f"c{turn}")
        script.step(2)
        script.preempt(f"b{turn}")
        script.move_all()
        script.finish(f"c{turn}")
        script.reset(ResetMode.PHYSICAL if turn else ResetMode.LOGICAL)
        script.move_all()
    return script


def on_host(wrong: type[Leader], host: int = 1) -> Callable[[LeaderConfig, int], Leader]:
    """Leaders of which one is wrong."""
    return lambda config, number: wrong(config) if number == host else Leader(config, check=True)
