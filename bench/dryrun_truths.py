"""How exact `memtrace dryrun` is: what was recorded on a real GPU, dry-run, and held against torch's counters there.

    python bench/dryrun_truths.py --python ENVIRONMENT/bin/python [--deepspeed FOLDER ...] [--only 'gpt2-*,oom']
                                  [--jobs 2] [--output TABLE.md] [--figures FILE.json] [--command TEMPLATE]

ENVIRONMENT has the versions of the recordings (fixtures/MANIFEST.toml: torch 2.11, transformers, peft, accelerate,
DeepSpeed). Rows of another DeepSpeed need `--deepspeed FOLDER`, made by
`DS_BUILD_OPS=0 pip install --no-build-isolation --no-deps --target FOLDER deepspeed==VERSION`; without it they are left
out. The jobs are fixtures/make, the command of each is the manifest's `made`; truths lie in fixtures/ and in
$MEMTRACE_SHARED or ../shared/snapshots. What a job's script says of itself (torch's counters, marks, the text of an
out-of-memory error) is compared: the table says nothing about how memtrace reads the recording.

TEMPLATE is what runs a job, for another stand-in or another GPU. In it {script} is the job's script and arguments,
{python} the environment's interpreter, {world} `--world N --rank R` where one of several real ranks is to be run alone
and nothing elsewhere, {work} a folder of the row's own.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import lzma
import multiprocessing
import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "fixtures"
SHARED = Path(os.environ.get("MEMTRACE_SHARED") or ROOT.parent / "shared" / "snapshots")
COMMAND = (
    f"{shlex.quote(sys.executable)} -m memtrace dryrun --gpu H200 --steps 0 {{world}} --output {{work}}/recording "
    "-- {python} {script}"
)
PEAKS = {"allocated": 0.001, "requested": 0.001, "reserved": 0.01}  # and how far off each may be
SMALL = 4096  # bytes: requests below come and go with how values are looked at

# Recordings that only ../shared/snapshots has: name, command in fixtures/make, version of DeepSpeed.
_GPT2 = "python scenario.py --torch-adam --name"
SHARED_ONLY = (
    *((f"gpt2-zero3-4ranks-rank{rank}", f"{_GPT2} gpt2-zero3-4ranks --backend gloo", "0.19.8") for rank in range(4)),
    ("gpt2-zero3-700steps", f"{_GPT2} gpt2-zero3-700steps --seq 128 --steps 700 --max-entries 20000000", "0.19.8"),
    ("gpt2-zero3-cpp-stacks", f"{_GPT2} gpt2-zero3-cpp-stacks --stacks all", "0.19.8"),
    (
        "gpt2-zero3-expandable",
        f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True {_GPT2} gpt2-zero3-expandable",
        "0.19.8",
    ),
    ("llama-fsdp2-cpp-stacks", "python frameworks.py fsdp2 --name llama-fsdp2-cpp-stacks --stacks all", None),
    ("llama-lora-cpp-stacks", "python frameworks.py lora --name llama-lora-cpp-stacks --stacks all", None),
    ("opt13b-zero2", f"{_GPT2} opt13b-zero2 --model opt-13b --stage 2 --dtype fp16", "0.19.8"),
)
SLOW = ("gpt2-zero3-700steps",)  # three million events: minutes, and gigabytes of frames; only if it is named
REAL_RANKS = re.compile(r"-(\d+)ranks-rank(\d+)$")
REAL_WORLDS = {"llama-ddp": ("1", "0")}  # NCCL, alone

# What is changed in the copies of the scripts that run.
EDITS = (
    # The best compression takes longer than the job.
    ("recording.py", "preset=9 | lzma.PRESET_EXTREME", "preset=0"),
    ("jobs/recording.py", "preset=3", "preset=0"),
    # "Another library" gets what a linked library would get. The vendor's runtime, opened by its path, is out of reach.
    (
        "torch_features.py",
        'ctypes.CDLL(next(line.split()[-1] for line in mapped if "libcudart" in line))',
        "ctypes.CDLL(None)",
    ),
)

# What an out-of-memory text says about this process. The rest needs NVML, or is about others on that machine.
OOM = {
    "asked": r"Tried to allocate ([\d.]+ \w+)",
    "capacity": r"total capacity of ([\d.]+ \w+)",
    "limit": r"([\d.]+ \w+) allowed",
    "allocated": r"memory ([\d.]+ \w+) is allocated by PyTorch",
    "unallocated": r"and ([\d.]+ \w+) is reserved by PyTorch but unallocated",
}


@dataclass(frozen=True)
class Job:
    """One recording: the words of its command, what its environment adds, and the DeepSpeed it ran on.

    `complete` is whether its trace begins at the beginning and lost nothing.
    """

    name: str
    script: tuple[str, ...]
    environment: dict[str, str]
    deepspeed: str | None
    complete: bool
    truth: Path

    @property
    def world(self) -> tuple[str, ...]:
        """For a script that joins a group of real processes, where memtrace has to stand in for the others."""
        found = REAL_RANKS.search(self.name)
        world, rank = found.groups() if found else REAL_WORLDS.get(self.name, ("", ""))
        return ("--world", world, "--rank", rank) if world else ()


@dataclass
class Row:
    """What came of a job. `wrong` is why there is no `ours`.

    `events` counts ours and the truth's, where both are complete; `first` the requests that are the same, from the
    first; `difference` says what came then, "" if all are.
    """

    job: Job
    truth: dict[str, Any]
    ours: dict[str, Any] = field(default_factory=dict)
    wrong: str = ""
    events: tuple[int, int] | None = None
    first: int = 0
    difference: str | None = None
    seconds: float = 0.0
    host_bytes: int = 0


def known_jobs() -> list[Job]:
    """Those of the manifest and of the table above that have a truth here."""
    manifest = tomllib.loads((FIXTURES / "MANIFEST.toml").read_text())["recording"]
    rows = [(e["name"], e["made"], e.get("deepspeed"), e["complete"]) for e in manifest if "made" in e]
    jobs = []
    for name, made, deepspeed, complete in (*rows, *((*row, True) for row in SHARED_ONLY)):
        words = shlex.split(made)
        start = words.index("python")
        truth = next((p for d in (FIXTURES, SHARED) if (p := d / f"{name}.truth.json").is_file()), None)
        if truth is not None:
            environment = dict(word.split("=", 1) for word in words[:start])
            jobs.append(Job(name, tuple(words[start + 1 :]), environment, deepspeed, complete, truth))
    return jobs


def copy_scripts(folder: Path) -> Path:
    """The scripts with the changes of EDITS."""
    target = folder / "make"
    shutil.copytree(FIXTURES / "make", target, ignore=shutil.ignore_patterns("__pycache__"))
    for name, old, new in EDITS:
        text = (target / name).read_text()
        if text.count(old) != 1:
            raise SystemExit(f"{name}: there is no {old!r} to change")
        (target / name).write_text(text.replace(old, new))
    return target


def versions(python: str, folder: str = "") -> dict[str, str]:
    """Of the packages that matter, as `python` finds them; with `folder`, as it finds them there."""
    code = (
        "import importlib.metadata as m, json, sys\n"
        "names = ('torch', 'transformers', 'deepspeed', 'peft', 'accelerate')\n"
        "found = m.distributions(**({'path': [sys.argv[1]]} if sys.argv[1] else {}))\n"
        "found = {d.metadata['Name'].lower(): d.version for d in found}\n"
        "print(json.dumps({name: found[name] for name in names if name in found}))"
    )
    return dict(json.loads(subprocess.run([python, "-c", code, folder], check=True, capture_output=True).stdout))


class Runner:
    """Runs jobs, each in a folder of its own and in a process group that goes when its time is over."""

    def __init__(
        self, python: str, template: str, *, scripts: Path, folder: Path, deepspeeds: dict[str, str], limit_s: float
    ) -> None:
        self.python = python
        self.template = template
        self.scripts = scripts
        self.folder = folder
        self.deepspeeds = deepspeeds
        self.limit_s = limit_s

    def words(self, job: Job, work: Path) -> list[str]:
        """The template, filled in."""
        script = [str(self.scripts / job.script[0]), *job.script[1:], "--out", str(work)]
        several = {"{script}": script, "{world}": [*job.world]}
        words = shlex.split(self.template)
        filled = [several[w] if w in several else [w.format(python=self.python, work=work)] for w in words]
        return [word for some in filled for word in some]

    def environment(self, job: Job, work: Path) -> dict[str, str]:
        """Ours without allocator settings, plus the job's; one thread, so that two jobs do not fight."""
        environment = {key: value for key, value in os.environ.items() if "ALLOC_CONF" not in key}
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment.update(HF_HUB_OFFLINE="1", PYTHONDONTWRITEBYTECODE="1", PYTHONUNBUFFERED="1")
        environment.update(TORCH_EXTENSIONS_DIR=str(work / "extensions"), **job.environment)
        folder = self.deepspeeds.get(job.deepspeed or "")
        if folder:
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        return environment

    def run(self, job: Job) -> Row:
        """One row."""
        row = Row(job, json.loads(job.truth.read_text()))
        work = self.folder / job.name
        work.mkdir(parents=True)
        log = work / "log.txt"
        start = time.monotonic()
        with log.open("wb") as output:
            child = subprocess.Popen(
                self.words(job, work),
                cwd=work,
                env=self.environment(job, work),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            while True:
                pid, status, usage = os.wait4(child.pid, os.WNOHANG)
                row.seconds = time.monotonic() - start
                if pid:
                    break
                if row.seconds > self.limit_s:
                    os.killpg(child.pid, signal.SIGKILL)
                time.sleep(0.05)
        child.returncode = os.waitstatus_to_exitcode(status)
        row.host_bytes = usage.ru_maxrss * 1024
        written = work / f"{job.name}.truth.json"
        if written.is_file():
            row.ours = json.loads(written.read_text())
            compare_events(row, work / f"{job.name}.pickle.xz")
        else:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            lines = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)] or lines
            late = f"longer than {self.limit_s:.0f} s: " if row.seconds > self.limit_s else ""
            row.wrong = f"{late}exit code {child.returncode}: {lines[-1][:200] if lines else 'no output'}"
        said = f"{row.seconds:6.1f} s  {job.name}  {row.wrong or verdict(row)}\n"
        if row.difference:
            said += f"{'':10}requests differ from number {row.first:,} on: {row.difference}\n"
        sys.stderr.write(said)
        return row


