"""The user's own rules: what a file may say, where each mistake is said to be, and which block each rule decides."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from builders import SnapshotBuilder

import memtrace
from memtrace import paths
from memtrace.attribution import user_rules
from memtrace.attribution.rule import Rank
from memtrace.attribution.rule_files import MAX_BYTES, find
from memtrace.attribution.rules import ALL
from memtrace.attribution.toml_lines import key_lines, line_of
from memtrace.attribution.user_rules import MAX_CATEGORIES, UserRules, parse, read
from memtrace.errors import MemtraceError, RulesError
from memtrace.timeline import Phase
from memtrace.timeline.callsites import Function

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30
BASE = 0x7F0000000000
STEP = 64 * MiB
TORCH = "/opt/venv/lib/python3.11/site-packages/torch"
CALL = f"{TORCH}/nn/modules/module.py:1776 _call_impl"
MOE = "/home/user/project/models/moe.py:31 forward"
ROUTE = "/home/user/project/models/moe.py:12 route"
MAIN = "/home/user/project/train.py:90 main"

RULE = '[[rule]]\ncategory = "act.moe"\nfile = "models/moe.py"\n'
FULL = """
[[rule]]
category = "act.moe"
label = "expert activations"
file = "models/moe.py"
function = ["forward", "route"]
inside = ["train.py:main", "evaluate.py"]
min_size = "1MiB"
max_size = 2147483648
phase = "forward"
note = "why"
id = "moe.experts"

[[rule]]
category = "param.full"
file = "models/*.py"

