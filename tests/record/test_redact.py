"""What a sidecar may say of a job's configuration: nothing that looks like a secret."""

from __future__ import annotations

import base64
import enum
import json
import random
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtrace.record.inside.redact import REDACTED, looks_secret, redact

SECRETS = (
    "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH",
    "ghp_0123456789abcdefghijklmnopqrstuvwxyz",
    "github_pat_11ABCDEFG0123456789_abcdef",
    "glpat-0123456789abcdefghij",
    "sk-proj-0123456789abcdefghij",
    "xoxb-1234567890-abcdef",
    "AKIAIOSFODNN7EXAMPLE",
    "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "AIzaSyA0123456789abcdefghijklmnopqrstuv",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U",
    "0123456789abcdef0123456789abcdef01234567",  # a key of W&B
    "https://me:hunter2@example.org/repo.git",
    "https://token0123456789@example.org/repo.git",
    "https://store.example.org/a?sv=1&sig=abc%3D",
    "DefaultEndpointsProtocol=https;AccountName=x;AccountKey=abc==",
    "Bearer abcdefgh12345678",
    "-----BEGIN OPENSSH PRIVATE KEY-----",
    "python train.py --hub hf_abcdefghijklmnopqrstuvwxyz",
)
HARMLESS = (
    "auto",
    "AdamW",
    "WarmupDecayLR",
    "meta-llama/Llama-2-7b-hf",
    "openai/clip-vit-large-patch14-336",
    "Qwen/Qwen2.5-VL-72B-Instruct-GPTQ-Int4",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B",
    "nvidia/Llama-3_1-Nemotron-Ultra-253B-v1",
    "stage3_gather_16bit_weights_on_model_save",
    "cosine_with_hard_restarts_with_warmup_steps1000",
    "DeepSpeedZeroOptimizer_Stage3",
    "Wav2Vec2ForPreTraining",
    "torch.bfloat16",
    "2024-01-01T00:00:00+00:00",
    "Qwen/Qwen2-VL-72B-Instruct-GPTQ-Int4-AWQ-A3B",
    "run_20240101_120000_lr1e-5_bs32_gpt2xl",
    "1e-5",
    "00:1f.2",
)


@pytest.mark.parametrize("text", SECRETS)
def test_a_secret_is_known_by_its_looks(text: str) -> None:
    assert redact(text) == REDACTED
    assert redact({"x": [text]}, plain_paths=True) == {"x": [REDACTED]}
    assert list(redact({text: None})) == [REDACTED]


@pytest.mark.parametrize("text", HARMLESS)
def test_what_configurations_are_made_of_stays(text: str) -> None:
    assert redact(text) == text
    assert redact(text, plain_paths=True) == text


def test_generated_tokens_are_found() -> None:
    source = random.Random(0)
    letters = string.ascii_letters + string.digits
    made = ["".join(source.choices(letters, k=40)) for _ in range(500)]
    made += [base64.urlsafe_b64encode(source.randbytes(size)).decode().rstrip("=") for size in (32, 40) * 250]
    made += [base64.b64encode(source.randbytes(30)).decode() for _ in range(500)]
    assert sum(map(looks_secret, made)) >= 0.98 * len(made)
    assert all(looks_secret(source.randbytes(16).hex()) for _ in range(500))


@pytest.mark.parametrize(
    "name",
    "password passwd db_password PASSPHRASE api_key apiKey APIKEY hf_api_key secret aws_secret_access_key "
    "private_key credential credentials cookie accessToken auth_token storage_account_key".split(),
)
@pytest.mark.parametrize("value", ["x", 1234, 0.5, ["x"], {"a": "b"}])
def test_under_such_a_name_nothing_stays(name: str, value: Any) -> None:
    assert redact({"a": {name: value}}) == {"a": {name: REDACTED}}
    assert redact({name: None}) == {name: None}
    assert redact({name: True}) == {name: True}


