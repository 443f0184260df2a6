"""From the records of SGLang's scheduler to the messages of ``flatten``.

SGLang hands out places by tensors of token positions, and its cache is a tree of tokens without hashes. So this half,
in the sender's thread, reads the tensors, hashes the pages of each request, and follows the content of every place.

An example with pages of two tokens. Request ``a`` with tokens 1 2 3 4 5 starts on pages 7, 8 and 9:
``["step", ..., [["a", [7, 8, 9], 0, 5, 5]], ...]``. After the prefill the tree takes the two full pages as
``["publish", "a", [7, 8], [hash of 1 2, hash of 1 2 3 4]]``. If another request had published 1 2 on page 3 before, the
tree would keep page 3. Then ``a`` would use page 3 from then on, which is ``["publish", "a", [3, 8], ...]``. An
eviction of page 3 is ``["evict", [["b", [3]]]]`` if ``b`` needed the room.

Law of this file: a hash is the one that SGLang's own event stream gives the page.
"""

import hashlib
from array import array
from typing import Any, Final

from kvbm_console.tap.flatten import NAME_CHARS_MAX, Flattener
from kvbm_console.tap.recorder import LIVE_MAX

DUMMY_PAGES: Final = 1
"""SGLang keeps its first page for dummy tokens."""
DEVICE_MEDIUM: Final = "GPU"
HOST_MEDIUM: Final = "CPU_PINNED"
"""The medium of HiCache's host tier in SGLang's event stream."""
PEER_MEDIUM: Final = "EXTERNAL"
"""The medium of the blocks that a prefill engine sends."""
PEER_SOURCE: Final = "p2p"
NO_PEER: Final = "2.2.2.2"
"""The host in SGLang's own requests to warm up, which no other engine takes part in."""
_MASK: Final = 2**64 - 1
STATUS: Final = {"FINISH_LENGTH": "FINISHED_LENGTH_CAPPED", "FINISH_ABORT": "FINISHED_ABORTED",
                 "FINISH_MATCHED_TOKEN": "FINISHED_STOPPED", "FINISH_MATCHED_STR": "FINISHED_STOPPED",
                 "FINISHED_MATCHED_REGEX": "FINISHED_STOPPED", "": "FINISHED_LENGTH_CAPPED"}
"""SGLang's classes for the end of a request, and ``""`` for one that another engine goes on with. Another class counts
as an error."""


