"""``learned``: its tree is what the prompts say, names of blocks do not matter, and a worth is the best of all spans.

Law of this file: the tree is recounted from its keys, and worths are computed again by trying every span.
"""

import random

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as some

from kvbm_console.core.eviction import returns
from kvbm_console.core.eviction.learned import Learned, Node
from kvbm_console.core.eviction.returns import OCTAVES, RUNGS, Returns
from kvbm_console.planning.cache_only import References, replay
from tests.core.eviction.trees import SECOND_NS, paths, traces
from tests.core.eviction.trees import chain as chain_of

# --- the tree ---


def recounted(policy: Learned) -> None:
    """Every count of every node is that of its keys and children."""
    seen: list[int] = []
    for node in policy._nodes:
        assert node.parent is not None
        assert node.parent.children[node.keys[0]] is node
        assert node.held == sum(key in policy.resident for key in node.keys)
        assert not [key for key in node.keys[node.end :] if key in policy.resident]
        seen += node.keys
        assert all(policy._node[key] is node for key in node.keys)
    assert sorted(seen) == sorted(policy._node)
    for node in [policy._root, *policy._nodes]:
        children = list(node.children.values())
        assert node.fan == sum(child.real for child in children)
        assert node.busy == sum(occupied(child) for child in children)
        waiting = [entry for entry in policy._heap if entry[3] is node and entry[2] == node.entry]
        assert len(waiting) == (node is not policy._root and node.held > 0 and node.busy == 0)


def occupied(node: Node) -> bool:
    return node.held > 0 or any(map(occupied, node.children.values()))


_VERBS = some.sampled_from(["touch", "use", "insert", "evict"])


@settings(max_examples=80)
@example(
    taken=[("use", [0, 0, 0], 1), ("insert", [2, 2], 1), ("insert", [2, 0], 1), ("evict", [0], 2),
           ("touch", [2, 2], 1)], fit_every=3,
)
@given(taken=some.lists(some.tuples(_VERBS, paths, some.integers(1, 5)), max_size=50), fit_every=some.integers(3, 60))
def test_the_tree_is_what_the_prompts_say(taken: list[tuple[str, list[int], int]], fit_every: int) -> None:
    policy = Learned(12)
    policy.ghosts_max = policy._prune_at = 15
    for now, (verb, path, count) in enumerate(taken):
        keys = chain_of(path)
        if policy._fit_at > policy._references + fit_every:
            policy._fit_at = policy._references + fit_every
        if verb == "touch":
            policy.touch(keys, now * SECOND_NS)
        elif verb == "use":
            policy.use(keys, now * SECOND_NS)
            if "insert" not in (step[0] for step in taken[:now]):  # it may name blocks without what leads to them
                prefix, known = policy._match(keys)  # divides a node where the keys leave it, so they must not
                assert known == len(keys)
                assert [key for node in prefix for key in node.keys] == keys
        elif verb == "insert":
            beside = next((key for key in reversed(keys[:-1]) if key in policy.resident), None)
            fresh = [key for key in keys if key not in policy.resident]
            policy.insert(fresh, beside, now * SECOND_NS)
            assert policy.resident >= set(fresh)
        else:
            before = policy.export()
            victims = policy.victims(count)
            assert (victims is None) == (len(policy.resident) < count)
            assert policy.export() == before
            policy.forget(victims or ())
        recounted(policy)


@settings(max_examples=40)
@given(refs=traces(most=120), capacity=some.integers(6, 14), seed=some.integers(0, 9))
def test_names_of_blocks_do_not_matter(refs: References, capacity: int, seed: int) -> None:
    names = sorted({key for keys in refs.keys for key in keys})
    others = dict(zip(names, random.Random(seed).sample(range(2**60), len(names)), strict=True))
    renamed = msgspec.structs.replace(refs, keys=[[others[key] for key in keys] for keys in refs.keys])

    def learning() -> Learned:
        policy = Learned(capacity)
        policy._fit_at = 20
        return policy

    assert replay(refs, learning(), capacity).hits_of == replay(renamed, learning(), capacity).hits_of


