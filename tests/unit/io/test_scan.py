"""Which pickles are harmless, which are not, and what is said about the others: by the walk in Python, and natively."""

from __future__ import annotations

import copy
import io
import pickle
import pickletools
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrace.errors import NotAPickleError, NotASnapshotError, SourceError, TruncatedError, UnsafePickleError
from memtrace.io.read import NATIVE
from memtrace.io.roles import MAX_DEPTH
from memtrace.io.scan import scan as scan_in_python
from memtrace.io.scan import scan_start


def scan(data: bytes | memoryview) -> None:
    """Both walks; what one refuses the other refuses, with the same error."""
    native, python = refusal_of(natively, bytes(data)), refusal_of(scan_in_python, bytes(data))
    if NATIVE:
        assert type(native) is type(python), (native, python)
        if native is not None and "more values" not in native.message:
            assert native.message == python.message, "in the same words, at the same byte"
    if python is not None:
        raise python


def natively(data: bytes) -> None:
    if NATIVE:
        from memtrace.io.native import walked

        walked(io.BufferedReader(io.BytesIO(data)))


def refusal_of(walk, data: bytes) -> SourceError | None:
    try:
        walk(data)
    except SourceError as error:
        return error
    return None


FRAMES = [{"filename": "train.py", "line": 7, "name": "step"}, {"filename": "ünïcode.py", "line": 0, "name": ""}]
EVENT = {"action": "alloc", "addr": 0x7F00_0000_0000, "size": 512, "stream": 0, "frames": FRAMES}
SNAPSHOT = {
    "segments": [{"address": 2**63, "segment_pool_id": (0, 1), "is_expandable": False, "frames": FRAMES, "blocks": []}],
    "device_traces": [[EVENT, {**EVENT, "addr": 1}], []],
    "allocator_settings": {"garbage_collection_threshold": 0.5, "roundup": {}, "name": None, "pinned": True},
}

scalars = st.one_of(st.none(), st.booleans(), st.floats(allow_nan=False), st.text(), st.integers(-(2**63), 2**63 - 1))
pool_ids = st.tuples(st.integers(0, 2**31), st.integers(0, 2**31))
snapshot_shaped = st.recursive(
    scalars | pool_ids,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=20), inner, max_size=6),
    max_leaves=40,
)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("optimize", [bytes, pickletools.optimize])
def test_accepts_what_torch_writes(protocol, optimize):
    scan(optimize(pickle.dumps(SNAPSHOT, protocol)))


@settings(max_examples=200, deadline=None)
@given(value=snapshot_shaped, protocol=st.integers(2, 5))
def test_accepts_any_plain_data_with_string_keys(value, protocol):
    scan(pickle.dumps({"segments": [], "anything": value}, protocol))
    scan(pickle.dumps({"anything": value}, protocol))


def test_accepts_lists_longer_than_one_batch_and_shared_stacks():
    frames = [dict(FRAMES[0]) for _ in range(30)]
    scan(
        pickle.dumps(
            {"device_traces": [[{"action": "alloc", "addr": i, "size": 1, "frames": frames} for i in range(5000)]]}, 4
        )
    )


def test_accepts_containers_kept_only_when_complete_as_torchscript_does():
    text = b"X\x01\x00\x00\x00"
    scan(
        b"\x80\x02}("
        + (text + b"aq\x00" + b"](K\x01K\x02eq\x01")
        + (text + b"bq\x02" + b"h\x01")
        + (text + b"cq\x03" + b"K\x01K\x02\x86q\x04")
        + (text + b"dq\x05" + b"](h\x01h\x04e")
        + b"u."
    )


def test_ignores_what_follows_the_end():
    scan(pickle.dumps(SNAPSHOT) + b"\0\0cos\nsystem\n")


def test_takes_a_memoryview():
    scan(memoryview(pickle.dumps(SNAPSHOT)))


