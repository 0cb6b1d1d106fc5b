"""`memtrace rules`, and rules of one's own in `memtrace blame`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from builders import SnapshotBuilder
from recordings import FIXTURES
from running import ROOT, memtrace

from memtrace.attribution.categories import CATEGORIES, LABELS
from memtrace.attribution.rule import BY_TEXT, OUTCOMES, By
from memtrace.attribution.rules import ALL, deepspeed, fsdp, transformers
from memtrace.attribution.rules import torch as torch_rules
from memtrace.attribution.user_rules import parse, read
from memtrace.cli.rules import described, every_rule

MiB = 1 << 20
UNSAFE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
RULES = """
[[rule]]
category = "act.moe"
file = "models/moe.py"
function = "forward"
min_size = "1MiB"
phase = ["forward", "other"]
inside = "train.py:main"
note = "what the experts make"
[categories]
"act.moe" = "expert activations"
"""
MOE = "/home/user/models/moe.py:31 forward;/home/user/train.py:90 main"


def written(path: Path, text: str = RULES) -> Path:
    path.write_text(text)
    return path


def snapshot(tmp_path: Path) -> Path:
    builder = SnapshotBuilder().alloc(0x7F0000000000, 4 * MiB, stack=MOE)
    return builder.alloc(0x7F1000000000, 2 * MiB, stack="train.py:1 main").pickle(tmp_path / "x.pickle")


def listed(*arguments: object) -> list[dict[str, Any]]:
    ran = memtrace("rules", "--json", *arguments)
    assert ran.code == 0, ran.err
    assert ran.document.keys() == {"schema", "memtrace", "snapshot", "data", "warnings"}
    assert ran.document["schema"] == "memtrace.rules/1"
    assert ran.document["snapshot"] is None
    found: list[dict[str, Any]] = ran.document["data"]["rules"]
    return found


# What it lists.


def test_the_document_has_every_rule_with_every_field() -> None:
    rules = listed()
    assert [rule["id"] for rule in rules] == [rule.id for rule in ALL]
    for rule in rules:
        assert rule.keys() == {
            "id", "library", "category", "label", "file", "functions", "calls", "inside", "outermost", "direct", "rank",
            "decided_by", "decides", "sites", "min_bytes", "max_bytes", "phases", "lines", "was", "since", "until",
            "knob", "note", "source",
        }  # fmt: skip
        assert rule["category"] in CATEGORIES
        assert rule["decides"] == BY_TEXT[By[rule["decided_by"].upper()]]
        assert rule["note"]
        assert rule["source"] is None


def test_the_page_has_every_rule_and_fits_80_columns() -> None:
    page = memtrace("rules").out
    lines = page.splitlines()
    assert lines[0].startswith(f"{len(ALL)} rules (")
    for rule in ALL:
        assert any(line.startswith(f"{rule.id}  {rule.category}") for line in lines), rule.id
    assert max(map(len, lines)) <= 80
    text = " ".join(page.split())
    for rule in ALL:
        assert " ".join(rule.note.split()) in text
        assert rule.knob in text


@pytest.mark.parametrize("rule", every_rule(parse(RULES, "rules.toml")), ids=lambda one: one.rule.id)
def test_each_rule_in_full_says_all_it_looks_at(rule: Any) -> None:
    lines = list(described(rule, 80, in_full=True))
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    for function in (rule.rule.where, *rule.rule.child, *rule.rule.inside):
        assert all(name in text for name in function.names if name != "*")
    for number, site in enumerate(rule.rule.sites, 1):
        assert f"{number}. {site.category}" in text
        assert site.label in text
    assert rule.rule.note in text
    assert rule.rule.knob in text


@pytest.mark.parametrize(
    ("library", "rules"),
    [("deepspeed", deepspeed.RULES), ("fsdp", fsdp.RULES), ("transformers", transformers.RULES),
     ("torch", torch_rules.RULES)],
)  # fmt: skip
def test_a_library_has_its_own_rules(library: str, rules: tuple[Any, ...]) -> None:
    found = [rule["id"] for rule in listed("--library", library)]
    assert set(found) >= {rule.id for rule in rules}
    assert {rule["library"] for rule in listed("--library", library)} == {library}


def test_every_rule_is_of_one_library() -> None:
    parts = [len(listed("--library", library)) for library in ("deepspeed", "fsdp", "torch", "transformers", "user")]
    assert sum(parts) == len(ALL)
    assert parts[-1] == 0


def test_one_rule_with_its_call_sites() -> None:
    ran = memtrace("rules", "deepspeed.zero3.fetch")
    assert ran.code == 0
    assert ran.out.startswith("deepspeed.zero3.fetch  param.gathered\n")
    assert "1. param.gathered; gathered when needed; line 254" in ran.out
    assert "2. param.prefetched; gathered ahead; line 338" in ran.out
    assert "not in every job" in ran.out
    (rule,) = listed("deepspeed.zero3.fetch")
    assert [site["category"] for site in rule["sites"]] == ["param.gathered", "param.prefetched"]
    assert [381, 381] in rule["sites"][0]["lines"]


def test_several_rules_in_the_order_asked_for() -> None:
    ids = ["torch.optim.state", "cpp.workspace", "torch.optim.state"]
    assert [rule["id"] for rule in listed(*ids)] == ids[:2]


def test_a_rule_without_a_frame_says_so() -> None:
    (rule,) = listed("torch.workspace")
    assert rule["file"] is None
    assert rule["functions"] == []
    assert "no frame of its own" in memtrace("rules", "torch.workspace").out


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("torch.optm.state", "torch.optim.state"), ("deepspeed.zero3", "deepspeed.zero3.fetch"), ("wait", "zero3.wait")],
)
def test_an_unknown_rule_lists_the_nearest(name: str, nearest: str) -> None:
    ran = memtrace("rules", name)
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith(f"memtrace: error[usage]: no rule '{name}' in memtrace\nhint: The nearest: ")
    assert nearest in ran.err


def test_nothing_is_near() -> None:
    ran = memtrace("rules", "\x1b]52;c;AAAA\x07")
    assert ran.code == 2
    assert "memtrace rules lists them all" in ran.err
    assert not UNSAFE.search(ran.err)
    other = memtrace("rules", "--library", "fsdp", "torch.optim.state")
    assert "in the rules of fsdp" in other.err


# Rules of one's own.


def test_own_rules_come_first_and_say_where_they_are_written(tmp_path: Path) -> None:
    file = written(tmp_path / "moe.toml")
    rules = listed("--rules", file)
    assert [rule["id"] for rule in rules] == ["user.1", *(rule.id for rule in ALL)]
    assert rules[0] | {"source": None} == {
        "id": "user.1", "library": "user", "category": "act.moe", "label": "", "file": "models/moe.py",
        "functions": ["forward"], "calls": [], "inside": [{"file": "train.py", "functions": ["main"]}],
        "outermost": False, "direct": False, "rank": "user", "decided_by": "stack", "decides": BY_TEXT[By.STACK],
        "sites": [], "min_bytes": MiB, "max_bytes": None, "phases": ["forward", "other"],
        "lines": [], "was": [], "since": "", "until": "", "knob": "", "note": "what the experts make", "source": None,
    }  # fmt: skip
    assert rules[0]["source"] == {"file": str(file), "line": 2}
    assert [rule["id"] for rule in listed("--rules", file, "--library", "user")] == ["user.1"]
    page = memtrace("rules", "--rules", file, "user.1").out
    assert "called, directly or not, by: train.py: main" in page
    assert "only blocks of 1.00 MiB and more" in page
    assert "only blocks born in forward or other" in page
    assert "moe.toml, line 2" in page.replace("\n      ", " ")


def test_without_own_rules_it_says_how_to_write_them() -> None:
    ran = memtrace("rules", "--library", "user")
    assert ran.code == 0
    assert "docs/rules.md" in ran.out


def test_blame_shows_own_categories_and_the_rows_sum(tmp_path: Path) -> None:
    file, path = written(tmp_path / "moe.toml"), snapshot(tmp_path)
    ran = memtrace("blame", path, "--rules", file)
    assert ran.code == 0
    assert ran.err == ""
    row = re.search(r"^act\.moe +4\.00 +66\.7 +1 .*moe\.py", ran.out, re.MULTILINE)
    assert row, ran.out
    assert "expert activations" in ran.out
    data = memtrace("blame", path, "--rules", file, "--json").document["data"]
    assert sum(row["bytes"] for row in data["rows"]) == data["total_bytes"] == 6 * MiB
    (mine,) = [row for row in data["rows"] if row["category"] == "act.moe"]
    assert mine["bytes"] == 4 * MiB
    assert mine["label"] == "expert activations"
    assert mine["confidence"] == "certain"
    assert mine["evidence"]["rule"] == "user.1"
    assert mine["evidence"]["frame"]["name"] == "forward"
    plain = memtrace("blame", path, "--json").document["data"]
    assert "act.moe" not in {row["category"] for row in plain["rows"]}


def test_the_first_of_several_files_comes_first(tmp_path: Path) -> None:
    first, path = written(tmp_path / "a.toml"), snapshot(tmp_path)
    second = written(tmp_path / "b.toml", RULES.replace("act.moe", "other"))
    for files, category in (((first, second), "act.moe"), ((second, first), "other")):
        arguments = [argument for file in files for argument in ("--rules", file)]
        rows = memtrace("blame", path, *arguments, "--json").document["data"]["rows"]
        assert rows[0]["category"] == category


def test_a_cached_snapshot_hears_new_rules(tmp_path: Path) -> None:
    recording = "fixtures/gpt2-zero3.pickle.xz"
    file = written(tmp_path / "a.toml", '[[rule]]\ncategory = "mine"\nfile = "torch/optim/*.py"')
    before = memtrace("blame", recording, "--json").document["data"]
    after = memtrace("blame", recording, "--rules", file, "--json").document["data"]
    again = memtrace("blame", recording, "--json").document["data"]
    assert before == again
    assert after["total_bytes"] == before["total_bytes"] == sum(row["bytes"] for row in after["rows"])
    assert "mine" in {row["category"] for row in after["rows"]}


@pytest.mark.parametrize("command", [("blame",), ("rules",)], ids=" ".join)
def test_a_mistake_names_file_and_line_and_is_exit_2(tmp_path: Path, command: tuple[str, ...]) -> None:
    file = written(tmp_path / "moe.toml", RULES.replace("min_size", "min_sise"))
    ran = memtrace(*command, "--rules", file)
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.splitlines()[0] == f"memtrace: error[bad-rules]: {file}:6: unknown key 'min_sise'"
    assert ran.err.splitlines()[1].startswith("hint: A rule has: category, file, ")
    assert ran.err.splitlines()[1].endswith("Did you mean min_size?")
    missing = memtrace(*command, "--rules", tmp_path / "none.toml")
    assert missing.code == 2
    assert missing.err.startswith("memtrace: error[bad-rules]: ")


def test_text_from_a_rules_file_does_no_harm(tmp_path: Path) -> None:
    nasty = r"\u001b]52;c;AAAA\u0007 [red]x[/bar] \u202e\n\r\t"
    text = (
        RULES.replace("what the experts make", nasty)
        + f'[[rule]]\ncategory = "x"\nlabel = "{nasty}"\nfile = "train.py"\n'
    )
    file, path = written(tmp_path / "moe.toml", text.replace("expert activations", nasty)), snapshot(tmp_path)
    for command in (("blame", path), ("blame", path, "--by", "block"), ("blame", path, "--by", "tree"), ("rules",),
                    ("rules", "user.1", "user.2")):  # fmt: skip
        ran = memtrace(*command, "--rules", file)
        assert ran.code == 0, ran.err
        assert not UNSAFE.search(ran.out)
        assert not UNSAFE.search(ran.err)
    assert "[red]x[/bar]" in memtrace("rules", "--rules", file, "user.2").out
    broken = written(tmp_path / "broken.toml", f'[[rule]]\n"{nasty}" = 1')
    assert not UNSAFE.search(memtrace("rules", "--rules", broken).err)
    label = json.loads(f'"{nasty}"')
    rows = memtrace("blame", path, "--rules", file, "--json").document["data"]["rows"]
    assert {row["label"] for row in rows} == {label}


# The project's own file.


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with rules, which the command line is told to be in."""
    from memtrace import paths

    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "project" / "src"
    folder.mkdir(parents=True)
    text = RULES.replace("[[rule]]", "[[tool.memtrace.rule]]").replace("[categories]", "[tool.memtrace.categories]")
    written(tmp_path / "project" / "pyproject.toml", text)
    upward = paths.upward
    monkeypatch.setattr(paths, "upward", lambda start=None: upward(start or folder))
    return tmp_path / "project"


