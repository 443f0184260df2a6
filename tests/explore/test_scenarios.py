"""Scenarios are plain data, and shrinking keeps what it is told to keep."""

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm_console.explore.report import reproduction, slug
from kvbm_console.explore.scenario import BLOCK, PROFILES, Abort, Arrive, CacheReset, Scenario, generate, tokens_of
from kvbm_console.explore.shrink import shrink

SEEDS = st.integers(0, 2**40)


@given(st.sampled_from(sorted(PROFILES)), SEEDS)
def test_a_seed_is_a_scenario_and_its_text_is_the_scenario(profile: str, seed: int) -> None:
    scenario = generate(profile, seed)
    assert scenario == generate(profile, seed)
    assert Scenario.from_json(scenario.to_json()) == scenario


@given(st.sampled_from(sorted(PROFILES)), SEEDS)
def test_every_request_fits_into_the_device_and_actions_are_in_order(profile: str, seed: int) -> None:
    scenario = generate(profile, seed)
    steps = [action.step for action in scenario.actions]
    assert any(isinstance(action, Arrive) for action in scenario.actions)
    assert steps == sorted(steps)
    whole: dict[str, int] = {"": 0}
    for action in sorted(scenario.actions, key=lambda one: getattr(one, "name", "")):
        if isinstance(action, Arrive):
            whole[action.name] = whole[action.after] + action.tokens + action.output
            assert action.tokens
            assert whole[action.name] <= (scenario.device_blocks - 2) * BLOCK
            assert scenario.fits
            assert len(tokens_of(action.prompt)) == action.tokens


@given(SEEDS)
def test_prompts_share_tokens_exactly_as_far_as_their_segments_do(seed: int) -> None:
    prompts = [one.prompt for one in generate("press", seed).actions if isinstance(one, Arrive)]
    for one in prompts:
        for other in prompts:
            same = 0
            for (first, count), (second, others) in zip(one, other, strict=False):
                if first != second:
                    break
                same += min(count, others)
                if count != others:
                    break
            assert tokens_of(one)[:same] == tokens_of(other)[:same]


@given(SEEDS, st.integers(0, 5))
def test_shrinking_keeps_the_verdict_and_finds_the_smallest_cause(seed: int, which: int) -> None:
    """The fault here: one certain request and any reset together."""
    scenario = generate("reset", seed)
    names = [one.name for one in scenario.actions if isinstance(one, Arrive)]
    wanted = names[which % len(names)]

    def ends(candidate: Scenario) -> str | None:
        has = any(isinstance(one, Arrive) and one.name == wanted for one in candidate.actions)
        reset = any(isinstance(one, CacheReset) for one in candidate.actions)
        return "broken" if has and reset else None

    left = [4_000]

    def more() -> bool:
        left[0] -= 1
        return left[0] > 0

    if ends(scenario) is None:
        return
    best = shrink(scenario, "broken", ends, more)
    assert ends(best) == "broken"
    assert len(best.actions) == 2
    assert best.size <= scenario.size


def test_shrinking_removes_requests_whose_jobs_and_blocks_matter() -> None:
    """The fault here: the last request's job is the slowest of several, and the requests fill the host tier."""
    scenario = Scenario(
        64, 15, 1, 64, tuple(Arrive(at, f"r{at}", ((at, 40),), 1) for at in range(6)), (0, 3, 6, 9, 12, 20))

    def ends(candidate: Scenario) -> str | None:
        copies, actions = candidate.copies, candidate.actions
        slow = copies[(len(actions) - 1) % len(copies)] == max(copies) > min(copies)
        tokens = sum(one.tokens for one in actions if isinstance(one, Arrive))
        return "broken" if slow and tokens >= candidate.host_blocks * BLOCK else None

    assert ends(scenario) == "broken"
    left = iter(range(2_000))
    assert len(shrink(scenario, "broken", ends, lambda: next(left, None) is not None).actions) == 1


def test_a_reproduction_is_a_whole_module_that_needs_nothing_of_this_program() -> None:
    scenario = Scenario(8, 8, 1, 32, (Arrive(0, "a", ((1, 20),), 2), Abort(3, "a")))
    source = reproduction(scenario, {"kv_connector": "OffloadingConnector"}, (), "vLLM 0", "progress: deadlock")
    tree = ast.parse(source)
    imported = {
        name.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
    } | {(node.module or "").split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert "kvbm_console" not in imported
    space: dict[str, object] = {"__name__": "reproduction"}
    exec(compile(tree, "reproduction", "exec"), space)
    assert space["SCENARIO"].to_json() == scenario.to_json()  # type: ignore[attr-defined]
    with pytest.raises(Exception, match=r"vLLM has no vllm\.__version__ here"):  # only now vLLM is wanted
        space["test_reproduction"]()  # type: ignore[operator]


def test_a_signature_makes_one_directory_name() -> None:
    assert slug("right content: written by load, torn store") == "right-content-written-by-load-torn-store"
