"""Records real jobs on a GPU machine, checks every recording, and packs what came out.

    python3 tests/gpu/record_driver.py --out $OUT --wheels .whl

On the machine it needs torch and transformers; the rest comes from WHEELS, made where a registry can be reached:
WHEELS/job (deepspeed, hjson, pydantic, pydantic_core, annotated-types, typing-inspection) goes beside the job,
WHEELS/memtrace (torch_memtrace, numpy, click, rich, markdown-it-py, mdurl, pygments, platformdirs, networkx,
backports.zstd) into an environment of its own, since that is how people install it.

OUT/table.json has a row a scenario, OUT/recordings-N.tar the recordings, OUT/logs.tar.gz what the jobs said.
`--cpu` tries the control flow with tiny models where there is no GPU; `--standin` runs the jobs for real on the
stand-in device of `memtrace dryrun`, with memtrace as this interpreter has it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import venv
import zipfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
MIB = 1 << 20
LARGEST_PART, MOST_PARTS = 15 * MIB, 3  # what comes back from the machine
TAIL = 1500
STARTED = time.monotonic()


@dataclass
class Act:
    """At the first line of the job's output that `line` matches, send `signal` to the process that it names."""

    line: str
    signal: signal.Signals
    after_s: float = 0.5


@dataclass
class Scenario:
    """One recorded job. `exits` are the exit codes that are right."""

    name: str
    job: str
    launcher: str = "python"  # or deepspeed, or torchrun with `ranks`
    record: str = ""
    ranks: int = 1
    exits: tuple[int, ...] = (0,)
    act: Act | None = None
    limit_s: int = 120
    needs_adam: bool = False
    is_large: bool = False
    is_late: bool = False  # recorded from a later step on: what lived before is nobody's
    needs_cuda: bool = False  # without CUDA no signal is taken, and nobody sees an OOM
    files: tuple[str, ...] = ("rank0000.pickle",)  # what must be there
    environment: dict[str, str] = field(default_factory=dict)


ZERO = "train_zero.py --model {gpt2} --stage"
TORCH = "train_torch.py --model {gpt2}"
OPT = "train_zero.py --model opt-13b --dtype fp16 --steps 2 --bs 1 --seq 512 --stage"
WORLD = "--simulate-world 8"
SCENARIOS = [
    Scenario("opt13b-zero3", f"{OPT} 3", record=WORLD,
             needs_adam=True, is_large=True, limit_s=240),
    Scenario("opt13b-zero2", f"{OPT} 2", record=WORLD,
             needs_adam=True, is_large=True, limit_s=240),
    *(
        Scenario(f"gpt2-zero{stage}", f"{ZERO} {stage}", launcher="deepspeed", record=WORLD, needs_adam=True,
                 limit_s=180)
        for stage in (1, 2, 3)
    ),
    Scenario("gpt2-zero3-last-rank", f"{ZERO} 3 --adam torch", record=f"{WORLD} --rank 7",
             files=("rank0007.pickle",)),
    Scenario("gpt2-zero3-gloo4", f"{ZERO} 3 --adam torch --backend gloo --steps 3", launcher="torchrun", ranks=4,
             files=tuple(f"rank{rank:04}.pickle" for rank in range(4)), limit_s=180),
    Scenario("gpt2", TORCH),
    Scenario("gpt2-modules", TORCH, record="--modules"),
    Scenario("gpt2-single-thread", TORCH, record="--single-thread-backward"),
    Scenario("gpt2-steps", f"{TORCH} --steps 6", record="--steps 2:3", is_late=True),
    Scenario("gpt2-fsdp2", f"{TORCH} --fsdp", record=WORLD),
    Scenario("gpt2-trainer", "train_trainer.py --model {gpt2}"),
    Scenario("gpt2-fails", f"{TORCH} --fail-at 2", exits=(3,)),
    Scenario("gpt2-oom", f"{TORCH} --steps 9 --seq 512 --grow --limit-mib 8000", exits=(1,)),
    Scenario("gpt2-signal", f"{TORCH} --steps 5 --pause 1", record="--on signal:USR1", needs_cuda=True,
             act=Act(r"pid (\d+) step 1 ", signal.SIGUSR1), files=("rank0000.pickle", "rank0000.signal.pickle")),
    Scenario("gpt2-kill9", f"{TORCH} --steps 20 --pause 0.7", record="--every 2", exits=(-9,), needs_cuda=True,
             act=Act(r"pid (\d+) step 6 ", signal.SIGKILL), files=("rank0000.every.pickle",)),
    Scenario("gpt2-term", f"{TORCH} --steps 4 --wait-at 2", launcher="torchrun", ranks=2, exits=(1,),
             act=Act(r"rank 1 pid (\d+) waits", signal.SIGTERM, after_s=4), needs_cuda=True,
             files=("rank0000.pickle", "rank0001.pickle")),
]  # fmt: skip