def test_the_projects_rules_are_used_and_it_says_which(project: Path) -> None:
    path = snapshot(project)
    ran = memtrace("blame", path, "--json")
    assert ran.document["data"]["rows"][0]["category"] == "act.moe"
    assert ran.err == f"memtrace: using the rules of {project / 'pyproject.toml'}\n"
    quiet = memtrace("blame", path, "--json", "-q")
    assert quiet.document == ran.document
    assert quiet.err == ""
    assert "using the rules of" in memtrace("rules").err
    assert memtrace("rules", "-q").err == ""


def test_named_rules_come_before_the_projects(project: Path) -> None:
    path = snapshot(project)
    file = written(project / "mine.toml", RULES.replace("act.moe", "other"))
    assert memtrace("blame", path, "--rules", file, "--json").document["data"]["rows"][0]["category"] == "other"
    assert [rule["id"] for rule in listed("--rules", file)][:2] == ["user.1", "user.2"]


def test_the_projects_file_named_counts_once(project: Path) -> None:
    found = listed("--rules", project / "pyproject.toml", "--library", "user")
    assert [rule["id"] for rule in found] == ["user.1"]


def test_a_mistake_in_the_projects_file_is_said(project: Path) -> None:
    written(project / "pyproject.toml", "[project]\nname = 'x'\n[[tool.memtrace.rules]]\n")
    ran = memtrace("blame", snapshot(project))
    assert ran.code == 2
    assert f"{project / 'pyproject.toml'}:3: unknown key 'rules'" in ran.err