@given(order=some.permutations(range(5)))
def test_an_answer_belongs_to_its_session_in_whatever_order_it_is_stored(order: list[int]) -> None:
    policy = Learned(100)
    prompt, answer = [1, 2, 3], [11, 12, 13, 14, 15]
    policy.touch(prompt, 0)
    for at in order:
        beside = next(key for key in reversed(prompt + answer[:at]) if key in policy.resident)
        policy.insert([answer[at]], beside, 1)
        recounted(policy)
    policy.touch([*prompt, *answer, 20, 21], SECOND_NS)
    recounted(policy)
    assert policy._node[21].turn == 2
    policy.touch([*prompt, *answer, 20, 21, 22, 23], 2 * SECOND_NS)
    assert policy._node[23].turn == 3


def test_a_session_that_ended_goes_before_one_that_goes_on() -> None:
    """Chats of three turns: the policy learns that the third is the last, and keeps those that have had one."""
    policy, turns = Learned(200), {}
    now = 0
    for chat in range(400):
        for number in (chat, chat - 1, chat - 2):
            if number >= 0:
                turn = turns[number] = turns.get(number, 0) + 1
                policy.touch([1_000 * number + block for block in range(1, 1 + 8 * turn)], now)
                excess = len(policy.resident) - 200
                if excess > 0:
                    policy.forget(policy.victims(excess) or ())
            now += 4 * SECOND_NS
    ended = [key for key in policy.resident if turns[key // 1_000] == 3]
    going = [key for key in policy.resident if turns[key // 1_000] < 3]
    assert len(going) == 8 + 16
    assert set(policy.victims(len(ended)) or ()) == set(ended)


def test_what_was_fetched_ahead_stays_until_its_request_comes() -> None:
    policy = Learned(10)
    for number in range(300):
        policy.touch([number], number * SECOND_NS)
        if number > 2:
            policy.forget([number - 3])
    policy.insert([7], None, 300 * SECOND_NS)
    assert policy.victims(3) == [297, 298, 299]
    policy.use([7], 301 * SECOND_NS)
    assert policy._node[7].awaited == 0


# --- worths ---


@given(
    chances=some.lists(some.floats(0.0, 1.0), min_size=OCTAVES, max_size=OCTAVES), first=some.integers(0, 20),
    length=some.integers(1, 15),
)
def test_a_worth_is_the_best_of_all_spans(chances: list[float], first: int, length: int) -> None:
    end = first + length
    best = []
    for start in range(first, end):
        had = spent = rate = 0.0
        alive = 1.0
        for octave in range(start, end):
            width = 1e-6 * 2.0 ** (octave + (octave == first))
            had += alive * chances[octave]
            spent += alive * width * (1.0 - chances[octave] / 2)
            alive *= 1.0 - chances[octave]
            rate = max(rate, had / spent)
        best.append(rate)
    worths = returns._worths(chances, first, end)
    assert len(worths) == RUNGS
    for rung in range(2 * first + 1, 2 * end - 1):
        low, high = best[(rung - 1) // 2 - first], best[(rung + 1) // 2 - first]
        near = high if rung % 2 == 0 else low
        far = low if rung % 2 == 0 else high
        expected = 0.75 * near + 0.25 * far
        if min(chances[first:end]) >= 0.0 and max(chances[first:end]) < 0.7:  # else a span may be too unlikely
            assert abs(worths[rung] - expected) <= 1e-6 * expected + 1e-12


def test_a_class_without_counts_leans_on_the_others() -> None:
    learnt = Returns()
    known, unknown = returns.session_class(2, SECOND_NS), returns.session_class(2, 100 * SECOND_NS)
    for _ in range(200):
        learnt.began(known)
        learnt.climbed(known, 0, 40)
        learnt.again(known, 40)
    learnt.fit()
    assert 0.0 < learnt.worths(unknown)[38] <= learnt.worths(known)[38]
    again = Returns()
    again.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(learnt.export())))
    assert again.worths(known) == learnt.worths(known)
    assert again.export() == learnt.export()


def test_a_policy_from_a_keyframe_puts_blocks_where_the_policy_itself_does() -> None:
    """Two answers stand behind one prompt, and blocks come between it and one of them."""
    policy = Learned(100)
    policy.touch([1, 2], 0)
    policy.insert([10], 1, 0)
    policy.insert([20], 1, 0)
    policy.insert([30], 2, 0)
    again = Learned(100)
    again.restore(policy.export())
    for one in (policy, again):
        one.insert([40], 2, 0)
    assert again.export() == policy.export()
