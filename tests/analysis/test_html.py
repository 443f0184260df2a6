"""A page holds the run, asks no network for anything, can be used by keys, and without names holds no name.

Law of this file: the content is read from the file without a browser; what a person sees and does is tried in Chromium.
"""

import base64
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import CliRunner

from kvbm_console.analysis.anonymous import anonymous
from kvbm_console.analysis.colours import DARK, LIGHT
from kvbm_console.analysis.export import export
from kvbm_console.analysis.export.html import PAGE, _Prompts
from kvbm_console.analysis.walk import evidence_of, walk
from kvbm_console.cli.main import cli
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import pack_hashes, pack_ids, unpack_hashes
from kvbm_console.core.config import BreakpointSpec, LeaderConfig
from kvbm_console.core.events import SlotOpened
from kvbm_console.core.ids import Note, SlotState
from kvbm_console.recording.positions import parse_position
from kvbm_console.recording.reader import Recording
from kvbm_console.testing import Driven
from tests.analysis.browser import needs_chromium, tab
from tui.desk import OVERVIEW, RECORD, SLOT

ROOT: Final = Path(__file__).resolve().parents[2]
NAMES: Final = sorted(path.stem for path in (ROOT / "recordings").glob("*.mcap"))
SECRET: Final = "hush4711"


def page_of(path: Path, directory: Path, *words: str) -> Path:
    out = directory / f"{path.stem}.html"
    done = CliRunner().invoke(cli, ["rec", "export", str(path), "--to", "html", "--out", str(out), *words])
    assert done.exit_code == 0, done.output
    return out


def data_of(page: Path) -> dict[str, Any]:
    """The run inside a page, with its differences added up."""
    found = re.search(r'<script id="data" type="text/plain">([^<]*)</script>', page.read_text(encoding="utf-8"))
    assert found is not None
    run: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(found[1])))
    for column in ("seq", "at"):
        total = 0
        run["events"][column] = [total := total + step for step in run["events"][column]]
    return run