# The page about them.


def test_the_examples_of_the_documentation_are_rules(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "rules.md").read_text("utf-8")
    blocks = re.findall(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    for number, block in enumerate(blocks):
        folder = tmp_path / str(number)
        folder.mkdir()
        name = "pyproject.toml" if "tool.memtrace" in block else "rules.toml"
        assert read([written(folder / name, block)]).rules


def test_the_documentation_lists_the_categories_with_their_labels() -> None:
    page = (ROOT / "docs" / "rules.md").read_text("utf-8").partition("## The categories\n")[2].partition("\n## ")[0]
    assert dict(re.findall(r"^\| `([\w.]+)` \| (.*?) \|", page, re.MULTILINE)) == LABELS


def test_a_category_lists_the_rules_that_may_give_it() -> None:
    given = {rule["id"] for rule in listed("act.saved")}
    assert {"torch.module.call"} <= given
    assert all(rule.category == "act.saved" or rule.by in OUTCOMES or rule.sites for rule in ALL if rule.id in given)
    assert {rule["category"] for rule in listed("param.retained")} <= {"param.gathered", "param.prefetched"}
    assert {"deepspeed.zero3.fetch", "deepspeed.zero3.wait"} <= {rule["id"] for rule in listed("param.retained")}


@pytest.mark.parametrize("name", ["prior", "unknown", "alloc.slack"])
def test_what_no_rule_gives_says_what_it_is(name: str) -> None:
    ran = memtrace("rules", name)
    assert ran.code == 2
    assert f"hint: It is a category ({LABELS[name]})" in ran.err


def test_every_decided_category_is_an_outcome_of_its_rule() -> None:
    """On a recording with all of ZeRO-3 in it: what decided may, by its own word, give what it gave."""
    rules = {rule.id: rule for rule in ALL}
    for name in ("opt13b-zero3-deepspeed0.18.9", "gpt2-zero3-recorded-from-step-0"):
        rows = memtrace("blame", "--by", "block", "--json", FIXTURES / f"{name}.pickle.xz").document["data"]["rows"]
        decided = [row for row in rows if row["evidence"] is not None]
        assert decided
        assert {
            (row["evidence"]["rule"], row["category"])
            for row in decided
            if row["category"] not in rules[row["evidence"]["rule"]].categories
        } == set()


def test_help_needs_nothing_heavy() -> None:
    code = (
        "import sys; from memtrace.cli import cli\n"
        "try: cli(['rules', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'numpy', 'rich'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
