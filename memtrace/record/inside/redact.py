"""Secrets out of configurations and command lines, before they are written anywhere."""

from __future__ import annotations

import enum
import math
import re
from typing import Any, Dict, List, Tuple

REDACTED = "<redacted>"
_LEFT_OUT = "<left out>"
_MOST_DEPTH, _MOST_ITEMS, _MOST_VALUES, _MOST_TEXT = 12, 1_000, 50_000, 1_000

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SECRET = re.compile(
    r"passw|passphrase|passcode|pwd$|secret|credential|cookie|"
    r"(?:api|access|account|private|shared|storage|encryption|signing|ssh|sas)key|(?:auth|access|bearer|refresh)token"
)
"""In a name without its separators: whatever stands under it is redacted."""
_PERHAPS = re.compile(r"(?:tokens?|keys?|auth|authorization|authentication|bearer|signature|sig|sas|pat|pin|jwt|dsn)$")
"""A word that ends so: text under it is redacted, numbers are not (`eos_token_id`, `num_key_value_heads`)."""
_SECTIONS = frozenset(
    "wandb wb weightsandbiases weightsbiases comet cometml neptune neptuneai clearml mlflow swanlab dagshub trackio "
    "aws s3 azure azureml azureblob blob gcp gcs gcloud googlecloud oci slack discord telegram smtp sentry".split()
)
"""Services with accounts: nothing that is configured for them is kept."""
_SECTION_PARTS = ("wandb", "comet", "neptune", "clearml", "mlflow", "aws", "azure", "gcp", "gcs")

_KNOWN = re.compile(
    r"\b(?:AKIA|ASIA|AROA|AIDA)[0-9A-Z]{12,}|\bhf_[A-Za-z0-9]{10,}|\bapi_org_[A-Za-z0-9]{10,}|"
    r"\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{16,}|\bgl(?:pat|ptt|cbt|rt)-[\w-]{16,}|\bsk-[\w-]{16,}|"
    r"\b[rs]k_(?:live|test)_\w{10,}|\bxox[a-z]-[\w-]{8,}|\bAIza[\w-]{30,}|\bya29\.[\w-]{10,}|\bnpm_[A-Za-z0-9]{20,}|"
    r"\bpypi-[\w-]{16,}|\bdckr_pat_[\w-]{10,}|\bSG\.[\w-]{10,}\.|\bwandb_v1_\w{10,}|\bnvapi-[\w-]{16,}|"
    r"\beyJ[\w-]{8,}\.[\w-]{4,}|-----BEGIN |\b(?:bearer|basic)\s+[\w+/=.~-]{8,}|"
    r"\bAccountKey=|\bSharedAccessSignature=|://[^/\s@]*:[^/\s@]+@|://[^/\s:@]{12,}@",
    re.IGNORECASE,
)
_QUERY = re.compile(
    r"[?&;](?:sig|signature|token|key|api_?key|access_?token|auth|password|passwd|pwd|secret|x-amz-[a-z-]+|x-goog-[a-z-]+)=",
    re.IGNORECASE,
)
_RUN = re.compile(r"[A-Za-z0-9+/_=-]{20,}")
_HEX = re.compile(r"(?<![0-9A-Za-z])(?:[0-9a-f]{32,}|[0-9A-F]{32,})(?![0-9A-Za-z])")
_WORD = re.compile(r"[A-Z]?[a-z]{3,}|[A-Z]{5,}|[0-9]{5,}")
_ASSIGNED = re.compile(r"(-{0,2}[A-Za-z][\w.:-]*)=(.+)", re.DOTALL)
_FLAG = re.compile(r"-{1,2}[A-Za-z][\w.:-]*")
_PATH = re.compile(
    r"(?:[A-Za-z][A-Za-z0-9+.-]*://|file:|[A-Za-z]:\\|\\\\|~[^\s/]*/|\.{1,2}/|(?<![\w.~/-])/)[^\s'\",;]*"
)


def redact(value: Any, plain_paths: bool = False) -> Any:
    """A copy for JSON without what looks like a secret, and of paths only the last part. Bounded in depth and size."""
    return _Redactor(plain_paths).value(value, 0)


