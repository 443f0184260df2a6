"""Generated chats and agents on which policies are compared, by name, with the capacities that are tried on each.

Law of this file: a workload is a text that anybody can give to ``simulate --trace``; capacities reach from far too
small to almost enough, since policies differ between.
"""

from functools import cache
from typing import Final

from kvbm_console.planning.cache_only import References, references_of
from kvbm_console.planning.traces import parse_trace

WORKLOADS: Final[dict[str, tuple[str, tuple[int, ...]]]] = {
    "chat-a": ("sessions=80,prompts=6,system=384,user=120,output=180,turns=5,think=45,ramp=1.5,requests=1600,seed=11",
               (1_000, 3_000, 6_000)),
    "chat-b": ("sessions=150,prompts=1,system=128,user=60,output=120,turns=8,think=120,ramp=2,requests=2000,seed=12",
               (1_000, 4_000, 8_000)),
    "chat-c": ("sessions=50,prompts=3,system=512,user=200,output=300,turns=6,think=30,ramp=1,requests=1200,seed=21",
               (1_000, 3_000, 5_000)),
    "chat-d": ("sessions=120,prompts=12,system=256,user=80,output=160,turns=10,think=100,ramp=1,requests=2400,seed=22",
               (2_000, 5_000, 9_000)),
    "chat-e": ("sessions=60,prompts=4,system=512,user=160,output=250,turns=6,think=60,ramp=3,requests=2000",
               (500, 2_000, 4_000, 6_000, 8_000)),
    "chat-f": ("sessions=200,prompts=8,system=256,user=100,output=200,turns=4,think=90,ramp=1,requests=3000,seed=3",
               (1_000, 4_000, 8_000, 12_000)),
    "agents-a": ("sessions=16,prompts=2,system=6000,user=500,output=120,turns=25,think=6,ramp=3,requests=700,seed=13",
                 (1_000, 4_000, 10_000)),
    "agents-b": ("sessions=60,prompts=10,system=3000,user=250,output=80,turns=15,think=10,ramp=0.5,"
                 "requests=900,seed=14",
                 (1_000, 4_000, 10_000)),
    "agents-c": ("sessions=20,prompts=4,system=8000,user=350,output=100,turns=20,think=5,ramp=2,requests=600,seed=23",
                 (1_500, 5_000, 10_000)),
    "agents-d": ("sessions=40,prompts=2,system=2000,user=600,output=200,turns=30,think=15,ramp=1,requests=800,seed=24",
                 (2_000, 6_000, 15_000)),
    "agents-e": ("sessions=24,prompts=3,system=4096,user=400,output=160,turns=30,think=4,ramp=2,requests=1000",
                 (500, 2_000, 6_000, 12_000)),
    "agents-f": ("sessions=100,prompts=5,system=2048,user=300,output=100,turns=12,think=20,ramp=1,requests=2000",
                 (1_000, 4_000, 16_000)),
    "default-a": ("requests=1500,seed=15", (200, 500, 1_000, 1_500)),
    "default-b": ("requests=3000,seed=25", (300, 700, 1_000)),
}
"""Name to (settings of a multi-turn workload, capacities in blocks)."""


@cache
def references_named(name: str) -> References:
    """The references of one of ``WORKLOADS``."""
    return references_of(parse_trace(f"multiturn:{WORKLOADS[name][0]}"))
