"""Which releases of torch write a file with these keys (snapshot-format 2.1). A file does not say its version."""

from __future__ import annotations

from collections.abc import Iterable

from memtrace.model import TorchRange

RELEASES = (
    "1.13", "2.0", "2.1", "2.2", "2.3", "2.4", "2.5", "2.6", "2.7", "2.8", "2.9",
    "2.10", "2.11", "2.12", "2.13", "2.14", "2.15",
)  # fmt: skip

# A key that every release from the named one on writes: its presence is a lower bound, its absence an upper one.
_EVENT_KEYS = {"time_us": "2.2", "compile_context": "2.8", "user_metadata": "2.10", "pool_id": "2.12"}
_TOP_KEYS = {"allocator_settings": "2.3", "external_annotations": "2.5", "host_segments": "2.14"}
_SETTING_KEYS = {"graph_capture_record_stream_reuse": "2.9", "max_round_threshold": "2.13"}
# A key that is written only sometimes: its presence is a lower bound, its absence says nothing.
_OPTIONAL_EVENT_KEYS = {"forward_frames": "2.11", "internal_metadata": "2.15"}


def infer(
    *,
    top: Iterable[str] | None,
    settings: Iterable[str] | None,
    blocks: Iterable[str],
    events: Iterable[str],
    actions: Iterable[str],
) -> TorchRange:
    """The range of releases, from the sets of keys seen. `top` None: the file is a bare list of segments."""
    lower, upper = [0], [len(RELEASES) - 1]
    event_keys, block_keys = set(events), set(blocks)

    def bound(keys: set[str], table: dict[str, str]) -> None:
        for key, release in table.items():
            index = RELEASES.index(release)
            if key in keys:
                lower.append(index)
            else:
                upper.append(index - 1)

    if block_keys:
        bound(block_keys, {"requested_size": "2.0", "address": "2.1"})
    if top is not None:
        lower.append(RELEASES.index("2.0"))
        bound(set(top), _TOP_KEYS)
    if settings is not None:
        bound(set(settings), _SETTING_KEYS)
    if event_keys:
        bound(event_keys, _EVENT_KEYS)
    lower += [RELEASES.index(release) for key, release in _OPTIONAL_EVENT_KEYS.items() if key in event_keys]
    if "annotate" in set(actions):
        lower.append(RELEASES.index("2.14"))
    low, high = max(lower), min(upper)
    newest = len(RELEASES) - 1
    if low > high:  # keys that no release writes together (another exporter, or edited by hand)
        return TorchRange(RELEASES[low], None)
    return TorchRange(RELEASES[low], None if high == newest else RELEASES[high])