class _Redactor:
    def __init__(self, plain_paths: bool) -> None:
        self.plain_paths = plain_paths
        self.left = _MOST_VALUES

    def value(self, value: Any, depth: int) -> Any:
        self.left -= 1
        if depth > _MOST_DEPTH or self.left < 0:
            return _LEFT_OUT
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, enum.Enum):
            return self.value(value.value, depth + 1)
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else str(value)
        if isinstance(value, str):
            return self.text(str(value))
        if isinstance(value, dict):
            return self.mapping(value, depth)
        if isinstance(value, (list, tuple)):
            return self.sequence(list(value[:_MOST_ITEMS]), depth)
        if isinstance(value, (set, frozenset)):
            return self.sequence(sorted(list(value)[:_MOST_ITEMS], key=str), depth)
        return self.other(value)

    def mapping(self, value: Dict[Any, Any], depth: int) -> Dict[str, Any]:
        found: Dict[str, Any] = {}
        for key, item in list(value.items())[:_MOST_ITEMS]:
            name = key if isinstance(key, str) else str(key.value if isinstance(key, enum.Enum) else key)
            found[self.text(name)] = self.named(name, item, depth + 1)
        return found

    def named(self, name: str, item: Any, depth: int) -> Any:
        """What stands under a name."""
        if item is None or isinstance(item, bool):
            return item
        secret, perhaps = judged(name)
        if secret:
            return REDACTED
        if perhaps and not isinstance(item, (int, float)):
            return REDACTED if isinstance(item, (str, bytes)) else self.hidden(item, depth)
        return self.value(item, depth)

    def hidden(self, item: Any, depth: int) -> Any:
        """A container under a name like `keys`: its numbers may stay, its texts not."""
        self.left -= 1
        if depth > _MOST_DEPTH or self.left < 0:
            return _LEFT_OUT
        if item is None or isinstance(item, (bool, int, float)):
            return self.value(item, depth)
        if isinstance(item, dict):
            entries = list(item.items())[:_MOST_ITEMS]
            return {self.text(str(key)): self.hidden(one, depth + 1) for key, one in entries}
        if isinstance(item, (list, tuple)):
            return [self.hidden(one, depth + 1) for one in item[:_MOST_ITEMS]]
        return REDACTED

    def sequence(self, items: List[Any], depth: int) -> List[Any]:
        found: List[Any] = []
        flag = ""
        for item in items:
            hide = flag and isinstance(item, (str, int, float)) and not _is_flag(item) and any(judged(flag))
            found.append(REDACTED if hide else self.value(item, depth + 1))
            flag = item if isinstance(item, str) and _is_flag(item) else ""
        return found

    def text(self, text: str) -> str:
        if len(text) > _MOST_TEXT:
            text = text[:_MOST_TEXT]
        assigned = _ASSIGNED.fullmatch(text)
        if assigned and any(judged(assigned[1])):
            return f"{assigned[1]}={REDACTED}"
        if looks_secret(text):
            return REDACTED
        return text if self.plain_paths else _PATH.sub(_last_part, text)

    def other(self, value: Any) -> str:
        """What JSON does not know: a dtype, a path, or anything else by its class alone."""
        kind = type(value).__name__
        if kind in ("dtype", "device") or kind.endswith("Path"):
            return self.text(str(value))
        return f"<{kind}>"


def judged(name: str) -> Tuple[bool, bool]:
    """Of a name: whether all that stands under it is to be redacted; whether text is."""
    if len(name) > _MOST_TEXT:
        return True, True
    words = [word.lower() for word in _WORDS.findall(name)]
    glued = "".join(words)
    section = glued in _SECTIONS or any(part in words for part in _SECTION_PARTS)
    return section or bool(_SECRET.search(glued)), any(_PERHAPS.search(word) for word in words)


def looks_secret(text: str) -> bool:
    """Whether a text is, or holds, something that looks like a credential."""
    if len(text) < 8:
        return False
    if _KNOWN.search(text) or _QUERY.search(text) or _HEX.search(text):
        return True
    return any(_is_random(run) for run in _RUN.findall(text))


def _is_random(run: str) -> bool:
    """Letters and digits as a generator makes them: a long piece of both, or the 40 characters of an AWS secret."""
    if any(len(piece) >= 20 and _wordless(piece) >= 15 and _kinds(piece) >= 2 for piece in re.split(r"[-_/+=]", run)):
        return True
    if any(len(piece) >= 32 and _wordless(piece) >= 16 and _kinds(piece) == 3 for piece in re.split(r"[-_]", run)):
        return True
    return _wordless(run) >= max(20, 0.6 * len(run)) and _kinds(run) == 3


def _wordless(text: str) -> int:
    """How many letters and digits belong to nothing like a word or a long number."""
    return len(re.sub(r"[^A-Za-z0-9]", "", _WORD.sub("", text)))


def _kinds(text: str) -> int:
    return sum(bool(re.search(kind, text)) for kind in ("[a-z]", "[A-Z]", "[0-9]"))


def _is_flag(item: Any) -> bool:
    return isinstance(item, str) and _FLAG.fullmatch(item) is not None


def _last_part(found: re.Match[str]) -> str:
    parts = [part for part in re.split(r"[/\\]", found[0]) if part not in ("", ".", "..", "~")]
    return parts[-1] if parts else found[0]
