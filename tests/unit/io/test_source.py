"""open_pickle(): every packing, every wrong kind of input, and the limits."""

from __future__ import annotations

import base64
import contextlib
import gzip
import io
import itertools
import json
import lzma
import os
import pickle
import sys
import threading
import tracemalloc
import zipfile
from pathlib import Path

import pytest

from memtrace.errors import (
    GitLfsPointerError,
    MissingFileError,
    NotAPickleError,
    NotARecordingError,
    NotASnapshotError,
    TooLargeError,
    TruncatedError,
    UnreadableError,
)
from memtrace.io import opening, source
from memtrace.io.source import open_pickle
from memtrace.units import MiB

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PICKLE = pickle.dumps({"segments": [], "device_traces": [[{"addr": i * 7919, "n": str(i)} for i in range(20_000)]]}, 4)


def html(data: bytes) -> bytes:
    """What torch's _memory_viz.py writes."""
    padded = data + b"\0" * (3 - len(data) % 3)
    files = json.dumps([{"name": "snapshot.pickle", "base64": base64.b64encode(padded).decode()}])
    return f"""
<!DOCTYPE html>
<html>
<head>
</head>
<body>
<script type="module">
import {{add_local_files}} from "https://cdn.jsdelivr.net/gh/pytorch/pytorch@main/torch/utils/viz/MemoryViz.js"
const local_files = {files}
add_local_files(local_files, 'Active Memory Timeline')
</script>
</body>
""".encode()


PACKINGS = {"gzip": gzip.compress, "xz": lzma.compress, "zstd": zstd.compress, "html": html}


def read(path, **options) -> bytes:
    with open_pickle(path, **options) as stream:
        return stream.reader.read()


@pytest.fixture
def write(tmp_path):
    def to_file(data: bytes, name: str = "snapshot.pickle") -> str:
        path = tmp_path / name
        path.write_bytes(data)
        return str(path)

    return to_file


def test_a_plain_pickle_comes_as_it_is(write):
    path = write(PICKLE)
    with open_pickle(path) as stream:
        assert isinstance(stream.reader, io.BufferedReader)
        assert pickle.load(stream.reader) == pickle.loads(PICKLE)
        assert stream.info == source.SourceInfo(path, len(PICKLE))


@pytest.mark.parametrize("packing", PACKINGS)
def test_is_unpacked_by_content_not_by_name(write, packing):
    packed = PACKINGS[packing](PICKLE)
    path = write(packed, "misleading.txt")
    with open_pickle(path) as stream:
        assert stream.reader.read().rstrip(b"\0") == PICKLE
        assert stream.info.file_bytes == len(packed)


@pytest.mark.parametrize(("outer", "inner"), list(itertools.product(PACKINGS, repeat=2)))
def test_packings_nest(write, outer, inner):
    assert read(write(PACKINGS[outer](PACKINGS[inner](PICKLE)))).rstrip(b"\0") == PICKLE


def test_four_layers_and_no_more(write):
    four = gzip.compress(lzma.compress(gzip.compress(zstd.compress(PICKLE))))
    assert read(write(four)) == PICKLE
    with pytest.raises(NotAPickleError, match="more than 4 times"):
        read(write(gzip.compress(four)))


@pytest.mark.parametrize("packing", ["gzip", "xz", "zstd"])
def test_all_members_are_read_and_padding_and_trailing_bytes_are_not(write, packing):
    pack = PACKINGS[packing]
    members = pack(PICKLE[:1000]) + b"\0" * 8 + pack(b"") + pack(PICKLE[1000:])
    assert read(write(members)) == PICKLE
    assert read(write(members + b"trailing bytes")) == PICKLE


def test_frames_to_skip_are_skipped(write):
    skipped = b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc"
    assert read(write(skipped + zstd.compress(PICKLE) + skipped)) == PICKLE


@pytest.mark.parametrize("cut", range(14))
def test_html_is_found_wherever_reads_happen_to_end(write, cut):
    page = html(PICKLE)
    before = opening.BUFFER_BYTES - page.index(b'"base64"') - cut
    assert read(write(b"<!--".ljust(before) + page)).rstrip(b"\0") == PICKLE


def test_html_may_break_lines_and_has_a_first_file(write):
    encoded = base64.encodebytes(PICKLE).replace(b"/", b"\\/")
    page = b'\xef\xbb\xbf<html>[{"base64" : "' + encoded + b'"}, {"base64": "AAAA"}]'
    assert read(write(page)) == PICKLE


# Standard input and pipes


def stdin_of(data: bytes, terminal: bool = False) -> io.TextIOWrapper:
    stream = io.TextIOWrapper(io.BytesIO(data))
    stream.isatty = lambda: terminal  # type: ignore[method-assign]
    return stream


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_standard_input_is_read_and_left_open(monkeypatch, pack):
    packed = pack(PICKLE)
    monkeypatch.setattr(sys, "stdin", stdin_of(packed))
    with open_pickle("-") as stream:
        assert stream.reader.read() == PICKLE
        assert stream.info == source.SourceInfo("-", len(packed))
    assert not sys.stdin.closed