def say(*words: object) -> None:
    print(f"[{time.monotonic() - STARTED:5.0f} s]", *words, flush=True)


class Machine:
    """What runs where: the job's Python and its packages, memtrace and its own, and where files go."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.is_cpu: bool = options.cpu
        self.standin = standin(options.python) if options.standin else {}
        self.out, self.work = options.out.resolve(), options.work.resolve()
        self.python: str = options.python
        self.site = self.work / "site"
        self.recordings, self.logs = self.work / "recordings", self.work / "logs"
        for folder in (self.out, self.recordings, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        self.deadline = STARTED + options.limit
        self.adam, self.is_built = threading.Event(), False
        self.memtrace = [options.memtrace] if options.memtrace else self._install(options.wheels)
        self._job_packages(options.wheels)

    def environment(self, *last: str) -> dict[str, str]:
        """Of a job, which looks for modules in `last` too. Without what this driver was started with for memtrace."""
        inherited = {name: value for name, value in os.environ.items() if "MEMTRACE" not in name}
        more = {
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "OMP_NUM_THREADS": "2",
            "TORCH_CUDA_ARCH_LIST": "9.0",
            "TORCH_EXTENSIONS_DIR": str(self.work / "extensions"),
            "DS_IGNORE_CUDA_DETECTION": "1",
            "PATH": f"{self.site / 'bin'}:{Path(self.python).parent}:{os.environ.get('PATH', '')}",
        }
        own = str(self.site) if self.site.is_dir() else None
        if own or last:
            more["PYTHONPATH"] = os.pathsep.join(filter(None, [own, inherited.get("PYTHONPATH"), *last]))
        if self.is_cpu:
            more["DS_ACCELERATOR"] = "cpu"
        return {**inherited, **more, **self.standin}

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def memtrace_site(self) -> list[str]:
        """Where a job that imports memtrace itself finds it; behind its own packages, which it keeps."""
        return [str(site) for site in (self.work / "memtrace").glob("lib/python3.*/site-packages")]

    def _install(self, wheels: Path) -> list[str]:
        """memtrace in an environment of its own, which sees none of the job's packages."""
        folder = self.work / "memtrace"
        venv.create(folder, with_pip=False, symlinks=True)
        site = next(folder.glob("lib/python3.*/site-packages"))
        unpack((wheels / "memtrace").glob("*.whl"), site)
        if not (site / "memtrace").is_dir():
            shutil.copytree(REPOSITORY / "memtrace", site / "memtrace")
        command = folder / "bin" / "memtrace"
        command.write_text(f"#!{folder}/bin/python\nimport sys\nfrom memtrace.cli import main\nsys.exit(main())\n")
        command.chmod(0o755)
        return [str(command)]

    def _job_packages(self, wheels: Path | None) -> None:
        if wheels is None:
            return
        unpack((wheels / "job").glob("*.whl"), self.site)
        (self.site / "bin").mkdir(parents=True, exist_ok=True)
        script = self.site / "bin" / "deepspeed"
        script.write_text(f"#!{self.python}\nfrom deepspeed.launcher.runner import main\nmain()\n")
        script.chmod(0o755)

    def build_adam(self) -> None:
        """DeepSpeed's fused Adam, compiled once."""
        code = "from deepspeed.ops.op_builder import FusedAdamBuilder; FusedAdamBuilder().load(verbose=False)"
        began = time.monotonic()
        with (self.logs / "build-adam.log").open("w") as log:
            done = subprocess.run(
                [self.python, "-c", code], stdout=log, stderr=log, env=self.environment(), timeout=max(self.left(), 1)
            )
        self.is_built = done.returncode == 0
        say(f"fused Adam: exit {done.returncode}, {time.monotonic() - began:.0f} s")
        self.adam.set()