class PageHashes:
    """The hashes of a request's pages, as far as they were asked for.

    >>> PageHashes(2, None, None).upto(array("q", [1, 2, 3, 4]), 2)
    [3817746824117602890, 14230042624842341274]
    """

    __slots__ = ("_digest", "_namespace", "_page", "found")

    def __init__(self, page: int, extra_key: str | None, cache_salt: str | None) -> None:
        self._page = page
        self._digest = b""
        if cache_salt is not None:
            self._digest = hashlib.sha256(b"sglang-cache-salt-v1\0" + cache_salt.encode()).digest()
        self._namespace = None if extra_key is None else _namespace(extra_key)
        self.found: list[int] = []

    def upto(self, tokens: Any, pages: int) -> list[int]:
        """The hashes of the first pages of these tokens, which continue those of earlier calls."""
        page, digest, found = self._page, self._digest, self.found
        for at in range(len(found), min(pages, len(tokens) // page)):
            part = array("I", tokens[at * page : (at + 1) * page])
            digest = hashlib.sha256(digest + part.tobytes()).digest()
            key = digest[:8]
            if self._namespace is not None:
                key = hashlib.sha256(self._namespace + key).digest()[:8]
            found.append(int.from_bytes(key, "big") & _MASK or 1)
        self._digest = digest
        return found[:pages]


def _namespace(extra_key: str) -> bytes:
    """The seed by which SGLang separates the blocks of an adapter in its event stream."""
    encoded = extra_key.encode()
    return hashlib.sha256(
        b"sglang-kv-event-namespace-v1" + b"\x01" + len(encoded).to_bytes(8, "little") + encoded + b"\x00"
    ).digest()


class _Row:
    """A request that has places."""

    __slots__ = ("decodes", "end", "places", "received")

    def __init__(self) -> None:
        self.places = 0
        """Places that were reported."""
        self.end = 0
        """Tokens that are computed when the last formed step has ended."""
        self.decodes = False
        self.received: list[int] = []
        """Places that another engine has filled for the first step."""


class SglangFlattener(Flattener):
    """The messages of one SGLang scheduler."""

    def __init__(self, *, page: int, caching: bool = True, host: bool = False, half: str = "NULL") -> None:
        super().__init__(block_tokens=page, caching=caching)
        self._half = half
        self._page = page
        self._hashes_of: dict[str, PageHashes] = {}
        self._rows: dict[str, _Row] = {}
        self._tree: dict[int, int] | None = {}
        """Place to hash of the tree's content; None once records were lost, until the tree is cleared."""
        self._host: dict[int, int] | None = {} if host else None
        """As ``_tree``, of HiCache's host tier; None also without it."""
        self._has_host = host
        self._copying: dict[int, tuple[list[Any], list[int]]] = {}
        """Copies that run: the fields of their message, and the host's places for the blocks that are stored."""
        self._loaded: dict[int, int] = {}
        """Places that were loaded for the step that forms now, with their hashes."""
        self._lost = 0

    # --- requests ---

    def _new(self, now: int, request: Any) -> list[Any]:
        if len(self._requests) >= LIVE_MAX:
            return []
        self._requests[request.rid] = request
        return [["new", now, *self._about(request)]]

    def _about(self, request: Any) -> list[Any]:
        prompt = len(request.origin_input_ids)
        session = getattr(request, "session_id", None)
        return [
            request.rid, self._keys(request, prompt // self._page), prompt,
            getattr(request.sampling_params, "max_new_tokens", 0) or 0, getattr(request, "priority", 0) or 0,
            None if session is None else str(session)[:NAME_CHARS_MAX], *self._rooms(request),
        ]

    def _rooms(self, request: Any) -> tuple[str | None, str | None]:
        """The names under which a request's blocks go to another engine and come from another engine."""
        room = getattr(request, "bootstrap_room", None)
        name = None if room is None or getattr(request, "bootstrap_host", None) == NO_PEER else str(room)
        return name if self._half == "PREFILL" else None, name if self._half == "DECODE" else None

    def _keys(self, request: Any, pages: int) -> list[int]:
        """Hashes of the request's first pages; its output is appended to its prompt."""
        hashes = self._hashes_of.get(request.rid)
        if hashes is None:
            hashes = self._hashes_of[request.rid] = PageHashes(
                self._page, getattr(request, "extra_key", None), getattr(request, "cache_salt", None)
            )
        if len(hashes.found) < pages:
            tokens = request.origin_input_ids
            if pages * self._page > len(tokens):
                tokens = tokens + request.output_ids
            hashes.upto(tokens, pages)
        return hashes.found[:pages]

    def _ended(self, now: int, request: Any, reason: str) -> list[Any]:
        self._drop(request.rid)
        self._hashes_of.pop(request.rid, None)
        if self._requests.pop(request.rid, None) is None:
            return []
        return [["finish", now, request.rid, STATUS.get(reason, reason), not reason, 0]]

    def _preempt(self, now: int, name: str) -> list[Any]:
        self._drop(name)
        return [["preempt", now, name]]

    def _drop(self, name: str) -> None:
        self._rows.pop(name, None)
        self._active.discard(name)
        self._skipped.discard(name)

    def _receive(self, now: int, request: Any, computed: int, end: int, places: Any, mark: Any) -> list[Any]:
        """Another engine begins to fill the places from ``computed`` to ``end``."""
        name = request.rid
        if name not in self._requests:
            return []
        row = self._rows[name] = _Row()
        row.received, row.end = self._places_in(places, mark), end
        row.places = len(row.received)
        return [
            ["lookup", now, name, computed, end - computed, True],
            ["found", now, name, {PEER_SOURCE: end - computed}],
            ["alloc", now, name, list(row.received), end - computed, True],
        ]

    # --- the tree ---

    def _publish(self, now: int, request: Any, first: int, places: Any, mark: Any) -> list[Any]:
        ids = self._places_in(places, mark)
        keys = self._keys(request, first + len(ids))[first:]
        if self._tree is not None:
            self._tree.update(zip(ids, keys, strict=False))
        if request.rid not in self._requests or len(keys) != len(ids):
            return []
        return [["publish", now, request.rid, ids, keys]]

    def _evict(self, now: int, freed: list[Any], mark: Any, free: int, wanted: list[tuple[str, int]]) -> list[Any]:
        """Each request wants tokens in this order. A request for which no free tokens were left evicts pages."""
        ids = [place for part in freed for place in self._places_in(part[:: self._page], mark)]
        for place in ids:
            if self._tree is not None:
                self._tree.pop(place, None)
        rows: list[list[Any]] = []
        at = 0
        for name, tokens in wanted:
            lacking = max(0, tokens - free)
            free = max(0, free - tokens)
            count = -(-lacking // self._page)
            if count and ids[at : at + count]:
                rows.append([name, ids[at : at + count]])
                at += count
        if ids[at:]:
            if not rows:
                rows.append([wanted[-1][0] if wanted else "", []])
            rows[-1][1] += ids[at:]
        return [["evict", now, rows]]

    def _cleared(self, now: int, preempted: list[str]) -> list[Any]:
        self._tree, self._host = {}, {} if self._has_host else None
        self._loaded.clear()
        return [["cleared", now, preempted], ["events", now, [["AllBlocksCleared", [], "", 0]]]]

    # --- HiCache's host tier ---

    def _store(
        self, now: int, number: int, request: str, device: Any, host: Any, mark: Any, size_bytes: int | None
    ) -> list[Any]:
        """A copy to the host began. Its blocks are content of the host when it has ended."""
        tree = self._tree or {}
        hashes = [key for place in self._places_in(device, mark) if (key := tree.get(place)) is not None]
        places = self._places_in(host, None)
        return self._begins(now, number, [request, DEVICE_MEDIUM, HOST_MEDIUM, hashes, len(places), size_bytes], places)

    def _load(
        self, now: int, number: int, request: str, device: Any, host: Any, mark: Any, size_bytes: int | None
    ) -> list[Any]:
        """A copy to the device began. SGLang's tree has the device's places at once."""
        held = self._host or {}
        places = self._places_in(device, mark)
        hashes = [key for place in self._places_in(host, None) if (key := held.get(place)) is not None]
        if len(hashes) == len(places):
            self._loaded.update(zip(places, hashes, strict=True))
            if self._tree is not None:
                self._tree.update(zip(places, hashes, strict=True))
        return self._begins(now, number, [request, HOST_MEDIUM, DEVICE_MEDIUM, hashes, len(places), size_bytes], [])

    def _begins(self, now: int, number: int, fields: list[Any], places: list[int]) -> list[Any]:
        self._copying[number] = fields, places
        return [["copy", now, number, *fields]]

    def _save(
        self, now: int, number: int, host: Any, medium: str, size_bytes: int | None
    ) -> list[Any]:
        """A copy from the host to the storage began."""
        held, places = self._host or {}, self._places_in(host, None)
        hashes = [key for place in places if (key := held.get(place)) is not None]
        return self._begins(now, number, ["", HOST_MEDIUM, medium, hashes, len(places), size_bytes], [])

    def _fetch(
        self, now: int, number: int, name: str, first: int, pages: int, medium: str, size_bytes: int | None
    ) -> list[Any]:
        """A copy from the storage to the host began, of pages of a request that waits for it."""
        request = self._requests.get(name)
        hashes = [] if request is None else self._keys(request, first + pages)[first:]
        return self._begins(now, number, [name, medium, HOST_MEDIUM, hashes, pages, size_bytes], [])

    def _fetched(
        self, now: int, number: int, name: str, first: int, host: Any, status: str, error: str
    ) -> list[Any]:
        """It has ended, and the host has new pages of the request from ``first`` on."""
        request, places = self._requests.get(name), self._places_in(host, None)
        hashes = [] if request is None else self._keys(request, first + len(places))[first:]
        self._copying.pop(number, None)
        messages: list[Any] = [["copied", now, number, status, None, error]]
        if self._host is not None and hashes:
            self._host.update(zip(places, hashes, strict=True))
            messages.append(["events", now, [["BlockStored", hashes, HOST_MEDIUM, 0]]])
        return messages

    def _copied(self, now: int, number: int, status: str, *times: Any) -> list[Any]:
        fields, places = self._copying.pop(number, ([], []))
        messages = [["copied", now, number, status, *times]]
        if places and status == "completed":
            hashes = fields[3]
            if self._host is not None and len(hashes) == len(places):
                self._host.update(zip(places, hashes, strict=True))
            messages.append(["events", now, [["BlockStored", hashes, HOST_MEDIUM, 0]]])
        return messages

    def _freed(self, now: int, host: Any) -> list[Any]:
        """The host's places are free again."""
        held = self._host or {}
        hashes = [key for place in self._places_in(host, None) if (key := held.pop(place, None)) is not None]
        return [["events", now, [["BlockRemoved", hashes, HOST_MEDIUM, 0]]]] if hashes else []

    def _places_in(self, positions: Any, mark: Any) -> list[int]:
        """The places of a tensor that has one token position of each page."""
        if mark is not None:
            mark.synchronize()
        page = self._page
        return [position // page for position in positions.tolist()]

    # --- steps ---

    def _extend(
        self, now: int, rows: list[tuple[Any, ...]], positions: Any, mark: Any, running: int
    ) -> list[Any]:
        """A step that prefills.

        Each row is (request, computed, tokens, device prefix or None, its tokens, loaded tokens, those of them that
        came from the storage).
        """
        if mark is not None:
            mark.synchronize()
        positions = positions.tolist()
        page = self._page
        messages: list[Any] = []
        starting: list[Any] = []
        going: list[Any] = []
        at = 0
        for request, computed, count, prefix, tokens, loaded, stored in rows:
            name = request.rid
            if name not in self._requests:
                at += count
                continue
            ids = [
                positions[at + offset] // page for offset in range(-computed % page, count, page)
            ]
            at += count
            row = self._rows.get(name)
            if row is None:
                row = self._rows[name] = _Row()
                if prefix is not None:
                    ids = self._places_in(prefix, None) + ids
                if stored:
                    messages.append(["found", now, name, {"cpu": loaded - stored, "disk": stored}])
                if loaded:
                    messages.append(["alloc", now, name, list(ids), loaded])
                    for place in ids[(computed - loaded) // page : computed // page]:
                        self._loaded.pop(place, None)
                starting.append([name, ids, computed, count, tokens])
            else:
                going.append([name, ids or None, computed, count, 0])
            row.places += len(ids)
            row.end = computed + count
        return messages + self._formed(now, starting, going, [row[0].rid for row in rows], running)

    def _decode(self, now: int, requests: list[Any], positions: Any, mark: Any, running: int) -> list[Any]:
        """A step that decodes: each request computes a token at the position given."""
        starting: list[Any] = []
        going: list[Any] = []
        page = self._page
        read: list[int] | None = None
        names = [request.rid for request in requests]
        for at, name in enumerate(names):
            row = self._rows.get(name)
            if row is None:
                continue
            computed = row.end
            row.end += 1
            fresh = not computed % page
            if fresh:
                if read is None:
                    if mark is not None:
                        mark.synchronize()
                    read = positions.tolist()
                row.places += 1
            ids = [read[at] // page] if fresh and read else None
            if row.received:
                starting.append([name, row.received + (ids or []), computed, 1, computed + 1])
                row.received = []
                continue
            if ids or not row.decodes:
                going.append([name, ids, computed, 1, 0])
            row.decodes = True
        return self._formed(now, starting, going, names, running)

    def _formed(self, now: int, starting: list[Any], going: list[Any], names: list[str], running: int) -> list[Any]:
        skipped, unskipped = self._left_out(dict.fromkeys(names, 1), ())
        step = ["step", now, starting, [], going, [], skipped, unskipped, running, []]
        if not self._loaded:
            return [step]
        # They were loaded for a request that did not start in the end.
        named = ["pool", now, "", [], [], list(self._loaded), list(self._loaded.values())]
        self._loaded.clear()
        return [named, step]

    def _all(
        self, now: int, rows: list[tuple[Any, ...]], steps: int, dropped: int, mark: Any = None, *_: Any
    ) -> list[Any]:
        """Each row is (request, places or None, computed, in the last step, tokens, pages in the tree, receiving)."""
        for memory in (self._requests, self._rows, self._active, self._skipped):
            memory.clear()
        if dropped != self._lost:
            self._tree, self._host, self._lost = None, None, dropped
        live = []
        for request, places, computed, scheduled, tokens, cached, receiving in rows[:LIVE_MAX]:
            name = request.rid
            self._requests[name] = request
            ids = [] if places is None else self._places_in(places, mark)
            if ids:
                row = self._rows[name] = _Row()
                row.places, row.end, row.decodes = len(ids), computed, computed > tokens
                if receiving:
                    row.received = list(ids)
                else:
                    (self._active if scheduled else self._skipped).add(name)
            status = "RUNNING" if ids and not receiving else "WAITING"
            live.append([
                self._about(request), [ids, computed, status, tokens, scheduled, self._keys(request, cached)],
            ])
        for name in self._hashes_of.keys() - self._requests.keys():
            del self._hashes_of[name]
        tree = None if self._tree is None else [[list(self._tree), list(self._tree.values())], []]
        below = None if self._host is None else [[HOST_MEDIUM, list(self._host.values())]]
        return [
            ["all", now, live, steps, dropped, tree, below],
            *(["copy", now, number, *fields] for number, (fields, _) in self._copying.items()),
        ]