def strings(value: Any) -> Iterator[str]:
    """Every string inside a value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from strings(key)
            yield from strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_every_event_and_request(name: str, tmp_path: Path) -> None:
    path = ROOT / "recordings" / f"{name}.mcap"
    run = data_of(page_of(path, tmp_path))
    recording = Recording.open(path)
    known = [event for batch in recording.events() for event in batch]
    assert set(run["events"]["seq"]) <= {event.seq for event in known}
    assert len(run["events"]["seq"]) == (len(known) if not recording.gaps else len(run["events"]["seq"]))
    assert len(run["gaps"]) == len(recording.gaps)
    opened = {event.request for event in known if isinstance(event, SlotOpened)}
    assert {slot["request"] for slot in run["slots"]} >= (opened if not recording.gaps else set())
    assert not re.search("https?://", (tmp_path / f"{name}.html").read_text(encoding="utf-8"))


def test_a_page_has_the_colours_of_the_console(tmp_path: Path) -> None:
    page = page_of(ROOT / "recordings" / f"{NAMES[0]}.mcap", tmp_path).read_text(encoding="utf-8")
    for colours in (DARK, LIGHT):
        for name, role in (("g1", "g1"), ("g2", "g2"), ("g3", "g3"), ("caution", "caution"), ("bg", "background"),
                           ("prefill", "fill.prefill"), ("decode", "fill.decode"), ("preempted", "preempted")):
            assert f" --{name}:{colours[role]};" in page
    wanted = set(re.findall(r"var\(--([a-z0-9]+)\)", page)) | set(re.findall(r'css\("--([a-z0-9]+)"\)', page))
    assert wanted <= set(re.findall(r" --([a-z0-9]+):#", page))


def test_a_hundred_thousand_events_stay_below_two_megabytes(tmp_path: Path) -> None:
    """By the bytes of an event of a busy run; one of 99,908 events had 945,214 bytes."""
    page = page_of(ROOT / "recordings" / "screens" / "run.mcap", tmp_path)
    events = len(data_of(page)["events"]["seq"])
    assert events > 10_000
    assert (page.stat().st_size - PAGE.stat().st_size) / events * 100_000 + PAGE.stat().st_size < 2_000_000


def test_the_tree_of_prefixes_counts_each_block_of_each_prompt() -> None:
    path = ROOT / "recordings" / "thrash.mcap"
    prompts = _Prompts()
    walk(evidence_of(Recording.open(path)), (prompts,))
    nodes = prompts.tree()
    asked = [unpack_hashes(event.hashes)[: event.prompt_tokens // 16]
             for batch in Recording.open(path).events() for event in batch if isinstance(event, SlotOpened)]
    assert sum(blocks * requests for _, _, blocks, requests, _ in nodes) == sum(map(len, asked))
    assert sum(blocks for _, _, blocks, _, _ in nodes) == len({key for prompt in asked for key in prompt})


def test_a_large_run_is_refused_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbm_console.analysis.export.html.EVENTS_MAX", 100)
    done = CliRunner().invoke(cli, ["rec", "export", str(ROOT / "recordings" / "thrash.mcap"), "--to", "html", "--out",
                                    str(tmp_path / "x.html")])
    assert done.exit_code == 2
    assert "a page holds at most 100 events, and thrash.mcap has 713: rec cut makes" in done.stderr
    assert not list(tmp_path.iterdir())


def test_replay_takes_the_link_of_a_page() -> None:
    linked = parse_position("#seq=232&slot=5")
    assert (linked.value, linked.slot) == (232, 5)
    assert parse_position("run.html#seq=7").value == 7
    shown = CliRunner().invoke(cli, ["replay", str(ROOT / "recordings" / "thrash.mcap"), "--at", "#seq=100&slot=1",
                                     "--format", "json"])
    assert json.loads(shown.stdout)["stream"]["head_seq"] == 100


@pytest.mark.parametrize(("link", "opened"), [
    ("#seq=100&slot={slot}", True), ("page.html#seq=100&slot=999", False), ("#seq=100", False),
])
def test_a_link_opens_the_replay_at_its_slot(link: str, opened: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: dict[str, Any] = {}
    monkeypatch.setattr("kvbm_console.cli.output.require_terminal", lambda *_: None)
    monkeypatch.setattr("tui.app.run_console", lambda session, **more: begun.update(more))
    path = ROOT / "recordings" / "thrash.mcap"
    slot = next(iter(Recording.open(path).state_at(100).slots.values()))
    at = link.format(slot=slot.slot)
    done = CliRunner().invoke(cli, ["replay", str(path), "--at", at], prog_name="kvbm-console")
    assert done.exit_code == 0, done.output
    assert (begun["view"], begun["request"]) == ((SLOT, slot.request) if opened else (OVERVIEW, None))


@pytest.mark.parametrize(("flags", "view", "at_end", "plays"), [
    ((), RECORD, True, False), (("--speed", "2"), OVERVIEW, False, True), (("--at", "5"), OVERVIEW, None, False),
])
def test_a_replay_opens_at_its_end_where_every_view_has_its_past(
    flags: tuple[str, ...], view: int, at_end: bool | None, plays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: dict[str, Any] = {}
    monkeypatch.setattr("kvbm_console.cli.output.require_terminal", lambda *_: None)
    monkeypatch.setattr("tui.app.run_console", lambda session, **more: begun.update(more, session=session))
    done = CliRunner().invoke(cli, ["replay", str(ROOT / "recordings" / "local-only.mcap"), *flags])
    assert done.exit_code == 0, done.output
    playback = begun["session"].playback
    place = 5 if at_end is None else playback.last_seq if at_end else playback.first_seq
    assert (begun["view"], playback.position_seq, playback.playing) == (view, place, plays)


# --- without names ---


def whispered(directory: Path) -> Path:
    """A recording whose every field that can hold a name holds ``SECRET``."""
    run = Driven("whispered", directory, LeaderConfig(g2_blocks=8, offload_threshold=0.0), 16)
    name, keys = f"req-{SECRET}", pack_hashes([5, 6])
    run.dispatcher.submit(st.LeaseGranted, f"{SECRET}@host")
    run.dispatcher.submit(st.BreakpointsReplaced, f"{SECRET}@host", (BreakpointSpec(
        to_state=SlotState.PREFILLING, request=f"*{SECRET[:5]}*", condition=f'request = "{name}"', name=SECRET,
        log=f"{SECRET} {{request}}",
    ),), SECRET)
    run.tell(st.RequestArrived, name, keys, 40, 4, 0, SECRET)
    run.tell(st.MatchRequested, name, 0)
    run.tell(st.BlocksAllocated, name, pack_ids([0, 1, 2]), 0)
    run.tell(st.IterationScheduled, 1, 1, (name,), (), (), (), (), (), (name,), (40,), (), (), b"", 1, 0)
    run.tell(st.IterationFinished, 1, (name,), (2,), pack_ids([0, 1]), keys)
    for operation in list(run.orders):
        run.fail(operation, f"{SECRET} could not be copied")
    run.tell(st.MatchRequested, f"nobody-{SECRET}", 0)
    run.tell(st.MismatchReported, name, 0, 0, pack_hashes([5]), "overwritten", "load", 1, 2, 3, f"store of {name}", "e",
             f"{SECRET}")
    run.dispatcher.submit(st.NoteReported, Note.LOOP_BLOCKED, f"{SECRET} blocked it")
    return run.path


@pytest.mark.parametrize("form", ["html", "jsonl", "chrome"])
def test_nothing_of_a_name_is_left_in_any_field(form: str, tmp_path: Path) -> None:
    path = whispered(tmp_path / "tapes")
    evidence = evidence_of(Recording.open(path))
    plain, hushed = tmp_path / "plain", tmp_path / "hushed"
    export(evidence, form, plain)
    export(anonymous(evidence), form, hushed)
    for file, wanted in ((plain, True), (hushed, False)):
        text = json.dumps(data_of(file)) if form == "html" else file.read_text()
        assert (SECRET in text) == wanted
        assert (SECRET[:5] in text) == wanted


def test_the_same_name_has_the_same_hash_and_nothing_else_changes(tmp_path: Path) -> None:
    path = ROOT / "recordings" / "thrash.mcap"
    plain = data_of(page_of(path, tmp_path))
    (tmp_path / "again").mkdir()
    hushed = data_of(page_of(path, tmp_path / "again", "--anonymize"))
    names = {one["request"]: other["request"] for one, other in zip(plain["slots"], hushed["slots"], strict=True)}
    assert len(set(names.values())) == len(names)
    assert not [text for text in strings(hushed["slots"]) if "chat" in text]
    for part in ("stays", "copies", "tiers", "gaps", "kinds"):
        assert plain[part] == hushed[part], part
    for column in ("seq", "at", "kind", "slot"):
        assert plain["events"][column] == hushed["events"][column]
    assert [one["lint"] for one in plain["doctor"]["findings"]] == [one["lint"] for one in hushed["doctor"]["findings"]]


# --- in a browser ---


@needs_chromium
@pytest.mark.asyncio
async def test_a_page_draws_itself_without_a_network_and_answers_keys(tmp_path: Path) -> None:
    page_file = page_of(ROOT / "recordings" / "cases" / "stuck-rank.mcap", tmp_path)
    address = page_file.as_uri()
    async with tab() as page:
        await page.open(address)
        assert page.errors == []
        assert [one for one in page.requests if one != address] == []
        assert "chat.1" in await page.value("document.getElementById('findings').innerText")
        assert await page.value("location.hash") == ""
        assert "SlotMoved" in await page.value("document.querySelector('#story .sel').innerText")
        await page.press(".")
        assert await page.value("location.hash") == "#seq=233&slot=5"
        await page.press("j")
        assert (await page.value("location.hash")).endswith("&slot=6")
        before = await page.value("view.until - view.from")
        await page.press("+")
        assert await page.value("view.until - view.from") == pytest.approx(before / 2)
        await page.press("t")
        assert await page.value("document.documentElement.dataset.theme") == "dark"
        drawn = "new Set(document.getElementById('lanes').getContext('2d').getImageData(0, 0, 1200, 300).data).size"
        assert await page.value(drawn) > 20
        await page.open(address + "#seq=237&slot=5")
        assert "event 237" in await page.value("document.getElementById('now').textContent")
        assert "chat.1, slot 5" in await page.value("document.getElementById('who').textContent")
        assert [one for one in page.requests if not one.startswith(address)] == []


@needs_chromium
@pytest.mark.asyncio
@pytest.mark.parametrize("dark", [False, True])
async def test_a_page_is_light_or_dark_as_the_reader_has_it(dark: bool, tmp_path: Path) -> None:
    page_file = page_of(ROOT / "recordings" / "gap.mcap", tmp_path)
    async with tab(dark=dark) as page:
        await page.open(page_file.as_uri())
        ground = await page.value("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 200) == dark
        assert page.errors == []