def test_a_terminal_as_standard_input_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "stdin", stdin_of(b"", terminal=True))
    with pytest.raises(UnreadableError, match="terminal"):
        read("-")


def test_no_standard_input_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UnreadableError, match="closed"):
        read("-")


@contextlib.contextmanager
def writing(path: str | int, data: bytes):
    def write_all():
        with contextlib.suppress(BrokenPipeError), open(path, "wb") as pipe:
            pipe.write(data)

    writer = threading.Thread(target=write_all)
    writer.start()
    yield
    writer.join()


needs_fifo = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")


@needs_fifo
def test_a_named_pipe_is_read(tmp_path):
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    with writing(path, gzip.compress(PICKLE)), open_pickle(path) as stream:
        assert stream.reader.read() == PICKLE


@needs_fifo
def test_a_named_pipe_nobody_writes_to_does_not_hang(tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "FIFO_PATIENCE_S", 0.05)
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    with pytest.raises(UnreadableError, match="nothing writes"):
        read(path)


@pytest.mark.skipif(not os.path.isdir("/dev/fd"), reason="no /dev/fd here")
@pytest.mark.parametrize("data", [b"\x80\x02N.", PICKLE])
def test_process_substitution_is_read(data):
    reading, written = os.pipe()
    try:
        with writing(written, data):
            assert read(f"/dev/fd/{reading}") == data
    finally:
        os.close(reading)


@pytest.mark.parametrize("device", ["/dev/null", "/dev/zero"])
@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="no such devices here")
def test_a_device_is_refused(device):
    with pytest.raises(UnreadableError, match="device"):
        read(device)


# What is not a snapshot


def test_a_missing_file_suggests_near_names(write):
    path = write(PICKLE, "rank0.pickle")
    with pytest.raises(MissingFileError) as caught:
        read(path.replace("rank0", "rnak0"))
    assert path in caught.value.hint


@pytest.mark.parametrize("path", ["no/such/directory/x.pickle", "zzzzzz", "https://example.org/x.pickle"])
def test_a_missing_file_always_has_a_hint(path):
    with pytest.raises(MissingFileError) as caught:
        read(path)
    assert caught.value.hint


@pytest.mark.parametrize("path", ["x" * 5000, "nul\0in.pickle"])
def test_an_impossible_path_is_an_error_of_ours(path):
    with pytest.raises(UnreadableError):
        read(path)


def test_no_permission_is_said(write, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    path = write(PICKLE)
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UnreadableError, match="permission denied"):
        read(path)


def test_a_read_error_is_said(write, monkeypatch):
    class Broken(io.FileIO):
        def readinto(self, _):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(io, "FileIO", Broken)
    with pytest.raises(UnreadableError, match="Input/output error"):
        read(write(PICKLE))


def test_a_directory_names_a_snapshot_in_it(write, tmp_path):
    path = write(PICKLE)
    with pytest.raises(NotARecordingError) as caught:
        read(tmp_path)
    assert path in caught.value.hint


