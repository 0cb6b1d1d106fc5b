"""With the roles that the recorder would have written, every tensor that was alive is what it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recorded_roles import recorded_roles
from truths import all_truths, block_at_end, name_of, names_of_categories, opened, roles_of, truth_of

import memtrace
from memtrace.io.sidecar import read_sidecar


@pytest.mark.parametrize("pair", all_truths(), ids=name_of)
def test_roles_are_right_and_change_nothing_else(pair: tuple[Path, Path], tmp_path: Path) -> None:
    name, truth = name_of(pair), truth_of(pair[1])
    rows = recorded_roles(name, truth)
    if not rows:
        pytest.skip("the truth has no roles")
    stage = next((stage for stage in (1, 2, 3) if f"zero{stage}" in name), None)
    (tmp_path / "x.json").write_text(json.dumps({"memtrace": "1", "roles": rows, "zero": {"stage": stage}}))
    plain = opened(pair[0])
    snapshot = memtrace.Snapshot(plain.data, sidecar=read_sidecar(tmp_path / "x.pickle"))
    categories = names_of_categories(snapshot)
    held = {block_at_end(snapshot, row["address"]) for row in rows}
    wrong = [
        (role, str(categories[row]))
        for role in roles_of(name, truth)
        if (row := block_at_end(snapshot, role.address)) in held and row is not None
        if categories[row] not in role.right
    ]
    assert not wrong
    changed = (categories != names_of_categories(plain)).nonzero()[0].tolist()
    assert set(changed) <= held
    blame = snapshot.blame(at="end")
    assert sum(row.bytes for row in blame.rows) == blame.total_bytes == plain.blame(at="end").total_bytes