class Runs:
    def __reduce__(self):
        return print, ("run",)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\x80\x02cos\nsystem\n.", "'os.system'"),
        (pickle.dumps(Runs(), 4), "'builtins.print'"),
        (pickle.dumps(Runs(), 2), "'__builtin__.print'"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "'os.system'"),
        (b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93.", "'os.system'"),
        (b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94h\x00h\x01\x93.", "by name"),
        (b"\x80\x02c\x1b]52;c;AA\x07\nx\n.", r"\x1b"),
        (b"\x80\x02(cos\nsystem\no.", "'os.system'"),
        (b"\x80\x02(ios\nsystem\n.", "INST"),
        (b"\x80\x02(o.", "OBJ"),
        (b"\x80\x02N)R.", "REDUCE"),
        (b"\x80\x02N}b.", "BUILD"),
        (b"\x80\x02N)\x81.", "NEWOBJ"),
        (b"\x80\x04N)}\x92.", "NEWOBJ_EX"),
        (b"\x80\x02P1\n.", "PERSID"),
        (b"\x80\x02NQ.", "BINPERSID"),
        (b"\x80\x02\x82\x01.", "EXT1"),
        (b"\x80\x02\x83\x01\x01.", "EXT2"),
        (b"\x80\x02\x84\x01\x01\x01\x01.", "EXT4"),
    ],
)
def test_refuses_everything_that_runs_code_and_names_it(data, said):
    with pytest.raises(UnsafePickleError) as caught:
        scan(data)
    assert said in caught.value.message
    assert caught.value.message.isprintable()
    assert caught.value.hint


def test_says_where_the_refused_operation_is():
    with pytest.raises(UnsafePickleError, match="at byte 2 "):
        scan(b"\x80\x02cos\nsystem\n.")


@pytest.mark.parametrize(
    "value",
    [
        b"bytes",
        bytearray(b"x"),
        {1, 2},
        frozenset("a"),
        {1: 2},
        {(1, 2): 3},
        {None: 1},
        {"k" * 2000: 1},
        2**80,
        2**4000,
    ],
    ids=repr,
)
def test_another_pickle_is_no_snapshot(value):
    with pytest.raises(NotASnapshotError):
        scan(pickle.dumps({"anything": [value]}, 5))


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02" + rest
        for rest in (b"I1\n.", b"L1L\n.", b"F1.0\n.", b"S'a'\n.", b"U\x01a.", b"(l.", b"(d.", b"0.", b"1.")
    ],
)
def test_operations_that_no_snapshot_has_are_refused(data):
    with pytest.raises(NotASnapshotError):
        scan(data)


@pytest.mark.parametrize(
    "data", [b"", b"hello", b"{}", b"\x00" * 100, b"\x80\x01N.", b"\x80\x06N.", b"\x80\xffN.", b"\x80\x02\xff."]
)
def test_other_bytes_are_no_pickle(data):
    with pytest.raises(NotAPickleError):
        scan(data)


@pytest.mark.parametrize("protocol", [2, 4])
def test_every_cut_is_seen(protocol):
    data = pickle.dumps(SNAPSHOT, protocol)
    for length in range(1, len(data)):
        with pytest.raises(TruncatedError):
            scan(data[:length])


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02.",  # nothing to return
        b"\x80\x02(.",
        b"\x80\x02e.",  # no mark
        b"\x80\x02u.",
        b"\x80\x02(e.",  # a mark, no list
        b"\x80\x02]a.",
        b"\x80\x02](Na.",  # the list is below the mark
        b"\x80\x02}\x8c\x01as.",
        b"\x80\x02}(\x8c\x01au.",  # a key without a value
        b"\x80\x02}(Ne.",  # appending to a dict
        b"\x80\x02](\x8c\x01aNu.",
        b"\x80\x02N\x87.",
        b"\x80\x02(N\x86.",
        b"\x80\x02N(N\x86.",  # one of the two is below the mark
        b"\x80\x02N(.",
        b"\x80\x02NN.",  # two values at the end
        b"\x80\x02h\x00.",  # never kept
        b"\x80\x02]q\x00h\x01.",
        b"\x80\x02j\xff\xff\xff\xff.",
        b"\x80\x02\x94.",
        b"\x80\x04N\x80\x04.",
        b"\x80\x02\x8b\xff\xff\xff\xff.",  # negative length
        b"\x80\x02]q\x00q\x01.",
        b"\x80\x04\x95" + struct.pack("<Q", 100) + b"N.",
        b"\x80\x04\x95" + struct.pack("<Q", 2**63) + b"N.",
        b"\x80\x04\x95" + struct.pack("<Q", 3) + b"N.",  # a frame that goes on behind the end
    ],
)
def test_damage_is_seen(data):
    with pytest.raises(TruncatedError):
        scan(data)


