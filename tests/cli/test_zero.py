"""`memtrace zero`: the page, the document, planning, and what is refused."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from running import memtrace

ZERO3 = "fixtures/gpt2-zero3.pickle.xz"


def test_the_page_names_the_job_then_a_table_that_sums() -> None:
    ran = memtrace("zero", ZERO3)
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert lines[0] == "ZeRO-3, Ψ = 124.44 M, N = 8, bf16, Adam, DeepSpeed 0.19.3 or later"
    assert lines[1].startswith("Peak: 2.06 GiB allocated in backward of step 1")
    assert lines[3].split() == ["term", "(GiB)", "paper", "DeepSpeed", "measured", "difference"]
    for row in (
        "parameters             2Ψ/N   0.03       0.03      0.03        0.00",
        "reduce bucket                    -       0.93      0.93        0.00",
        "act.saved                        -          -      0.26       +0.26",
    ):
        assert row in lines
    assert any(line.startswith("gathered parameters +237.12 MiB: Gathered ahead") for line in lines)
    assert "N: 8; the sizes of the whole parameters against their shards." in lines
    assert f"next: memtrace blame {ZERO3} --at peak" in lines


def test_the_table_fits_80_columns() -> None:
    lines = memtrace("zero", ZERO3).out.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("term"))
    assert all(len(line) <= 80 for line in lines[start : lines.index("", start)])


def test_the_document() -> None:
    document = memtrace("zero", "--json", ZERO3).document
    assert document["schema"] == "memtrace.zero/1"
    assert document["snapshot"]["path"] == ZERO3
    data = document["data"]
    assert (data["stage"], data["world"], data["params"], data["dtype"], data["optimizer"]) == (
        3, 8, 124_439_808, "bf16", "Adam",
    )  # fmt: skip
    assert data["sources"].keys() == {"stage", "world", "params", "dtype", "optimizer"}
    names = [term["name"] for term in data["terms"]]
    assert names[:6] == [
        "parameters", "gradients", "masters", "moments", "reduce bucket", "persistent parameters",
    ]  # fmt: skip
    assert len(set(names)) == len(names)
    for term in data["terms"]:
        assert term.keys() == {"name", "paper_bytes", "implementation_bytes", "measured_bytes", "why"}
    assert sum(term["measured_bytes"] for term in data["terms"]) + data["residual_bytes"] == data["peak_bytes"]


def test_what_is_not_zero_gets_a_calm_answer() -> None:
    ran = memtrace("zero", "fixtures/llama-fsdp2.pickle.xz")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("FSDP2 (fully_shard), no ZeRO\n")
    assert "100.0" in ran.out
    data = memtrace("zero", "--json", "fixtures/gpt2-adamw.pickle.xz").document["data"]
    assert data["stage"] is data["world"] is None
    assert sum(term["measured_bytes"] for term in data["terms"]) + data["residual_bytes"] == data["peak_bytes"]


def test_a_contradiction_is_said_and_the_flag_wins() -> None:
    ran = memtrace("zero", ZERO3, "--world", 4)
    assert ran.code == 0
    assert "warning[contradiction]: world 4 (--world), but the recording shows 8" in ran.err
    assert ", N = 4, " in ran.out.splitlines()[0]
    warnings = memtrace("zero", ZERO3, "--world", 4, "--json").document["warnings"]
    assert [warning["code"] for warning in warnings] == ["contradiction"]


def test_what_is_lacking_can_be_given() -> None:
    ran = memtrace("zero", "fixtures/gpt2-zero0.pickle.xz")
    assert ran.out.startswith("ZeRO-0, Ψ = 124.44 M, 16-bit, Adam\n")
    assert "N: not known; nothing is divided at stage 0" in ran.out


def test_a_plan_shows_all_stages() -> None:
    ran = memtrace("zero", "--params", "13e9", "--world", 64, "--stage", 3)
    assert (ran.code, ran.err) == (0, "")
    assert "ZeRO-3, term by term:" in ran.out
    rows = {line[:20].strip(): line[20:].split() for line in ran.out.splitlines()}
    assert rows["the paper's sum"] == ["193.72", "50.70", "26.86", "3.03"]
    assert rows["parameters"] == ["24.21", "24.21", "24.21", "0.38"]
    assert "outside zero.Init" in ran.out
    data = memtrace("zero", "--params", "13b", "--world", 64, "--stage", 3, "--json").document
    assert data["snapshot"] is None
    assert [plan["stage"] for plan in data["data"]["stages"]] == [0, 1, 2, 3]
    assert data["data"]["terms"][0]["paper_bytes"] == 2 * 13_000_000_000 // 64
    assert data["data"]["peak_bytes"] is None


def test_a_configuration_counts_and_auto_does_not(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text('{"zero_optimization": {"stage": "auto", "reduce_bucket_size": 5e7, "sub_group_size": "auto"}}')
    ran = memtrace("zero", "--params", "13e9", "--world", 8, "--config", config)
    assert ran.code == 0
    assert 'warning[auto-values]: "auto" counts as not said: zero_optimization.sub_group_size' in ran.err
    row = next(line for line in ran.out.splitlines() if line.startswith("reduce bucket"))
    assert row.split()[2:] == ["-", "0.09", "0.09", "0.09"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1 // no\n}', "not JSON at line 1, column 9"),
        ("", "not JSON at line 1, column 1"),
        ('{"zero_optimization": {"stage": NaN}}', "NaN is no number"),
        ("[" * 100_000, "nested too deep"),
        ('{"zero_optimization": {"stage": ' + "9" * 5000 + "}}", "far too long"),
        ('{"zero_optimization": 3}', "not a JSON object"),
    ],
)
def test_a_broken_configuration_is_refused(tmp_path: Path, text: str, said: str) -> None:
    config = tmp_path / "ds.json"
    config.write_text(text)
    ran = memtrace("zero", "--params", 1, "--world", 1, "--config", config)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert "hint:" in ran.err or "deep" in said


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--params", "13e9"), 2),
        (("--params", "many", "--world", 8), 2),
        (("--params", "0", "--world", 8), 2),
        (("--params", "1e40", "--world", 8), 2),
        (("--params", "13e9", "--world", 8, "--optimizer", "adan"), 2),
        (("--params", "13e9", "--world", 8, "--at", "end"), 2),
        (("--params", "1", "--model-config", "x.json", "--world", 8), 2),
        (("--params", "1", "--world", 8, "--config", "no-such-file.json"), 2),
        (("no-such-file.pickle",), 3),
        ((ZERO3, "--at", "yesterday"), 2),
        (("--world", 8), 4),
    ],
)
def test_refusals(arguments: tuple[object, ...], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMTRACE_DIR", str(tmp_path / "none"))
    ran = memtrace("zero", *arguments)
    assert (ran.code, ran.out) == (code, "")
    assert ran.err.startswith("memtrace: error[")


def model_config(tmp_path: Path, **more: Any) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "toy", "architectures": ["ToyModel"], **more}))
    return path


def test_a_model_without_its_libraries_is_a_missing_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    ran = memtrace("zero", "--model-config", model_config(tmp_path), "--world", 8)
    assert (ran.code, ran.out) == (5, "")
    assert "error[missing-extra]" in ran.err
    assert "--params 13e9" in ran.err


class _Parameter:
    def __init__(self, numel: int) -> None:
        self.numel = lambda: numel


class ToyModel:
    """What memtrace asks of a transformers model."""

    @classmethod
    def _from_config(cls, config: Any) -> ToyModel:
        if config["model_type"] == "broken":
            raise ValueError("hidden_size must be divisible\nmore")
        return cls()

    def parameters(self) -> list[_Parameter]:
        return [_Parameter(300_000), _Parameter(700), _Parameter(7)]


@pytest.fixture
def _toy_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    import contextlib

    torch, transformers = types.ModuleType("torch"), types.ModuleType("transformers")
    torch.device = lambda name: contextlib.nullcontext(name)  # type: ignore[attr-defined]
    transformers.__version__ = "9.9"  # type: ignore[attr-defined]
    transformers.ToyModel = ToyModel  # type: ignore[attr-defined]
    transformers.AutoConfig = types.SimpleNamespace(for_model=lambda **config: config)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "transformers", transformers)


@pytest.mark.usefixtures("_toy_libraries")
def test_a_model_is_counted_parameter_by_parameter(tmp_path: Path) -> None:
    data = memtrace("zero", "--model-config", model_config(tmp_path), "--world", 8, "--json").document["data"]
    assert data["params"] == 300_707
    assert data["sources"]["params"].startswith("ToyModel of ")
    stage3 = {term["name"]: term["implementation_bytes"] for term in data["stages"][3]["terms"]}
    assert stage3["parameters"] == 2 * (37_500 + 88 + 1)
    assert stage3["persistent parameters"] == 2 * 707


@pytest.mark.usefixtures("_toy_libraries")
@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"model_type": 3}, "no 'model_type'"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "code of its own"),
        ({"architectures": ["NoSuchModel"]}, "no model 'NoSuchModel'"),
        ({"architectures": ["AutoConfig"]}, "no model 'AutoConfig'"),
        ({"model_type": "broken"}, "hidden_size must be divisible"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    ran = memtrace("zero", "--model-config", model_config(tmp_path, **more), "--world", 8)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