def standin(python: str) -> dict[str, str]:
    """The environment in which CUDA is the stand-in device, as large as an H200."""
    from memtrace import gpus
    from memtrace.dryrun import build, launch
    from memtrace.paths import cache_directory

    torch = build.find_torch(python)
    library = build.library(torch, (cache_directory() or Path()) / "standin", lambda: None)
    device = launch.Standin(library, gpus.find("H200"), library.parent / "kernels", build.dnn_spans(torch))
    return launch.environment(device, {}, world=None, rank=0, devices=1)


def unpack(wheels: Iterable[Path], site: Path) -> None:
    """What pip would do with these, and needs no pip."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)


def launch(scenario: Scenario, machine: Machine, port: int) -> list[str]:
    """The job's command line."""
    script, *arguments = scenario.job.replace("{gpt2}", "tiny" if machine.is_cpu else "gpt2").split()
    if scenario.needs_adam and not machine.is_built:
        arguments += ["--adam", "torch"]
    if machine.is_cpu:
        arguments += ["--seq", "32"]
    job = [str(HERE / "jobs" / script), *arguments]
    if scenario.launcher == "deepspeed":
        return ["deepspeed", "--num_gpus", "1", "--master_port", str(port), *job]
    if scenario.launcher == "torchrun":
        ranks = ["--nproc-per-node", str(scenario.ranks), "--master-port", str(port)]
        return [machine.python, "-m", "torch.distributed.run", *ranks, *job]
    return [machine.python, *job]


def run(scenario: Scenario, machine: Machine, index: int) -> dict[str, Any]:
    """One scenario from start to end; its row of the table."""
    if scenario.needs_adam:
        machine.adam.wait()
    folder = machine.recordings / scenario.name
    limit = min(scenario.limit_s, machine.left() - 30)
    if limit < 10:
        return {"scenario": scenario.name, "ok": False, "problems": ["no time left"]}
    command = [*machine.memtrace, "record", "-o", str(folder), *scenario.record.split(), "--"]
    command += launch(scenario, machine, 29600 + index)
    environment = {**machine.environment(), "MASTER_PORT": str(29700 + index), **scenario.environment}
    row: dict[str, Any] = {"scenario": scenario.name, "command": shorten(command, machine)}
    began = time.monotonic()
    row["exit"], row["stderr"] = watch(command, environment, machine.logs / scenario.name, scenario.act, limit)
    row["seconds"] = round(time.monotonic() - began, 1)
    try:
        examine(row, folder, machine)
    except Exception as error:  # noqa: BLE001 - the other scenarios go on
        row["error"] = f"{type(error).__name__}: {error}"
    row["problems"] = problems(scenario, row, machine)
    row["ok"] = not row["problems"]
    say("ok    " if row["ok"] else "FAILED", f"{scenario.name}: {row['seconds']} s, exit {row['exit']}", summary(row))
    for problem in row["problems"]:
        say("       ", problem)
    return row


def shorten(command: list[str], machine: Machine) -> str:
    text = " ".join(command).replace(str(machine.work), "$WORK").replace(f"{HERE}/", "tests/gpu/")
    return text.replace(machine.memtrace[0], "memtrace").replace("$WORK/memtrace/bin/", "")


def watch(command: list[str], env: dict[str, str], log: Path, act: Act | None, limit: float) -> tuple[Any, str]:
    """(exit code or "time-out", the end of stderr). Meanwhile does `act`."""
    with log.with_suffix(".err").open("wb") as errors, log.with_suffix(".out").open("w") as output:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env, cwd=log.parent, start_new_session=True
        )
        reader = threading.Thread(target=follow, args=(process, output, act), daemon=True)
        reader.start()
        exit_code: Any
        try:
            exit_code = process.wait(limit)
        except subprocess.TimeoutExpired:
            exit_code = "time-out"
        with contextlib.suppress(ProcessLookupError):  # whoever is left of the group
            os.killpg(process.pid, signal.SIGTERM)
            time.sleep(0.5)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join(5)
    return exit_code, log.with_suffix(".err").read_text("utf-8", "replace")[-TAIL:]


def follow(process: subprocess.Popen[str], output: io.TextIOBase, act: Act | None) -> None:
    """Copies the job's output, and sends the signal when it is time."""
    is_done = False
    for line in process.stdout or ():
        output.write(line)
        match = None if act is None else re.search(act.line, line)
        if act is None or match is None or is_done:
            continue
        is_done = True
        time.sleep(act.after_s)
        output.write(f"driver: {act.signal.name} to {match[1]}\n")
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(match[1]), act.signal)