@pytest.mark.parametrize("data", [b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"a.", b"\x80\x04X\xff\xff\xff\xffa."])
def test_texts_longer_than_any_of_torch_are_refused(data):
    with pytest.raises(NotASnapshotError, match="text"):
        scan(data)


@pytest.mark.parametrize("value", [b"N", b"K\x07", b"\x8a\x00", b"G12345678", b"\x88"])
def test_numbers_are_not_kept(value):
    with pytest.raises(NotASnapshotError, match="keeps"):
        scan(b"\x80\x04" + value + b"\x94.")


def shared(top):
    """Of the dicts and lists of a snapshot, one that stands in two places."""
    data = copy.deepcopy(SNAPSHOT)
    top(data)
    return pickle.dumps(data)


@pytest.mark.parametrize(
    "top",
    [
        lambda data: data["device_traces"][0].append(data["device_traces"][0][0]),
        lambda data: data["device_traces"].append(data["device_traces"][0]),
        lambda data: data["segments"].append(data["segments"][0]),
        lambda data: data["device_traces"][1].append(data["segments"][0]),
        lambda data: data["segments"][0]["frames"].append(data["device_traces"][0][0]),
        lambda data: data["segments"][0].update(frames=data["segments"][0]["blocks"]),
        lambda data: data.update(anything=data["segments"]),
        lambda data: data.update(external_annotations=data["segments"][0]["frames"]),
        lambda data: data["segments"][0].update(blocks=data["segments"][0]["frames"]),
        lambda data: data["allocator_settings"].update(table=data["segments"][0]["frames"][0]),
    ],
)
def test_what_torch_writes_once_stands_in_one_place(top):
    with pytest.raises(NotASnapshotError):
        scan(shared(top))


@pytest.mark.parametrize(
    "top",
    [
        lambda data: data["segments"][0].update(more=data["segments"][0]["frames"]),
        lambda data: data["device_traces"][0][0].update(freed_frames=list(FRAMES), frames=FRAMES),
        lambda data: data["device_traces"][0][1].update(frames=data["device_traces"][0][0]["frames"]),
        lambda data: data.update(anything=[FRAMES, FRAMES[0], (0, 1)]),
    ],
)
def test_stacks_and_frames_may_stand_anywhere(top):
    scan(shared(top))


