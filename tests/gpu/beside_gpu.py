"""On a machine with a GPU: a dry run refuses, or leaves the GPU alone; afterwards real CUDA works, and nothing is left.

    python3 tests/gpu/beside_gpu.py --out $OUT --wheels .whl

WHEELS/memtrace as record_driver.py has it. OUT/beside.json says what was found; the exit code is 1 if anything is
wrong. The same job is also recorded for real, and torch's counters of both compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from record_driver import Machine

JOB = """
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(6)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(512, 2048, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
REAL = """
import os, torch
a = (torch.arange(1 << 20, device="cuda") % 7).double().view(1024, 1024)
assert torch.equal((a @ a).cpu(), a.cpu() @ a.cpu())
assert not [name for name in os.environ if name.startswith(("MEMTRACE_GPU", "LD_PRELOAD", "TRITON"))]
print(torch.cuda.get_device_name(), torch.cuda.mem_get_info())
"""


@contextlib.contextmanager
def watched() -> Iterator[Seen]:
    """Asks nvidia-smi for the GPU's processes and memory, again and again, until it is left."""
    seen, is_over = Seen(), threading.Event()

    def look() -> None:
        while not is_over.wait(0.1):
            seen.processes |= set(smi("--query-compute-apps=pid").split())
            seen.used_mib.append(int(smi("--query-gpu=memory.used").split()[0]))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        thread.join()


@dataclass
class Seen:
    """What nvidia-smi said meanwhile."""

    processes: set[str] = field(default_factory=set)
    used_mib: list[int] = field(default_factory=list)


def smi(what: str) -> str:
    return subprocess.run(["nvidia-smi", what, "--format=csv,noheader,nounits"], capture_output=True, text=True).stdout


def files(*roots: Path) -> set[str]:
    return {str(path) for root in roots for path in root.rglob("*") if "__pycache__" not in path.parts}


def stats(recording: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((recording / "rank0000.json").read_text())["stats"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--wheels", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("/tmp/beside"))
    given = parser.parse_args()
    machine = Machine(argparse.Namespace(
        cpu=False, standin=False, python=sys.executable, memtrace="", limit=500.0, **vars(given)
    ))  # fmt: skip
    job = machine.work / "job.py"
    job.write_text(JOB)
    environ = {key: value for key, value in os.environ.items() if "MEMTRACE" not in key}
    environ["MEMTRACE_CACHE_DIR"] = str(machine.work / "cache")

    def run(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, capture_output=True, text=True, env={**environ, **more}, cwd=machine.work)

    dry, real = machine.work / "dry", machine.work / "real"
    command = ["--", sys.executable, str(job)]
    refused = run(*machine.memtrace, "dryrun", *command)
    homes = (Path.home(), Path(sys.prefix) / "lib", Path("/dev/shm"))
    before, idle_mib = files(*homes), int(smi("--query-gpu=memory.used").split()[0])
    with watched() as watch:
        beside = run(*machine.memtrace, "dryrun", "--beside-gpu", "--steps", "0", "-o", str(dry), *command)
    remembered = Path.home() / ".local" / "state" / "memtrace" / "recent.json"  # for `memtrace ls`, as of any recording
    left = sorted(files(*homes) - before - {str(remembered), *map(str, remembered.parents)})
    after = run(sys.executable, "-c", REAL)
    recorded = run(*machine.memtrace, "record", "-o", str(real), *command)
    ours, truth = (stats(one) if (one / "rank0000.json").exists() else {} for one in (dry, real))
    different = {key: [ours.get(key), value] for key, value in truth.items() if ours.get(key) != value}
    wrong = [
        what
        for what, is_right in {
            "not refused": refused.returncode == 2 and "working GPU" in refused.stderr,
            "the dry run failed": beside.returncode == 0,
            "the GPU was used": not watch.processes and max(watch.used_mib, default=0) <= idle_mib,
            "files were left": not left,
            "real CUDA does not work": after.returncode == 0,
            "recording failed": recorded.returncode == 0 and bool(truth),
            "counters differ": not different,
        }.items()
        if not is_right
    ]
    found = {
        "wrong": wrong, "idle_mib": idle_mib, "used_mib": sorted(set(watch.used_mib)), "looks": len(watch.used_mib),
        "processes": sorted(watch.processes), "left": left, "counters": len(truth), "different": different,
        "said": {"refused": refused.stderr, "beside": beside.stderr, "after": after.stdout + after.stderr,
                 "recorded": recorded.stderr},
    }  # fmt: skip
    (machine.out / "beside.json").write_text(json.dumps(found, indent=1))
    print(json.dumps(found, indent=1))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
