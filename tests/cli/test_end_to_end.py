"""The program as a user meets it: real processes on a real Unix socket."""

import json
import re
import signal
from pathlib import Path

import pytest

from tests.cli.programs import output, run, serving

ENDLESS = ("--workload", "multiturn")
CONTROL_TIMEOUT_S = 60


def test_serve_until_done_prints_the_summary(tmp_path: Path) -> None:
    text = output(tmp_path, "serve", "--workload", "multiturn:requests=40", "--speed", "max", "--exit-when-done",
                  "--check", "--record", "run")
    for word in ("requests    40 finished", "slots       none live", "completed", "g1", "g2", "published", "written"):
        assert word in text


def test_the_summary_as_json_is_the_same_at_any_speed(tmp_path: Path) -> None:
    found = []
    for speed in ("max", "10"):
        text = output(tmp_path, "serve", "--workload", "multiturn:requests=25", "--speed", speed, "--exit-when-done",
                      "--format", "json")
        found.append(json.loads(text))
    assert found[0] == found[1]
    assert found[0]["requests_finished"] == 25
    assert found[0]["violations"] == 0


def test_demo_without_a_terminal_prints_lines_and_a_summary(tmp_path: Path) -> None:
    text = output(tmp_path, "demo", "--seconds", "2.5", "--speed", "4")
    lines = text.splitlines()
    assert sum(bool(re.match(r" +\d+\.\ds  ", line)) for line in lines) >= 1
    assert any(line.startswith("requests ") for line in lines)


def write_returning_prompts(path: Path) -> None:
    """Eight prompts that come back in turn, and short ones all the time.

    The eight do not fit into 24 device blocks, so each is loaded from the host tier when it returns; any two of them
    do, so a held one is never in the way and no pressure ends its hold.
    """
    lines = []
    for at_ms in range(0, 400_000, 250):
        turn = at_ms // 250
        if turn % 2:
            lines.append({"timestamp": at_ms, "input_length": 500, "output_length": 6, "hash_ids": [100_000 + turn]})
        else:
            first = 10 * (turn // 2 % 8) + 1
            shared = list(range(first, first + 4))
            lines.append({"timestamp": at_ms, "input_length": 2_100, "output_length": 6,
                          "hash_ids": [*shared, 200_000 + turn]})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_slot_is_stopped_seen_and_let_go(tmp_path: Path) -> None:
    write_returning_prompts(tmp_path / "trace.jsonl")
    trace = ("--workload", "mooncake:trace.jsonl", "--g1-blocks", "24", "--g2-blocks", "64")
    with serving(tmp_path, *trace, "--speed", "4") as daemon:
        status = daemon.json("status")
        assert status["tiers"]["g1"]["capacity_blocks"] > 0
        assert status["holds"] == []
        assert "TIER" in daemon.output("status")

        lines = daemon.output("tail", "--format", "jsonl", "--since", "0", "--count", "20").splitlines()
        events = [json.loads(line) for line in lines]
        assert [event["seq"] for event in events] == list(range(20))
        assert all({"seq", "at_ns", "kind"} <= set(event) for event in events)
        head = daemon.json("status")["stream"]["head_seq"]
        texts = daemon.output("tail", "--count", "5").splitlines()
        assert len(texts) == 5
        assert int(texts[0].split()[0]) > head, "without --since it begins with the next event"
        refused = run(tmp_path, "tail", "--since", "999999999")
        assert refused.returncode == 2
        assert "--since must be at most" in refused.stderr

        said = daemon.output("break", "set", "--to", "onboarding", "--once", "--max-hold", "100s")
        assert "onboarding" in said
        held = daemon.until("SlotHeld")
        (hold,) = daemon.json("holds")
        assert hold["id"] == held["hold"]
        assert hold["slot"] == held["slot"]
        (listed,) = daemon.json("break", "list")
        assert (listed["to_state"], listed["enabled"], listed["hits"]) == ("onboarding", False, 1)
        assert hold["request"] in daemon.output("holds")
        before = daemon.json("status")["stream"]["head_seq"]
        lines = daemon.output("tail", "--format", "jsonl", "--count", "400").splitlines()
        others = {json.loads(line).get("slot") for line in lines} - {None, hold["slot"]}
        assert others, "other slots go on while one is held"
        assert daemon.json("status")["stream"]["head_seq"] > before

        assert "continued" in daemon.output("continue")
        assert daemon.json("holds") == []
        assert daemon.output("continue", hold["id"]).startswith("it has ended already: continued by ")
        assert "nothing is held" in daemon.output("continue")
        assert "removed 1" in daemon.output("break", "clear")
        assert daemon.json("break", "list") == []


def test_disarm_releases_and_mutes_everything(tmp_path: Path) -> None:
    with serving(tmp_path, *ENDLESS, "--g1-blocks", "8192", "--speed", "4") as daemon:
        daemon.output("break", "set", "--to", "decoding", "--max-hold", "100s")
        held = daemon.until("SlotHeld")
        assert daemon.output("step", held["hold"]) == "stepped\n"
        assert daemon.until("HoldReleased")["why"] == "stepped"
        daemon.output("disarm")
        assert daemon.json("holds") == []
        assert [entry["enabled"] for entry in daemon.json("break", "list")] == [False]
        daemon.output("break", "enable", "1")
        assert [entry["enabled"] for entry in daemon.json("break", "list")] == [True]


def test_a_daemon_ends_in_order_when_it_is_told_to(tmp_path: Path) -> None:
    with serving(tmp_path, *ENDLESS, "--record", "run") as daemon:
        daemon.until("SlotMoved")
        daemon.output("break", "set", "--to", "decoding")
        status, out, err = daemon.stop()
        assert status == 0, err
        assert "requests" in out
        assert "Traceback" not in err
    info = json.loads(output(tmp_path, "rec", "info", "run", "--format", "json"))
    assert {"first_seq", "last_seq", "events", "stimuli", "gaps", "versions"} <= set(info)
    assert info["gaps"] == []
    output(tmp_path, "rec", "verify", "run")


@pytest.mark.parametrize("end", ["signal", "done", "seconds"])
def test_an_end_in_order_leaves_no_active_segment(end: str, tmp_path: Path) -> None:
    flags = {"signal": ENDLESS, "done": ("--workload", "multiturn:requests=60", "--exit-when-done"),
             "seconds": (*ENDLESS, "--seconds", "1.5")}[end]
    with serving(tmp_path, *flags, "--speed", "max", "--record", "run", "--segment-size", "1MB") as daemon:
        if end == "signal":
            daemon.until("SlotClosed")
            status, out, err = daemon.stop()
        else:
            out, err = daemon.process.communicate(timeout=CONTROL_TIMEOUT_S)
            status = daemon.process.returncode
    assert (status, "not sealed" in out) == (0, False), err
    info = json.loads(output(tmp_path, "rec", "info", "run", "--format", "json"))
    assert [one["sealed"] for one in info["segments"]] == [True] * len(info["segments"])
    assert info["segments"]
    assert not list((tmp_path / "run").glob("*.active"))


def test_a_second_daemon_on_the_same_socket_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path, *ENDLESS) as daemon:
        second = run(tmp_path, "serve", *ENDLESS)
        assert second.returncode == 2
        assert second.stderr.startswith("kvbm-console: a daemon is listening on unix:")
        assert len(second.stderr.splitlines()) == 1
        assert daemon.json("status")["stream"]["incarnation"]