def zip_archive() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", PICKLE)
    return buffer.getvalue()


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize(
    ("data", "error", "said"),
    [
        (b"", NotAPickleError, "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", GitLfsPointerError, "pointer"),
        (zip_archive(), NotAPickleError, "torch.save"),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.", NotAPickleError, "torch.save"),
        (b' {"segments": []}', NotAPickleError, "JSON"),
        (b"[1]", NotAPickleError, "JSON"),
        (b"Hello, world\n", NotAPickleError, "text"),
        (b"<!DOCTYPE html><html></html>", NotAPickleError, "web page"),
        (b"<html>" + b"x" * 100_000, NotAPickleError, "web page"),
        (b"BZh91AY", NotAPickleError, "bunzip2"),
        (b"\0" * 100, NotAPickleError, "begins with"),
        (b"\x89PNG\r\n\x1a\n", NotAPickleError, "begins with"),
        (pickle.dumps({"a": 1}, 0), NotASnapshotError, "protocol 0"),
        (pickle.dumps({"a": 1}, 1), NotASnapshotError, "protocol 0"),
        (html(b""), NotAPickleError, "begins with"),
    ],
)
def test_other_content_is_called_what_it_is(write, pack, data, error, said):
    with pytest.raises(error) as caught:
        read(write(pack(data)))
    assert said in f"{caught.value.message} {caught.value.hint}"
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_cut_off_file_is_truncated(write, packing):
    packed = PACKINGS[packing](PICKLE)
    with pytest.raises(TruncatedError):
        read(write(packed[: len(packed) // 2]))


@pytest.mark.parametrize("packing", ["gzip", "xz"])
def test_a_cut_off_checksum_is_truncated(write, packing):
    with pytest.raises(TruncatedError):
        read(write(PACKINGS[packing](PICKLE)[:-3]))


@pytest.mark.parametrize(("packing", "at"), [("gzip", -6), ("gzip", 5000), ("xz", 5000), ("zstd", 6), ("html", 5000)])
def test_damage_is_seen(write, packing, at):
    packed = bytearray(PACKINGS[packing](PICKLE))
    packed[at] ^= 0xFF
    with pytest.raises((UnreadableError, TruncatedError)):
        read(write(bytes(packed)))


# Limits


@pytest.mark.parametrize("packing", ["gzip", "xz", "zstd"])
def test_empty_parts_are_skipped_but_not_without_end(write, packing):
    empty = b"\x50\x2a\x4d\x18\0\0\0\0" if packing == "zstd" else PACKINGS[packing](b"")
    assert read(write(empty * 900 + PACKINGS[packing](PICKLE))).startswith(PICKLE)
    with pytest.raises(UnreadableError, match="empty"):
        read(write(empty * 100_000 + PACKINGS[packing](PICKLE)))


def zeros(pack, mebibytes: int) -> bytes:
    """A pickle that begins well and goes on with zeros, in a thousandth of the size."""
    return pack(b"\x80\x04") + pack(b"\0" * MiB) * mebibytes


@pytest.mark.parametrize("packing", ["gzip", "xz", "zstd"])
def test_what_grows_too_much_is_refused_early_and_in_little_memory(write, packing):
    path = write(zeros(PACKINGS[packing], 400))
    sizes = []
    tracemalloc.start()
    try:
        with open_pickle(path) as stream, pytest.raises(TooLargeError, match="300 times"):
            sizes.extend(len(piece) for piece in iter(lambda: stream.reader.read(MiB), b""))
        assert tracemalloc.get_traced_memory()[1] < 16 * MiB
    finally:
        tracemalloc.stop()
    assert 15 * MiB <= sum(sizes) <= max(17 * MiB, 301 * Path(path).stat().st_size)


def test_growth_counts_from_the_outermost_file(write):
    path = write(gzip.compress(zeros(gzip.compress, 400)))
    with pytest.raises(TooLargeError, match="300 times"):
        read(path)


def test_growth_is_limited_for_pipes_too(monkeypatch):
    monkeypatch.setattr(sys, "stdin", stdin_of(zeros(gzip.compress, 400)))
    with pytest.raises(TooLargeError, match="300 times"):
        read("-")


def test_growth_below_16_mib_is_fine(write):
    assert len(read(write(zeros(gzip.compress, 15)))) == 15 * MiB + 2


@pytest.mark.parametrize("pack", [bytes, *PACKINGS.values()])
def test_more_than_the_allowed_size_is_refused(write, pack):
    path = write(pack(PICKLE))
    allowed = len(PICKLE) * 2 if pack is html else len(PICKLE)
    assert read(path, max_bytes=allowed).startswith(PICKLE)
    with pytest.raises(TooLargeError) as caught:
        read(path, max_bytes=len(PICKLE) - 1)
    assert "--max-size" in caught.value.hint


def test_standard_input_has_the_same_limit(monkeypatch):
    monkeypatch.setattr(sys, "stdin", stdin_of(PICKLE))
    with pytest.raises(TooLargeError):
        read("-", max_bytes=1000)


def test_an_xz_file_that_needs_a_huge_dictionary_is_refused(write):
    packed = lzma.compress(PICKLE, filters=[{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 512 * MiB}])
    with pytest.raises(TooLargeError, match="memory"):
        read(write(packed))


def test_a_zstd_file_that_needs_a_huge_window_is_refused(write):
    # A frame header whose window is 2 GiB, the beginning of a block after it.
    with pytest.raises(TooLargeError, match="memory"):
        read(write(b"\x28\xb5\x2f\xfd\x00\xa8\x01\x00\x00"))


# Progress


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_progress_counts_the_bytes_of_the_file(write, pack):
    calls = []
    packed = pack(PICKLE)
    read(write(packed), progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (len(packed), len(packed))
    assert calls == sorted(calls)


def test_progress_of_a_pipe_has_no_total(monkeypatch):
    calls = []
    monkeypatch.setattr(sys, "stdin", stdin_of(PICKLE))
    read("-", progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (len(PICKLE), None)


def test_progress_can_cancel(write):
    class Cancelled(Exception):
        pass

    def cancel(done, total):
        raise Cancelled

    with pytest.raises(Cancelled):
        read(write(PICKLE), progress=cancel)


def test_the_file_is_closed_whatever_happens(write):
    path = write(PICKLE)
    with pytest.raises(ZeroDivisionError), open_pickle(path) as stream:
        raise ZeroDivisionError
    with pytest.raises(ValueError, match="closed"):
        stream.reader.read()