def ask(machine: Machine, *words: str) -> tuple[int, dict[str, Any]]:
    """memtrace's exit code and its JSON document."""
    done = subprocess.run(
        [*machine.memtrace, *words, "--json"], capture_output=True, text=True, timeout=max(min(machine.left(), 200), 5),
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
    )  # fmt: skip
    try:
        return done.returncode, json.loads(done.stdout)
    except ValueError:
        return done.returncode, {"error": done.stderr[-TAIL:]}


def examine(row: dict[str, Any], folder: Path, machine: Machine) -> None:
    """What the recording holds, and whether it is right."""
    row["files"] = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    code, document = ask(machine, "verify", str(folder))
    row["verify"] = {"exit": code, **counts(document)}
    row["snapshots"] = [
        snapshot(folder / name, machine) for name in row["files"] if re.search(r"\.pickle(\.zst)?$", name)
    ]
    row["sidecars"] = {
        name: sidecar(folder / name) for name in row["files"] if re.fullmatch(r"rank.*\.json", name)
    }  # fmt: skip


def counts(document: dict[str, Any]) -> dict[str, Any]:
    """Compared and equal counters of each rank or device, or what went wrong."""
    data = document.get("data")
    if not isinstance(data, dict):
        return {"error": str(document)[:TAIL]}
    found = []
    for rank in data.get("ranks", [data]):
        for device in rank.get("devices") or ():
            wrong = [entry for entry in device.get("different", ()) if entry.get("why") == "difference"]
            kept = {name: device.get(name) for name in ("events", "complete", "compared", "equal", "reset_events")}
            found.append({"rank": rank.get("rank"), "error": rank.get("error"), **kept, "different": wrong[:5]})
    return {"ranks": found}


def snapshot(path: Path, machine: Machine) -> dict[str, Any]:
    """One pickle by itself: its counters against its sidecar's, and the owners of its peak."""
    truth = path.with_name(re.sub(r"\.pickle(\.zst)?$", ".json", path.name))
    code, document = ask(machine, "verify", str(path), *(["--truth", str(truth)] if truth.exists() else []))
    facts = {"file": path.name, "bytes": path.stat().st_size, "verify": {"exit": code, **counts(document)}}
    for when in ("peak", "oom") if ".oom." in path.name or "oom" in str(path.parent.name) else ("peak",):
        code, document = ask(machine, "blame", "--at", when, "--by", "block", str(path))
        facts[when] = owners(document) if code == 0 else {"exit": code, "error": document.get("error", "")[:300]}
    return facts


def owners(document: dict[str, Any]) -> dict[str, Any]:
    data = document["data"]
    sizes: Counter[str] = Counter()
    without_stack = without_owner = 0
    for block in data["rows"]:
        sizes[block["category"]] += block["bytes"]
        if not block["stack"]:
            without_stack += block["bytes"]
            without_owner += block["bytes"] if block["category"] in ("unknown", "prior") else 0
    return {
        **{name: data[name] for name in ("total_bytes", "event", "phase", "step")},
        "events": document["snapshot"]["events"],
        "complete": document["snapshot"]["complete"],
        "without_stack_bytes": without_stack,
        "without_owner_bytes": without_owner,
        "unknown_bytes": sizes["unknown"],
        "categories": dict(sizes.most_common(8)),
        "confidence": dict(Counter(block["confidence"] for block in data["rows"])),
    }


def sidecar(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text("utf-8"))
    kept = {name: content.get(name) for name in ("reason", "rank", "world", "complete", "zero", "notes", "device")}
    lengths = {name: len(content.get(name) or ()) for name in ("phases", "roles", "gathers", "stats")}
    return {**kept, **lengths, "phase_names": dict(Counter(phase["phase"] for phase in content.get("phases") or ()))}


def problems(scenario: Scenario, row: dict[str, Any], machine: Machine) -> list[str]:
    """What is not as it must be."""
    found = []
    if row["exit"] not in scenario.exits:
        found.append(f"exit code {row['exit']}, not {scenario.exits}")
    if "error" in row:
        found.append(row["error"])
    files = row.get("files", {})
    if machine.is_cpu:
        wanted: Iterable[str] = [name.partition(".")[0] + ".json" for name in scenario.files]
        return found + [f"no {name}" for name in dict.fromkeys(wanted) if name not in files]
    found += [f"no {name}" for name in scenario.files if not {name, f"{name}.zst"} & files.keys()]
    if row.get("verify", {}).get("exit") != 0:
        found.append(f"verify DIRECTORY: {row.get('verify')}")
    for one in row.get("snapshots", ()):
        if one["verify"]["exit"] != 0:
            found.append(f"verify {one['file']}: {one['verify']}")
        at_peak = one["peak"]
        if at_peak.get("without_owner_bytes") and not scenario.is_late:
            found.append(f"{one['file']}: {at_peak['without_owner_bytes']} bytes of the peak have no owner")
        if "total_bytes" not in at_peak:
            found.append(f"blame {one['file']}: {at_peak}")
    return found