def read_events(path: Path) -> list[dict[str, Any]]:
    """Of all devices, but for what printing a tensor allocates, which depends on its values, and for marks of
    snapshots. Unpickled: the recordings are the repository's own, and what a job wrote just now.
    """
    with lzma.open(path) as file:
        events = [event for trace in pickle.load(file)["device_traces"] for event in trace]
    printing: set[int] = set()
    kept = []
    for event in events:
        address, action = event.get("addr"), event["action"]
        if action == "alloc" and any("_tensor_str.py" in frame["filename"] for frame in event.get("frames", ())):
            printing.add(address)
        elif action == "free_completed" and address in printing:
            printing.remove(address)
        elif address not in printing and action != "snapshot":
            kept.append(event)
    return kept


def requests(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the program asked of the allocator, in order, but for the small ones. Addresses have no say in it."""
    return [e for e in events if e["action"] in ("alloc", "free_requested") and e["size"] >= SMALL]


def describe(events: Sequence[dict[str, Any]], index: int) -> str:
    """One request, and the three innermost functions of its stack."""
    if index >= len(events):
        return "the end"
    names = [frame["name"] for frame in events[index].get("frames", ())[:3]]
    return f"{events[index]['action']} {events[index]['size']:,} in {' < '.join(names) or 'no Python frame'}"


def compare_events(row: Row, written: Path) -> None:
    """Fills in what the row says of events and requests."""
    if not row.job.complete:
        return
    ours, truth = read_events(written), read_events(row.job.truth.with_name(f"{row.job.name}.pickle.xz"))
    row.events = len(ours), len(truth)
    ours, truth = requests(ours), requests(truth)
    pairs = zip(ours, truth, strict=False)
    equal = min(len(ours), len(truth))
    keys = ("action", "size")
    row.first = next((i for i, pair in enumerate(pairs) if any(pair[0][k] != pair[1][k] for k in keys)), equal)
    same = row.first == len(ours) == len(truth)
    row.difference = "" if same else f"{describe(ours, row.first)} / {describe(truth, row.first)}"


def peak(document: dict[str, Any], what: str) -> int:
    """Bytes."""
    return int(document["stats"][f"{what}_bytes.all.peak"])


def verdict(row: Row) -> str:
    """Which peaks differ."""
    different = [what for what in PEAKS if peak(row.ours, what) != peak(row.truth, what)]
    why = " (same requests, other addresses)" if row.difference == "" else ""
    return f"differs: {', '.join(different)}{why}" if different else "exact"


def share_off(row: Row, what: str) -> float:
    """By how much ours is above the truth, as a share of it."""
    return peak(row.ours, what) / peak(row.truth, what) - 1


def peak_cell(row: Row, what: str) -> str:
    """`=`, or how far ours is off."""
    bytes_off = peak(row.ours, what) - peak(row.truth, what)
    return f"{bytes_off:+,} ({100 * share_off(row, what):+.3f} %)" if bytes_off else "="


def marks_cell(row: Row) -> str:
    """`=` if every mark has every counter equal, else how many have; and how many have all but those of reserved."""
    truth, ours = row.truth.get("marks"), row.ours.get("marks")
    if not truth or not ours:
        return "-"

    def equal(leave: tuple[str, ...]) -> int:
        counters = [key for key in truth[0] if key not in ("what", "name", "time_us", *leave)]
        return sum(all(a.get(key) == b[key] for key in counters) for a, b in zip(ours, truth, strict=False))

    if len(ours) != len(truth):
        return f"{equal(())} of {len(truth)}, ours are {len(ours)}"
    if equal(()) == len(truth):
        return "="
    return f"{equal(())} of {len(truth)}; {equal(('reserved', 'reserved_peak'))} but for reserved"


def events_cell(row: Row) -> str:
    """`=`, or how many more ours are."""
    if row.events is None:
        return "-"
    ours, truth = row.events
    return "=" if ours == truth else f"{ours - truth:+,} of {truth:,}"


def oom_difference(row: Row) -> str:
    """Which of the amounts in the error's text differ; "" if none."""
    ours, truth = row.ours.get("oom"), row.truth.get("oom")
    if not truth or not ours:
        return "" if bool(truth) == bool(ours) else "ours only" if ours else "truth only"
    different = []
    for what, pattern in OOM.items():
        mine, theirs = re.search(pattern, ours), re.search(pattern, truth)
        if (mine and mine[1]) != (theirs and theirs[1]):
            different.append(f"{what} {mine and mine[1]} / {theirs and theirs[1]}")
    return ", ".join(different)


def table(rows: Iterable[Row]) -> list[str]:
    """Markdown: what ours has more than the truth, `=` where it is the same."""
    head = ("job", *PEAKS, "marks", "events", "s", "host MB")
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        cells = [row.job.name]
        if row.wrong:
            cells += [f"failed: {row.wrong}".replace("|", "\\|"), *[""] * (len(head) - 4)]
        else:
            cells += [*(peak_cell(row, what) for what in PEAKS), marks_cell(row), events_cell(row)]
        cells += [f"{row.seconds:.1f}", f"{row.host_bytes / 1e6:,.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def summary(rows: Sequence[Row]) -> list[str]:
    """How many are exact, how far off the others are, and what about them is no matter of bytes."""
    ran = [row for row in rows if not row.wrong]
    exact = [row for row in ran if verdict(row) == "exact"]
    lines = [f"{len(rows)} jobs, {len(rows) - len(ran)} failed. All three peaks equal to the byte: {len(exact)}."]
    for what, goal in PEAKS.items():
        off = {row.job.name: share_off(row, what) for row in ran if share_off(row, what)}
        line = f"{what.capitalize()}: {len(ran) - len(off)} equal"
        if off:
            within = sum(abs(share) <= goal for share in off.values())
            worst = max(off, key=lambda name: abs(off[name]))
            line += (
                f", {within} of the other {len(off)} within {100 * goal:g} %, worst {worst} {100 * off[worst]:+.3f} %"
            )
        lines.append(f"{line}.")
    moved = [row.job.name for row in ran if row not in exact and row.difference == ""]
    if moved:
        lines.append(f"The same requests, and other peaks: {', '.join(moved)}.")
    with_oom = [row for row in ran if row.truth.get("oom") or row.ours.get("oom")]
    if with_oom:
        different = [f"{row.job.name}: {oom_difference(row)}" for row in with_oom if oom_difference(row)]
        lines.append(f"Out of memory in {len(with_oom)}; text of the error {'; '.join(different) or 'equal in all'}.")
    return [line for text in lines for line in (text, "")][:-1]


def figures(row: Row) -> dict[str, Any]:
    """What another run of the same job, under the same versions, has to have again."""
    timeless = [{key: value for key, value in mark.items() if key != "time_us"} for mark in row.ours.get("marks") or ()]
    peaks = {f"{what}_peak_bytes": peak(row.ours, what) for what in PEAKS}
    return {**peaks, "events": row.events and row.events[0], "oom": row.ours.get("oom"), "marks": timeless}


def main() -> None:
    """Prints the table; writes it to --output after every job, so that what was done is kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="interpreter of the environment that the jobs run in")
    parser.add_argument("--deepspeed", action="append", default=[], metavar="FOLDER", help="another version of it")
    parser.add_argument("--only", default="", help="names or patterns, with commas between them")
    parser.add_argument("--jobs", type=int, default=1, help="at the same time; each takes up to 2 GB")
    parser.add_argument("--limit", type=float, default=600, help="seconds a job may take")
    parser.add_argument("--output", type=Path, help="file for the table, in Markdown")
    parser.add_argument("--figures", type=Path, help="file for what was found, in JSON (tests/dryrun/figures.json)")
    parser.add_argument("--keep", type=Path, help="new folder for what the jobs wrote: truth, recording, log")
    parser.add_argument("--command", default=COMMAND, metavar="TEMPLATE", help="default: %(default)s")
    options = parser.parse_args()

    python = str(Path(options.python).absolute())
    own = versions(python)
    deepspeeds = {versions(python, folder)["deepspeed"]: str(Path(folder).resolve()) for folder in options.deepspeed}
    available = {own.get("deepspeed"), *deepspeeds}
    patterns = options.only.split(",") if options.only else []
    chosen = [
        job
        for job in known_jobs()
        if (any(fnmatch.fnmatch(job.name, pattern) for pattern in patterns) if patterns else job.name not in SLOW)
    ]
    if not chosen:
        raise SystemExit("no such job")
    jobs = [job for job in chosen if job.deepspeed is None or job.deepspeed in available]
    left_out = [job for job in chosen if job not in jobs]
    head = "Versions: " + ", ".join(f"{name} {version}" for name, version in sorted(own.items()))
    head += "".join(f"; deepspeed {version} for its rows" for version in deepspeeds) + "."
    tail = [f"Left out, no such DeepSpeed: {', '.join(job.name for job in left_out)}."] if left_out else []

    if options.keep:
        options.keep.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="memtrace-dryrun-") as name:
        folder = options.keep.resolve() if options.keep else Path(name)
        runner = Runner(
            python,
            options.command,
            scripts=copy_scripts(folder),
            folder=folder,
            deepspeeds=deepspeeds,
            limit_s=options.limit,
        )
        rows: dict[str, Row] = {}
        text = ""
        # A fresh process for each job: the peak of its memory counts from that of the process that starts it.
        with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=1) as pool:
            for row in pool.imap_unordered(runner.run, jobs):
                rows[row.job.name] = row
                done = [rows[job.name] for job in jobs if job.name in rows]
                text = "\n".join([head, "", *table(done), "", *summary(done), *tail]) + "\n"
                if options.output:
                    options.output.write_text(text)
                if not options.keep:
                    shutil.rmtree(folder / row.job.name, ignore_errors=True)
    print(text, end="")
    if options.figures:
        found = {name: figures(row) for name, row in sorted(rows.items()) if not row.wrong}
        options.figures.write_text(json.dumps({"versions": own, "jobs": found}, indent=1) + "\n")
    if any(row.wrong for row in rows.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