def test_a_file_in_the_place_of_the_socket_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("data")
    done = run(tmp_path, "serve", *ENDLESS, "--listen", "unix:precious")
    assert done.returncode == 2
    assert "no socket" in done.stderr
    assert (tmp_path / "precious").read_text() == "data"


def test_a_reader_that_closes_the_pipe_ends_tail_quietly(tmp_path: Path) -> None:
    import subprocess

    from tests.cli.programs import PROGRAM, environment

    with serving(tmp_path, *ENDLESS, "--speed", "8"):
        tail = subprocess.Popen(
            [PROGRAM, "tail", "--since", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment(tmp_path),
        )
        assert tail.stdout is not None
        tail.stdout.readline()
        tail.stdout.close()
        assert tail.stderr is not None
        errors = tail.stderr.read()
        tail.stderr.close()
        assert tail.wait(CONTROL_TIMEOUT_S) == 0
        assert errors == ""


def test_ctrl_c_ends_tail_with_130(tmp_path: Path) -> None:
    import subprocess

    from tests.cli.programs import PROGRAM, environment

    with serving(tmp_path, *ENDLESS, "--speed", "8"):
        tail = subprocess.Popen(
            [PROGRAM, "tail", "--since", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment(tmp_path),
        )
        assert tail.stdout is not None
        tail.stdout.readline()
        tail.send_signal(signal.SIGINT)
        _, errors = tail.communicate(timeout=CONTROL_TIMEOUT_S)
        assert tail.returncode == 130
        assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ("this is no json\n", "trace.jsonl"),
        ('{"timestamp": 0, "input_length": -5, "output_length": 1, "hash_ids": [1]}\n', "trace.jsonl"),
        ('{"timestamp": 0}\n', "trace.jsonl"),
    ],
)
def test_a_bad_line_of_a_trace_is_named(tmp_path: Path, content: str, names: str) -> None:
    good = '{"timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [1, 2]}\n'
    (tmp_path / "trace.jsonl").write_text(good + content)
    done = run(tmp_path, "serve", "--workload", "mooncake:trace.jsonl", "--speed", "max", "--exit-when-done")
    assert done.returncode == 2, done.stderr
    sentence = done.stderr.splitlines()[-1]
    assert sentence.startswith("kvbm-console: ")
    assert names in sentence
    assert "2" in sentence, "the number of the line"
    assert "Traceback" not in done.stderr


def test_a_file_that_is_no_recording_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "x.mcap").write_bytes(b"not a recording at all")
    for command in (("rec", "info"), ("rec", "verify"), ("replay",)):
        done = run(tmp_path, *command, "x.mcap")
        assert done.returncode == 2, done.stderr
        assert "x.mcap" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_console_without_a_terminal_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path, *ENDLESS):
        done = run(tmp_path, "attach")
        assert done.returncode == 2
        assert "terminal" in done.stderr


def test_the_real_trace_runs(tmp_path: Path, mooncake_trace: Path) -> None:
    text = output(tmp_path, "serve", "--workload", f"mooncake:{mooncake_trace}", "--limit", "150", "--speed", "max",
                  "--exit-when-done", "--format", "json")
    summary = json.loads(text)
    assert summary["requests_finished"] == 150
    assert summary["violations"] == 0
    assert summary["rejected"] == 0