@pytest.mark.parametrize("name", ["token", "hub_token", "HF_TOKEN", "key", "auth", "authorization", "signature", "dsn"])
def test_under_some_names_only_numbers_stay(name: str) -> None:
    assert redact({name: "x"}) == {name: REDACTED}
    assert redact({name: ["x", 1, {"a": "y"}]}) == {name: [REDACTED, 1, {"a": REDACTED}]}
    assert redact({name: 2}) == {name: 2}


@pytest.mark.parametrize(
    "section", ["wandb", "WandB", "weights_and_biases", "comet_ml", "comet", "aws", "azure", "gcp", "s3", "mlflow"]
)
def test_sections_with_accounts_go_whole(section: str) -> None:
    config = {section: {"enabled": True, "team": "me", "project": "p"}, "wandb_project": "p", "wandb_enabled": True}
    assert redact(config) == {section: REDACTED, "wandb_project": REDACTED, "wandb_enabled": True}


def test_a_deepspeed_configuration_is_kept() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8}},
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto", "offload_param": {"device": "cpu"}},
        "bf16": {"enabled": True},
        "max_tokens": 4096,
        "eos_token_id": 2,
        "num_key_value_heads": 8,
        "tokenizer": "gpt2",
        "monitor_config": {"tag": None},
    }
    assert redact(config) == config


def test_paths_keep_their_last_part() -> None:
    assert redact("/home/alice/models/Llama-2-7b-hf") == "Llama-2-7b-hf"
    assert redact("~/data/x.json") == "x.json"
    assert redact("../out/run1/") == "run1"
    assert redact("s3://bucket/folder/file") == "file"
    assert redact("C:\\Users\\alice\\ds.json") == "ds.json"
    assert redact("python /home/alice/train.py --config=/etc/x/ds.json") == "python train.py --config=ds.json"
    assert redact({"nvme_path": Path("/local_nvme/alice")}) == {"nvme_path": "alice"}
    assert redact("/home/alice/train.py", plain_paths=True) == "/home/alice/train.py"


def test_a_command_line() -> None:
    words = [
        "train.py",
        "--api-key",
        "abc",
        "--lr",
        "3e-4",
        "--hub_token=abc",
        "--password",
        "--fp16",
        "WANDB_API_KEY=x",
    ]
    assert redact(words) == [
        "train.py",
        "--api-key",
        REDACTED,
        "--lr",
        "3e-4",
        f"--hub_token={REDACTED}",
        "--password",
        "--fp16",
        f"WANDB_API_KEY={REDACTED}",
    ]


def test_only_json_comes_out_and_no_object_is_printed() -> None:
    class Colour(enum.Enum):
        RED = "red"

    class Secretive:
        def __repr__(self) -> str:
            raise AssertionError("asked for its text")

    value = {1: (Colour.RED, {3, 4}, Secretive()), Colour.RED: float("inf"), "b": b"bytes", "n": float("nan")}
    made = redact(value)
    assert json.loads(json.dumps(made)) == made
    assert made == {"1": ["red", [3, 4], "<Secretive>"], "red": "inf", "b": "<bytes>", "n": "nan"}


def test_depth_and_size_are_bounded() -> None:
    deep: list[Any] = []
    deep.append(deep)
    assert len(json.dumps(redact(deep))) < 200
    assert len(json.dumps(redact({str(number): "x" * 10_000 for number in range(5_000)}))) < 1_100_000
    wide = [[[0] * 1000] * 1000] * 1000
    assert len(json.dumps(redact(wide))) < 1_000_000


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


@given(JSON, st.booleans())
def test_anything_is_redacted_to_json(value: Any, plain_paths: bool) -> None:
    json.dumps(redact(value, plain_paths), allow_nan=False)


@given(st.text(max_size=20), st.sampled_from(["password", "secretKey", "HF_TOKEN", "api-key"]))
def test_no_text_under_a_secret_name_survives(text: str, name: str) -> None:
    assert redact({"section": [{name: text}]}) == {"section": [{name: REDACTED}]}