def summary(row: dict[str, Any]) -> str:
    parts = []
    for one in row.get("snapshots", ()):
        at_peak = one["peak"]
        ranks = one["verify"].get("ranks") or [{}]
        parts.append(
            f"{one['file']} {one['bytes'] / MIB:.1f} MiB, {at_peak.get('events')} events, "
            f"{ranks[0].get('equal')}/{ranks[0].get('compared')} equal, "
            f"peak {at_peak.get('total_bytes', 0) / (1 << 30):.2f} GiB, "
            f"{at_peak.get('without_owner_bytes')} B without owner"
        )
    return "; ".join(parts)


def pack(machine: Machine, rows: list[dict[str, Any]]) -> None:
    """The recordings in parts that are small enough; too large files stay behind, and the table says so."""
    files = sorted(
        (path for path in machine.recordings.rglob("*") if path.is_file() and ".bootstrap" not in path.parts),
        key=lambda path: path.stat().st_size,
    )
    parts: list[tuple[int, list[Path]]] = [(0, [])]
    left_out = []
    for path in files:
        size = path.stat().st_size
        is_full = parts[-1][0] + size > LARGEST_PART
        if size > LARGEST_PART or (is_full and len(parts) == MOST_PARTS):
            left_out.append({"file": str(path.relative_to(machine.recordings)), "bytes": size})
            continue
        if is_full:
            parts.append((0, []))
        parts[-1] = (parts[-1][0] + size, [*parts[-1][1], path])
    for number, (_, chosen) in enumerate(parts, 1):
        with tarfile.open(machine.out / f"recordings-{number}.tar", "w") as archive:
            for path in chosen:
                archive.add(path, path.relative_to(machine.recordings.parent))
    with tarfile.open(machine.out / "logs.tar.gz", "w:gz") as archive:
        archive.add(machine.logs, "logs")
    table = {"rows": rows, "left_out": left_out}
    (machine.out / "table.json").write_text(json.dumps(table, indent=1))


def main() -> None:
    """See the module's documentation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "out")))
    parser.add_argument("--work", type=Path, default=Path("/tmp/memtrace-gpu"))
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--only", default="", help="names of scenarios, with commas")
    parser.add_argument("--skip", default="")
    parser.add_argument("--python", default=sys.executable, help="of the job")
    parser.add_argument("--memtrace", default="", help="the command; default: installed from the wheels")
    parser.add_argument("--limit", type=float, default=560, help="seconds for everything")
    parser.add_argument("--jobs", type=int, default=5, help="scenarios at a time")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--standin", action="store_true")
    options = parser.parse_args()
    if not options.memtrace and options.wheels is None:
        parser.error("--wheels or --memtrace")
    shutil.rmtree(options.work / "recordings", ignore_errors=True)
    machine = Machine(options)
    only, skip = (set(filter(None, text.split(","))) for text in (options.only, options.skip))
    chosen = [one for one in SCENARIOS if one.name not in skip and (not only or one.name in only)]
    if machine.is_cpu:
        chosen = [one for one in chosen if not one.is_large and not one.needs_cuda]
    if machine.standin:
        chosen = [one for one in chosen if not one.is_large]  # their weights fill the host's memory
    say("ready:", ", ".join(one.name for one in chosen))
    if machine.is_cpu or machine.standin or not any(one.needs_adam for one in chosen):
        machine.adam.set()
    else:
        threading.Thread(target=machine.build_adam, daemon=True).start()
    chosen.sort(key=lambda one: (one.needs_adam, not one.is_large))  # the compiler works meanwhile
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(lambda pair: run(pair[1], machine, pair[0]), enumerate(chosen)))
    pack(machine, rows)
    good = sum(row["ok"] for row in rows)
    say(f"{good} of {len(rows)} as they must be;", {path.name: path.stat().st_size for path in machine.out.iterdir()})
    sys.exit(good != len(rows))


if __name__ == "__main__":
    main()