@pytest.mark.parametrize(
    "data",
    [
        {"allocator_settings": {}, "later": {}, "segments": []},
        {"allocator_settings": {"only": {"table": 1}}, "segments": []},
        {"unknown": {}, "segments": [], "later": {"anything": []}},
        {"device_traces": [[], [EVENT], []]},
        {"segments": [{"blocks": [{"size": 1}]}]},
        {"segments": [{"blocks": [{"history": [{"addr": 1}]}]}]},
        [{"blocks": []}],
        [],
    ],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_short_dicts_and_lists_are_told_apart(data, protocol):
    scan(pickle.dumps(data, protocol))


@pytest.mark.parametrize("put", [b"r\xff\xff\xff\x7f", b"r\x00\x00\x01\x00", b"q\x01", b"q\x00Nq\x00"])
def test_memo_numbers_must_be_the_next_one(put):
    with pytest.raises(UnsafePickleError):
        scan(b"\x80\x04)" + put + b".")


def itself():
    cycle: list = []
    cycle.append({"a": [cycle]})
    return {"anything": cycle}


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04}\x8c\x01x]\x94h\x00as.",
        b"\x80\x04}\x8c\x01x]\x94(h\x00es.",
        b"\x80\x04}\x8c\x01x}\x94\x8c\x01ah\x00ss.",
        b"\x80\x04}\x8c\x01x]\x94(]\x94]\x94h\x01aaes.",  # the second holds the first, then the first the second
        pickle.dumps(itself(), 2),
        pickle.dumps(itself(), 4),
    ],
)
def test_what_contains_itself_is_no_snapshot(data):
    with pytest.raises(NotASnapshotError, match="itself"):
        scan(data)


def nested(depth, value=None):
    for _ in range(depth):
        value = [value]
    return value


def test_depth_is_limited_exactly():
    scan(pickle.dumps({"anything": nested(MAX_DEPTH)}))
    with pytest.raises(NotASnapshotError, match="nests"):
        scan(pickle.dumps({"anything": nested(MAX_DEPTH + 1)}))


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04N" + b"]" * 1000 + b"a" * 999 + b".",
        b"\x80\x04N" + b"](" * 1000 + b"e" * 1000 + b".",
        b"\x80\x04" + b"(" * 1000 + b"t" * 1000 + b".",
        b"\x80\x04N" + b"\x85" * 1000 + b".",
        b"\x80\x04)" + b"\x85" * 1000 + b".",
        b"\x80\x02N]q\x00"
        + b"".join(b"]r%bj%ba" % (struct.pack("<I", i), struct.pack("<I", i - 1)) for i in range(1, 1000))
        + b".",
    ],
    ids=["appended", "marks", "marked tuples", "tuples", "empty", "through the memo"],
)
def test_depth_is_limited_however_it_is_made(data):
    with pytest.raises(NotASnapshotError, match="nests"):
        scan(data)


@pytest.mark.parametrize("unit", [b"]", b"}", b"N\x85", b"]Na"])
def test_no_more_containers_than_a_file_of_that_length_should_hold(unit):
    with pytest.raises(TruncatedError, match="more than one value"):
        scan(b"\x80\x04N" + unit * 1000 + b"N.")
    with pytest.raises(UnsafePickleError, match="more lists and dicts"):
        scan(b"\x80\x04N" + unit * 1_000_000 + b"N.")


@pytest.mark.parametrize("unit", [b"N", b"K\x07", b"h\x00"])
def test_no_more_values_at_once_than_a_file_of_that_length_should_hold(unit):
    with pytest.raises(UnsafePickleError, match="more values"):
        scan(b"\x80\x04}\x8c\x01a\x94](" + unit * 2_000_000 + b"es.")


def test_the_densest_plausible_snapshot_is_accepted():
    event = {"action": "alloc", "addr": 0x7F00_0000_0000, "size": 2, "frames": []}
    scan(
        pickle.dumps(
            {"device_traces": [[{**event, "addr": 0x7F00_0000_0000 + i, "frames": []} for i in range(50_000)]]}, 4
        )
    )


def test_the_start_of_a_longer_pickle_need_not_end():
    data = pickle.dumps(SNAPSHOT, 4)
    for length in range(2, len(data)):
        scan_start(data[:length])
    with pytest.raises(UnsafePickleError):
        scan_start(b"\x80\x04Nr\xff\xff\xff\x7f" + b"N" * 100)


@settings(max_examples=500, deadline=None)
@given(data=st.binary(max_size=200), protocol=st.integers(2, 5))
def test_never_raises_anything_else(data, protocol):
    error = refusal_of(scan_in_python, b"\x80" + bytes([protocol]) + data)
    assert error is None or error.hint