[categories]
"act.moe" = "activations of experts"
"""


def snapshot(tmp_path: Path, *blocks: tuple[str | None, int]) -> Path:
    """A recording of blocks (stack, bytes), all alive at its end."""
    builder = SnapshotBuilder()
    for number, (stack, size) in enumerate(blocks):
        builder.alloc(BASE + number * STEP, size, stack=stack)
    return builder.pickle(tmp_path / "snapshot.pickle")


def decided(path: Path, rules: UserRules | None) -> list[tuple[str, str, str, str | None]]:
    """Category, label, confidence and rule of each block, in order of birth."""
    blame = memtrace.load(path, rules=rules).blame(at="end", by="block")
    assert sum(row.bytes for row in blame.rows) == blame.total_bytes
    rows = sorted(blame.rows, key=lambda row: row.block.born if row.block else -1)
    return [(row.category, row.label, row.confidence, row.evidence.rule if row.evidence else None) for row in rows]


def categories(path: Path, text: str | None) -> list[str]:
    return [row[0] for row in decided(path, None if text is None else parse(text, "rules.toml"))]


# What a file says.


def test_every_key() -> None:
    rules = parse(FULL, "rules.toml")
    first, second = rules.rules
    assert first.id == "moe.experts"
    assert first.category == "act.moe"
    assert first.label == "expert activations"
    assert first.where == Function("models/moe.py", ("forward", "route"))
    assert first.inside == (Function("train.py", ("main",)), Function("evaluate.py"))
    assert (first.min_bytes, first.max_bytes) == (MiB, 2 * GiB)
    assert first.phases == (Phase.FORWARD,)
    assert first.note == "why"
    assert first.rank == Rank.USER
    assert second.id == "user.2"
    assert second.where == Function("models/*.py", ("*",))
    assert not second.looks_at_the_block
    assert [origin.line for origin in rules.origins] == [2, 14]
    assert rules.labels == {"act.moe": "activations of experts"}
    assert rules.own_categories == ("act.moe",)


def test_a_pyproject_has_them_in_a_section_of_its_own() -> None:
    text = FULL.replace("[[rule]]", "[[tool.memtrace.rule]]").replace("[categories]", "[tool.memtrace.categories]")
    found = parse('[project]\nname = "x"\n' + text, "some/pyproject.toml")
    assert found.rules == parse(FULL, "rules.toml").rules
    assert [origin.line for origin in found.origins] == [4, 16]


def test_several_files_in_their_order(tmp_path: Path) -> None:
    for name, label in (("a.toml", "first"), ("b.toml", "second")):
        (tmp_path / name).write_text(f'{RULE}[categories]\n"act.moe" = "{label}"\n')
    found = read([tmp_path / "a.toml", tmp_path / "b.toml"])
    assert [rule.id for rule in found.rules] == ["user.1", "user.2"]
    assert [Path(origin.file).name for origin in found.origins] == ["a.toml", "b.toml"]
    assert found.labels == {"act.moe": "first"}


def test_a_byte_order_mark_and_windows_line_ends_change_nothing(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_bytes(b"\xef\xbb\xbf" + FULL.replace("\n", "\r\n").encode())
    assert read([file]).rules == parse(FULL, "rules.toml").rules
    assert [origin.line for origin in read([file]).origins] == [2, 14]


def test_an_empty_file_has_no_rules() -> None:
    assert parse("", "rules.toml") == UserRules()


# What a file may not say, and where it says it.

MISTAKES = {
    "an unknown key": (f'{RULE}\n\nmin_sise = "1MiB"', 6, "unknown key 'min_sise'", "Did you mean min_size?"),
    "an unknown table": ('[[rules]]\ncategory = "a"', 1, "unknown key 'rules'", "Did you mean rule?"),
    "one bracket": ('# x\n[rule]\ncategory = "a"\nfile = "b"', 2, "'rule' is no list of tables", "[[rule]]"),
    "a file with a line": ('[[rule]]\ncategory = "x"\nfile = "a.py:31"', 3, "names a line", "lines = 31"),
    "lines that are none": (f'{RULE}lines = "31..60"', 4, "names no lines", '"31-60 84"'),
    "no line at all": (f'{RULE}lines = " "', 4, "names no lines", ""),
    "lines the wrong way round": (f'{RULE}lines = "60-31"', 4, "that no line is in", ""),
    "line 0": (f"{RULE}lines = 0", 4, "that no line is in", ""),
    "a line that is true": (f"{RULE}lines = true", 4, "'lines' is true or false, not a line", ""),
    "lines of C++": ('[[rule]]\ncategory = "x"\nfile = "c++"\nfunction = "f"\nlines = 3', 5, "have no lines", ""),
    "a category that memtrace has not": (f'{RULE}was = "act.safed"', 4, "no category 'act.safed'", "act.saved?"),
    "a category of no block": (f'{RULE}was = ["alloc.slack"]', 4, "no category 'alloc.slack'", ""),
    "no category": ('[[rule]]\nfile = "a.py"\n\n[[rule]]\nfile = "b.py"\ncategory = "x"', 1, "no 'category'", ""),
    "no file": (f'{RULE}\n[[rule]]\ncategory = "x"', 5, "no 'file'", ""),
    "a number for text": ('[[rule]]\ncategory = "x"\nfile = 3', 3, "'file' is a number, not text", 'file = "..."'),
    "a table for text": (f"{RULE}[rule.note]\nx = 1", 4, "'note' is a table, not text", ""),
    "a date for text": (f"{RULE}note = 2026-01-01", 4, "'note' is a date, not text", ""),
    "a list with a number": (f'{RULE}function = [\n  "f",\n  3,\n]', 4, "'function' has a number among", ""),
    "an empty list": (f"{RULE}function = []", 4, "would never fire", ""),
    "an empty text": (f'{RULE}inside = [""]', 4, "'inside' has an empty text", ""),
    "a phase that is none": (f'{RULE}phase = ["init", "forwards"]', 4, "no phase 'forwards'", "Did you mean forward?"),
    "a size that is none": (f'{RULE}min_size = "1 Moo"', 4, "not a size: '1 Moo'", "512MiB"),
    "a size that is true": (f"{RULE}min_size = true", 4, "'min_size' is true or false, not a size", ""),
    "a size that is a fraction": (f"{RULE}max_size = 1.5", 4, "'max_size' is a number, not a size", ""),
    "a negative size": (f"{RULE}max_size = -1", 4, "'max_size' is negative", ""),
    "sizes that exclude each other": (f'{RULE}min_size = "2MiB"\nmax_size = "1MiB"', 5, "is less than 'min_size'", ""),
    "an empty file": ('[[rule]]\ncategory = "x"\nfile = " "', 3, "'file' is empty", "models/moe.py"),
    "a directory": ('[[rule]]\ncategory = "x"\nfile = "models/"', 3, "names a directory", '"models/*"'),
    "two stars": ('[[rule]]\ncategory = "x"\nfile = "models/**/moe.py"', 3, "* stays within one part", ""),
    "a relative part": ('[[rule]]\ncategory = "x"\nfile = "../moe.py"', 3, "a part that no path has", ""),
    "a file of C++": ('[[rule]]\ncategory = "x"\nfile = "Conv.cpp"', 3, "is not a Python file", 'file = "c++"'),
    "C++ without a function": ('[[rule]]\ncategory = "x"\nfile = "c++"', 3, "needs a 'function'", ""),
    "a dotted function": (f'{RULE}function = "MoE.forward"', 4, "no function's name", "Here: 'forward'."),
    "a pattern of functions": (f'{RULE}function = "forward*"', 4, "no function's name", "matched whole"),
    "no function after a colon": (f'{RULE}inside = "train.py:"', 4, "'inside': '' is no function's name", ""),
    "no file before a colon": (f'{RULE}inside = ":main"', 4, "'inside' is empty", ""),
    "control characters": ('[[rule]]\ncategory = "act.\\u001b]52"\nfile = "a.py"', 2, "cannot be a category", "a-z"),
    "a space in a category": ('[[rule]]\ncategory = "act moe"\nfile = "a.py"', 2, "cannot be a category", ""),
    "an empty category": ('[[rule]]\ncategory = ""\nfile = "a.py"', 2, "cannot be a category", ""),
    "a category of the allocator": ('[[rule]]\ncategory = "alloc.slack"\nfile = "a.py"', 2, "memtrace itself", ""),
    "what is not known": ('[[rule]]\ncategory = "unknown"\nfile = "a.py"', 2, "memtrace itself", ""),
    "an id that is none": (f'{RULE}id = "my rule"', 4, "cannot be an id", ""),
    "an automatic id": (f'{RULE}id = "user.7"', 4, "a rule without an id", ""),
    "an id of ours": (f'{RULE}id = "{ALL[0].id}"', 4, "there is a rule", ""),
    "an id twice": (f'{RULE}id = "a"\n{RULE}\nid = "a"', 9, "there is a rule 'a' already", ""),
    "a dotted name without quotes": (f'{RULE}[categories]\nact.moe = "x"', 5, "label of 'act' is a table", "in quotes"),
    "an empty label": (f'{RULE}[categories]\n"act.moe" = ""', 5, "the label of 'act.moe' is empty", ""),
    "a label that is a number": (f'{RULE}[categories]\n\n"act.moe" = 3', 6, "is a number, not text", ""),
    "a category that is none": (f'{RULE}[categories]\n"act MoE" = "x"', 5, "cannot be a category", ""),
    "categories that are no table": ('categories = "x"', 1, "'categories' is no table", ""),
    "not TOML": (f"{RULE}\nnote = why", 5, "Invalid value (column 8)", "This is not TOML"),
    "a text that does not end": (f'{RULE}note = "why', 4, "", "This is not TOML"),
    "an end too early": (f"{RULE}function = [", 4, "", "This is not TOML"),
    "a key twice": (f'{RULE}file = "x.py"', 4, "Cannot overwrite a value", "This is not TOML"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_said_with_its_line(mistake: tuple[str, int, str, str]) -> None:
    text, line, message, hint = mistake
    with pytest.raises(RulesError) as caught:
        parse(text, "my/rules.toml")
    assert caught.value.message.startswith(f"my/rules.toml:{line}: ")
    assert message in caught.value.message
    assert caught.value.hint
    assert hint in caught.value.hint
    assert caught.value.exit_code == 2


def test_the_line_is_right_among_many_rules_and_misleading_text() -> None:
    """Headers in texts, comments and arrays are no headers."""
    decoys = '''
[[rule]] # [[rule]]
category = "a" # "
note = """
[[rule]]
file = "not here"
\\""" [[rule]]
""""
function = [ # [
  "f", # ]]
  'g',
]
file = "it's.py"
'''
    text = f'{decoys}\n  [[ "rule" ]]\n"category" = "b"\nfile = "x.py"\n{decoys}\n{RULE}max_size = '
    with pytest.raises(RulesError, match=rf"^rules\.toml:{text.count(chr(10)) + 1}: 'max_size'"):
        parse(f'{text}"?"', "rules.toml")
    rules = parse(f"{text}1", "rules.toml")
    assert [text.splitlines()[origin.line - 1].strip() for origin in rules.origins] == [
        "[[rule]] # [[rule]]",
        '[[ "rule" ]]',
        "[[rule]] # [[rule]]",
        "[[rule]]",
    ]


def test_rules_in_one_array_have_the_line_of_its_key() -> None:
    text = '\nrule = [\n  {category = "a", file = "a.py"},\n  {category = "b"},\n]\n'
    with pytest.raises(RulesError, match=r"^rules\.toml:2: the rule has no 'file'"):
        parse(text, "rules.toml")


def test_lines_of_nested_arrays_of_tables() -> None:
    lines = key_lines('[[a]]\n[[a.b]]\nx = 1\n[[a.b]]\nx = 1\n[[a]]\n[[a.b]]\nx.y = 1\n[c."d.e"]\nf = 1')
    assert lines["a", 0, "b", 1, "x"] == 5
    assert lines["a", 1, "b", 0, "x", "y"] == 8
    assert lines["c", "d.e", "f"] == 10
    assert line_of(lines, ("a", 1, "b", 0, "z")) == 7
    assert line_of(lines, ("nowhere",)) == 1


def test_too_many_rules() -> None:
    text = '[[rule]]\ncategory="a"\nfile="a"\n' * 10_001
    with pytest.raises(RulesError, match=r"^rules\.toml:30001: more than 10,000 rules"):
        parse(text, "rules.toml")
    assert len(parse('[[rule]]\ncategory="a"\nfile="a"\n' * 10_000, "rules.toml").rules) == 10_000


def test_too_many_categories(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text("".join(f'[[rule]]\ncategory="own.{n}"\nfile="a"\n' for n in range(MAX_CATEGORIES + 1)))
    with pytest.raises(RulesError, match="201 categories of your own, and 200 is the most"):
        read([file])
    file.write_text("".join(f'[[rule]]\ncategory="own.{n}"\nfile="a"\n' for n in range(MAX_CATEGORIES)))
    path = snapshot(tmp_path, ("a:1 f", MiB))
    assert decided(path, read([file]))[0][0] == "own.0"


def test_a_file_that_is_too_large(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_bytes(b"#" * MAX_BYTES)
    assert read([file]) == UserRules()
    file.write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(RulesError, match=r"larger than 1\.00 MiB"):
        read([file])


def test_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_bytes(RULE.encode() + b'note = "\xe9"')
    with pytest.raises(RulesError, match=r"rules\.toml:4: not UTF-8"):
        read([file])


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RulesError, match="no such file") as caught:
        read([tmp_path / "rules.toml"])
    assert caught.value.exit_code == 2
    with pytest.raises(RulesError, match="is a directory"):
        read([tmp_path])


@pytest.mark.parametrize(
    "text", ["x = " + "[" * 100_000, "x = " + "1" * 10_000, "x = {" * 50_000, "[" * 100_000, '"' * 99_999, "'" * 99_999]
)
def test_a_hostile_file_is_an_error_like_another(text: str) -> None:
    with pytest.raises(RulesError):
        parse(text, "rules.toml")


def test_a_long_key_is_not_repeated_whole() -> None:
    with pytest.raises(RulesError) as caught:
        parse(f"{RULE}{'x' * 500_000} = 1", "rules.toml")
    assert len(str(caught.value)) < 1_000


# Which block a rule decides.


def test_a_rule_names_its_blocks_and_says_so(tmp_path: Path) -> None:
    path = snapshot(tmp_path, (f"{MOE};{MAIN}", MiB), (MAIN, 2 * MiB))
    rules = parse(f'{RULE}label = "experts"', "rules.toml")
    assert decided(path, rules)[0] == ("act.moe", "experts", "certain", "user.1")
    assert decided(path, rules)[1] == decided(path, None)[1]
    row = next(row for row in memtrace.load(path, rules=rules).blame(at="end").rows if row.category == "act.moe")
    assert row.evidence is not None
    assert row.evidence.frame is not None
    assert row.evidence.frame.filename.endswith("models/moe.py")


def test_the_label_is_the_rules_or_the_categorys_or_its_name(tmp_path: Path) -> None:
    path = snapshot(tmp_path, (MOE, MiB))
    text = '\n[categories]\n"act.moe" = "of experts"'
    assert decided(path, parse(RULE, "rules.toml"))[0][1] == "act.moe"
    assert decided(path, parse(RULE + text, "rules.toml"))[0][1] == "of experts"
    assert decided(path, parse(f'{RULE}label = "its own"{text}', "rules.toml"))[0][1] == "its own"


def test_the_first_match_wins_wherever_its_frame_is(tmp_path: Path) -> None:
    path = snapshot(tmp_path, (f"{ROUTE};{MOE};{MAIN}", MiB))
    outer = '[[rule]]\ncategory = "outer"\nfile = "train.py"\n'
    assert categories(path, outer + RULE) == ["outer"]
    assert categories(path, RULE + outer) == ["act.moe"]


def test_the_innermost_frame_of_the_rule_is_the_evidence(tmp_path: Path) -> None:
    path = snapshot(tmp_path, (f"{ROUTE};{MOE};{MAIN}", MiB))
    row = memtrace.load(path, rules=parse(RULE, "rules.toml")).blame(at="end").rows[0]
    assert row.evidence is not None
    assert row.evidence.frame is not None
    assert row.evidence.frame.name == "route"


def test_it_decides_before_every_rule_of_ours(tmp_path: Path) -> None:
    state = f"{TORCH}/optim/adam.py:170 _init_group;{MAIN}"
    path = snapshot(tmp_path, (state, MiB))
    assert categories(path, None) == ["optim.state"]
    assert categories(path, '[[rule]]\ncategory = "mine"\nfile = "train.py"') == ["mine"]


def test_what_ours_say_of_other_blocks_does_not_depend_on_yours(tmp_path: Path) -> None:
    """A rule for every call of a module takes its blocks, but the script's inputs are still known by that call."""
    builder = SnapshotBuilder()
    layer = f"{TORCH}/nn/modules/linear.py:125 forward;{CALL};{MAIN}"
    builder.alloc(BASE, MiB, stack=MAIN).alloc(BASE + STEP, MiB, stack=layer)
    path = builder.pickle(tmp_path / "x.pickle")
    without = categories(path, None)
    assert without[0] == "input"
    assert categories(path, '[[rule]]\ncategory = "mine"\nfile = "torch/nn/modules/module.py"') == ["input", "mine"]


def test_conditions_on_size_fall_through_to_the_next_rule_and_to_ours(tmp_path: Path) -> None:
    stack = f"{MOE};{CALL};{MAIN}"
    path = snapshot(tmp_path, *((stack, size) for size in (MiB - 1, MiB, 2 * MiB, 2 * MiB + 1, 9 * MiB)))
    ours = categories(path, None)
    text = (
        f'{RULE}min_size = "1MiB"\nmax_size = "2MiB"\n'
        '[[rule]]\ncategory = "large"\nfile = "train.py"\nmin_size = "8MiB"\n'
    )
    assert ours[0] == "fwd.temp" or ours[0].startswith("act.")
    assert categories(path, text) == [ours[0], "act.moe", "act.moe", ours[3], "large"]
    every = f'{text}[[rule]]\ncategory = "rest"\nfile = "moe.py"\n'
    assert categories(path, every) == ["rest", "act.moe", "act.moe", "rest", "large"]


def test_sizes_larger_than_any_integer_of_ours(tmp_path: Path) -> None:
    path = snapshot(tmp_path, (MOE, MiB))
    assert categories(path, f'{RULE}max_size = "99999999999999999999TiB"') == ["act.moe"]
    assert categories(path, f'{RULE}min_size = "99999999999999999999TiB"') == categories(path, None)


def phases(tmp_path: Path) -> Path:
    """A block of the same function in forward, in backward, and before the recording."""
    moe = f"{MOE};{MAIN}"
    builder = SnapshotBuilder().alloc(BASE, MiB, stack=moe)
    builder.alloc(BASE + STEP, MiB, stack=f"{MOE};{CALL};{MAIN}")
    builder.alloc(BASE + 2 * STEP, MiB, stack=f"{MOE};{TORCH}/autograd/graph.py:829 _engine_run_backward;{MAIN}")
    return builder.pickle(tmp_path / "phases.pickle")


def test_a_condition_on_the_phase(tmp_path: Path) -> None:
    path = phases(tmp_path)
    ours = categories(path, None)
    assert categories(path, f'{RULE}phase = "backward"') == [ours[0], ours[1], "act.moe"]
    assert categories(path, f'{RULE}phase = ["forward", "backward"]')[1:] == ["act.moe", "act.moe"]
    assert categories(path, f'{RULE}phase = "eval"') == ours


def test_a_block_from_before_the_recording_was_born_in_no_known_phase(tmp_path: Path) -> None:
    raw = SnapshotBuilder().alloc(BASE, MiB, stack=MOE).alloc(BASE + STEP, MiB, stack=MOE).build()
    every = "".join(f'{RULE}phase = "{phase.name.lower()}"\n' for phase in Phase)
    path = tmp_path / "x.pickle"
    for kept, expected in ((2, [False, True]), (0, [False, False])):  # the second segment and block, or no events
        raw["device_traces"][0] = raw["device_traces"][0][-kept:] if kept else []
        path.write_bytes(pickle.dumps(raw))
        assert [category == "act.moe" for category in categories(path, every)] == expected
        assert categories(path, RULE) == ["act.moe"] * 2


def test_inside_is_a_frame_further_out(tmp_path: Path) -> None:
    path = snapshot(tmp_path, (f"{MOE};{MAIN}", MiB), (MOE, MiB), (f"{MAIN};{MOE}", MiB), (f"{ROUTE};{MOE}", MiB))
    ours = categories(path, None)
    assert categories(path, f'{RULE}inside = "train.py:main"') == ["act.moe", *ours[1:]]
    assert categories(path, f'{RULE}inside = ["x.py", "train.py"]') == ["act.moe", *ours[1:]]
    assert categories(path, f'{RULE}inside = "train.py:evaluate"') == ours
    assert categories(path, f'{RULE}inside = "moe.py:forward"') == [*ours[:3], "act.moe"]


def test_functions_are_matched_whole(tmp_path: Path) -> None:
    path = snapshot(tmp_path, (MOE, MiB), (ROUTE, MiB), (MOE.replace("forward", "forward_moe"), MiB))
    ours = categories(path, None)
    assert categories(path, f'{RULE}function = "forward"') == ["act.moe", *ours[1:]]
    assert categories(path, f'{RULE}function = ["forward", "route"]') == ["act.moe", "act.moe", ours[2]]
    assert categories(path, f'{RULE}function = "*"') == ["act.moe"] * 3


def test_methods_of_one_name_by_their_lines(tmp_path: Path) -> None:
    """A file with two classes: every method is called forward, as in nanoGPT's model.py."""
    other = MOE.replace(":31 ", ":84 ")
    path = snapshot(tmp_path, (MOE, MiB), (other, MiB), (f"{other};{MOE}", MiB), (f"{ROUTE};{MOE}", MiB))
    ours = categories(path, None)
    assert categories(path, f"{RULE}lines = 31") == ["act.moe", ours[1], "act.moe", "act.moe"]
    assert categories(path, f'{RULE}lines = "80-90"') == [ours[0], "act.moe", "act.moe", ours[3]]
    assert categories(path, f'{RULE}lines = "1-30, 32-83"') == [*ours[:3], "act.moe"]
    assert categories(path, f'{RULE}lines = "1-20 31"\nfunction = "forward"') == ["act.moe", ours[1], *["act.moe"] * 2]
    (_, row, *_) = decided(path, parse(f"{RULE}lines = 84", "rules.toml"))
    assert row[0] == "act.moe"


def test_a_rule_of_what_memtrace_itself_says_of_the_block(tmp_path: Path) -> None:
    path = phases(tmp_path)
    ours = categories(path, None)
    assert len(set(ours[1:])) == 2
    assert categories(path, f'{RULE}was = "{ours[1]}"') == [ours[0], "act.moe", ours[2]]
    every = f'{RULE}was = "{ours[2]}"\n[[rule]]\ncategory = "rest"\nfile = "moe.py"\nwas = ["{ours[1]}", "bwd.temp"]\n'
    assert categories(path, every)[1:] == ["rest", "act.moe"]


def test_rules_that_decide_nothing_are_named(tmp_path: Path) -> None:
    path = snapshot(tmp_path, (MOE, MiB))
    text = f'[[rule]]\ncategory = "a"\nfile = "nope.py"\n\n{RULE}\n[[rule]]\ncategory = "b"\nfile = "moe.py"\n'
    (notice,) = memtrace.load(path, rules=parse(text, "my.toml")).notices()
    assert (notice.code, notice.message) == (
        "idle-rules", "my.toml: 2 of 3 rules decide nothing here: user.1 (line 1), user.3 (line 9)"
    )  # fmt: skip
    assert memtrace.load(path, rules=parse(RULE, "my.toml")).notices() == ()
    section = RULE.replace("[[rule]]", "[[tool.memtrace.rule]]").replace("moe.py", "nope.py")
    assert memtrace.load(path, rules=parse(section, "a/pyproject.toml")).notices() == ()


def test_frames_of_cpp_by_a_part_of_their_name(tmp_path: Path) -> None:
    path = snapshot(tmp_path, (f"??:0 at::native::cudnn_convolution;{MAIN}", MiB), (f"??:0 at::empty;{MAIN}", MiB))
    ours = categories(path, None)
    text = '[[rule]]\ncategory = "conv"\nfile = "c++"\nfunction = "cudnn_conv"'
    assert categories(path, text) == ["conv", ours[1]]
    assert categories(path, '[[rule]]\ncategory = "any"\nfile = "*"\nfunction = "*"') == ["any", "any"]
    no_python = snapshot(tmp_path, ("??:0 at::empty", MiB))
    assert categories(no_python, '[[rule]]\ncategory = "any"\nfile = "*"') != ["any"]


WINDOWS = "C:\\Users\\user\\project\\models\\moe.py:31 forward;C:\\Users\\user\\project\\train.py:3 main"


@pytest.mark.parametrize(
    "keys",
    [
        'file = "models/moe.py"',
        "file = 'models\\moe.py'",
        "file = 'C:\\Users\\user\\project\\models\\moe.py'",
        "file = 'moe.py'\ninside = 'C:\\Users\\user\\project\\train.py'",
        "file = 'moe.py'\ninside = 'C:\\Users\\user\\project\\train.py:main'",
        'file = "*/moe.py"',
    ],
)
def test_paths_of_windows(tmp_path: Path, keys: str) -> None:
    assert categories(snapshot(tmp_path, (WINDOWS, MiB)), f'[[rule]]\ncategory = "act.moe"\n{keys}') == ["act.moe"]


ADVERSARIAL = [
    "/home/user/models/moe.py.bak/x.py:1 forward",
    "/home/user/mymodels/moe.py:1 forward",
    "/home/user/models/my_moe.py:1 forward",
    "/home/user/models/moe.pyc:1 forward",
    "/home/user/models/moe.py/data.py:1 forward",
    "/home/user/models/extra/moe.py:1 forward",
    "/home/user/models moe.py:1 forward",
    "/home/user/data/loader.py:1 models/moe.py",
    "C:\\Users\\user\\mymodels\\moe.py:1 forward",
]


@pytest.mark.parametrize("stack", ADVERSARIAL)
def test_a_path_that_merely_contains_the_words_is_no_match(tmp_path: Path, stack: str) -> None:
    path = snapshot(tmp_path, (stack, MiB))
    assert decided(path, parse(RULE, "rules.toml")) == decided(path, None)


NOT_OURS = [
    "/home/user/train_stage3.py:10 _create_fp16_partitions_with_defragmentation",
    "/home/user/zero/stage3.py:10 _create_fp32_partitions",
    "/home/user/deepspeed-notes/runtime/zero/stage3.py:10 _create_fp32_partitions",
    "/home/user/deepspeed-notes/runtime/engine.py:10 step",
    "/home/user/mytorch/optim/adam.py:10 _init_group",
    "/home/user/torch-optim/adam.py:10 step",
    "/home/user/nn/modules/module.py:10 _call_impl",
    "/home/user/data/loader.py:10 forward",
    "/home/user/data/deepspeed.py:10 fetch_sub_module",
    "/home/user/transformers_notes/models/opt/modeling_opt.py:10 forward",
    "C:\\mytorch\\optim\\adam.py:10 _init_group",
]


@pytest.mark.parametrize("stack", NOT_OURS)
def test_no_rule_of_ours_fires_on_a_name_that_looks_like_its_own(tmp_path: Path, stack: str) -> None:
    """Of a script that only looks like a library nothing is known: at most that it is the script's own."""
    rule = decided(snapshot(tmp_path, (f"{stack};{MAIN}", MiB)), None)[0][3]
    assert rule is None or rule.startswith("script.")


def test_the_adversarial_names_have_twins_that_do_match(tmp_path: Path) -> None:
    """Else the test above would pass with no rules at all."""
    site = "/opt/venv/lib/python3.11/site-packages"
    real = [
        f"{site}/deepspeed/runtime/zero/stage3.py:10 _create_fp32_partitions",
        f"{site}/torch/optim/adam.py:10 _init_group",
        f"{site}/torch/nn/modules/module.py:10 _call_impl",
    ]
    found = [decided(snapshot(tmp_path, (f"{stack};{MAIN}", MiB)), None)[0][3] for stack in real]
    assert all(rule is not None and rule.startswith(("deepspeed.", "torch.")) for rule in found), found


def test_every_grouping_still_sums(tmp_path: Path) -> None:
    path = phases(tmp_path)
    rules = parse(f'{RULE}phase = "forward"\nlabel = "x"', "rules.toml")
    opened = memtrace.load(path, rules=rules)
    for of in ("allocated", "reserved", "requested", "active"):
        for by in ("category", "stack", "frame", "file", "phase", "stream", "block", "tree"):
            blame = opened.blame(at="end", of=of, by=by)
            assert sum(row.bytes for row in blame.rows) == blame.total_bytes, (of, by)


def test_recordings_with_and_without_a_rule_differ_only_in_its_blocks() -> None:
    text = '[[rule]]\ncategory = "mine"\nfile = "torch/optim/*.py"\nmin_size = "1MiB"'
    path = "fixtures/mlp-adamw.pickle.xz"
    with_rule, without = (
        memtrace.load(Path(__file__).parents[3] / path, rules=rules).attribution()
        for rules in (parse(text, "rules.toml"), None)
    )
    mine = with_rule.rule == 0
    assert mine.any()
    assert {with_rule.categories[code] for code in with_rule.category[mine].tolist()} == {"mine"}
    for column in ("category", "confidence", "reason", "frame", "label"):
        assert (getattr(with_rule, column)[~mine] == getattr(without, column)[~mine]).all(), column
    ids = [[one.rule_ids[rule] if rule >= 0 else None for rule in one.rule.tolist()] for one in (with_rule, without)]
    assert [a for a, own in zip(ids[0], mine.tolist(), strict=True) if not own] == [
        b for b, own in zip(ids[1], mine.tolist(), strict=True) if not own
    ]


def test_the_python_api_takes_files(tmp_path: Path) -> None:
    path, file = snapshot(tmp_path, (MOE, MiB)), tmp_path / "rules.toml"
    file.write_text(RULE)
    for rules in (file, str(file), [file], [str(file), file]):
        assert memtrace.load(path, rules=rules).blame(at="end").rows[0].category == "act.moe"
    assert memtrace.load(path, rules=[]).rules == UserRules()
    with pytest.raises(MemtraceError):
        memtrace.load(path, rules=tmp_path / "none.toml")


# The project's own file.


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """HOME/project with rules in its pyproject.toml, and a directory deep inside it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "project" / "src" / "deep").mkdir(parents=True)
    (tmp_path / "project" / "pyproject.toml").write_text(RULE.replace("[[rule]]", "[[tool.memtrace.rule]]"))
    return tmp_path / "project"


def test_the_nearest_section_upwards_is_found(project: Path) -> None:
    assert find(project / "src" / "deep") == project / "pyproject.toml"
    (project / "src" / "pyproject.toml").write_text('[tool.other]\nname = "memtrace"\n')
    assert find(project / "src" / "deep") == project / "pyproject.toml"
    (project / "src" / "pyproject.toml").write_text("[tool.memtrace]\n")
    assert find(project / "src" / "deep") == project / "src" / "pyproject.toml"
    assert read([project / "src" / "pyproject.toml"]) == UserRules()


def test_the_walk_ends_at_home(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(project / "src"))
    assert find(project / "src" / "deep") is None


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="files have no owner here")
def test_a_file_of_somebody_else_is_not_used(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = paths.is_ours
    monkeypatch.setattr(paths, "is_ours", lambda path: ours(path) and path.name != "pyproject.toml")
    assert find(project / "src") is None


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="directories have no owner here")
def test_the_walk_ends_at_a_directory_of_somebody_else(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = paths.is_ours
    monkeypatch.setattr(paths, "is_ours", lambda path: ours(path) and path.name != "src")
    assert find(project / "src" / "deep") is None


def test_a_user_without_a_home(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", homeless)
    assert find(project / "src") == project / "pyproject.toml"


def test_a_directory_that_is_gone(project: Path) -> None:
    assert find(project / "gone") is None


def test_broken_files_on_the_way_matter_only_if_they_speak_of_us(project: Path) -> None:
    other = project / "src" / "pyproject.toml"
    for content in (b"[tool.ruff\n", b"\xff memtrace", b"# memtrace\n[tool.ruff\n", b"#" * (MAX_BYTES + 1)):
        other.write_bytes(content)
        assert find(project / "src" / "deep") == project / "pyproject.toml"
    other.write_bytes(b"[tool.memtrace]\nrule = \n")
    assert find(project / "src" / "deep") == other
    with pytest.raises(RulesError, match=re.escape(f"{other}:2: ")):
        read([other])


def test_a_pyproject_without_our_section_that_is_named(tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text("[project]\n")
    with pytest.raises(RulesError, match=r"has no \[tool\.memtrace\]"):
        read([file])
    file.write_text("[tool]\nmemtrace = 3\n")
    with pytest.raises(RulesError, match=r"pyproject\.toml:2: 'memtrace' is no table"):
        read([file])
    file.write_text("[tool.memtrace.rule]\n")
    with pytest.raises(RulesError) as caught:
        read([file])
    assert "[[tool.memtrace.rule]]" in (caught.value.hint or "")


def test_what_takes_rules() -> None:
    rules: Any = parse(RULE, "rules.toml")
    assert user_rules.as_rules(rules) is rules
