"""What a person gives: flags, and a DeepSpeed configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from memtrace.attribution import theory as zero
from memtrace.errors import QuestionError

_MOST = 1 << 60
_INTEGERS = {
    "reduce_bucket_size": "reduce_bucket",
    "sub_group_size": "sub_group",
    "stage3_prefetch_bucket_size": "prefetch_bucket",
    "prefetch_bucket_size": "prefetch_bucket",
    "stage3_max_reuse_distance": "reuse_distance",
    "max_reuse_distance": "reuse_distance",
    "stage3_param_persistence_threshold": "persistence",
    "param_persistence_threshold": "persistence",
    "zero_hpz_partition_size": "hpz",
}
_SWITCHES = {"overlap_comm": "overlap_comm", "contiguous_gradients": "contiguous_gradients"}


@dataclass(frozen=True, slots=True)
class Given:
    """What a person said of the job; None: nothing. `torch_adam`: torch's own Adam, where DeepSpeed would fuse it."""

    stage: int | None = None
    world: int | None = None
    params: int | None = None
    dtype: str | None = None
    optimizer: str | None = None
    torch_adam: bool = False
    numels: tuple[int, ...] = ()
    knobs: Mapping[str, int | bool] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def over(self, weaker: Given) -> Given:
        """Both together; where both say something, this."""
        return Given(
            stage=weaker.stage if self.stage is None else self.stage,
            world=weaker.world if self.world is None else self.world,
            params=weaker.params if self.params is None else self.params,
            dtype=weaker.dtype if self.dtype is None else self.dtype,
            optimizer=weaker.optimizer if self.optimizer is None else self.optimizer,
            torch_adam=self.torch_adam or (weaker.torch_adam and self.optimizer is None),
            numels=self.numels or (weaker.numels if self.params is None else ()),
            knobs={**weaker.knobs, **self.knobs},
            sources={**weaker.sources, **self.sources},
            ignored=(*weaker.ignored, *self.ignored),
        )


def read_config(config: object, name: str) -> Given:
    """What a DeepSpeed configuration says. "auto" counts as not said. Raises QuestionError at what cannot be."""
    whole = _object(config, name, "")
    ignored: list[str] = []
    section = _object(whole.get("zero_optimization", {}), name, "zero_optimization")
    knobs: dict[str, int | bool] = {}
    for key, knob in _INTEGERS.items():
        number = _whole(section, key, name, ignored)
        if number == 0 and knob in ("sub_group", "hpz"):
            raise _wrong(name, f"zero_optimization.{key}", number, "1 or more")
        if number is not None:
            knobs[knob] = number
    for key, knob in _SWITCHES.items():
        switch = _switch(section, key, name, ignored, "zero_optimization.")
        if switch is not None:
            knobs[knob] = switch
    for key in ("offload_optimizer", "offload_param"):
        part = section.get(key)
        device = _object(part, name, f"zero_optimization.{key}").get("device", "none") if part is not None else "none"
        if device == "auto":
            ignored.append(f"zero_optimization.{key}.device")
        elif device not in ("none", "cpu", "nvme", None):
            raise _wrong(name, f"zero_optimization.{key}.device", device, "none, cpu or nvme")
        elif device in ("cpu", "nvme"):
            knobs[key] = True
    if _switch(section, "cpu_offload", name, ignored, "zero_optimization."):
        knobs["offload_optimizer"] = True
    stage = _whole(section, "stage", name, ignored)
    if stage is not None and stage not in zero.STAGES:
        raise _wrong(name, "zero_optimization.stage", stage, "0, 1, 2 or 3")
    dtype = _precision(whole, name, ignored)
    optimizer = _optimizer(whole, name, ignored)
    said = {"stage": stage, "dtype": dtype, "optimizer": optimizer}
    return Given(
        stage=stage,
        dtype=dtype,
        optimizer=optimizer,
        torch_adam=_torch_adam(whole, name, ignored),
        knobs=knobs,
        sources={key: f"from {name}" for key, value in said.items() if value is not None},
        ignored=tuple(ignored),
    )


def _object(value: object, name: str, key: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        what = f"{name}: {key} is" if key else f"{name} is"
        raise QuestionError(f"{what} not a JSON object", hint="A DeepSpeed configuration is {...}, its sections too.")
    return value


def _whole(section: Mapping[str, object], key: str, name: str, ignored: list[str]) -> int | None:
    value = section.get(key)
    where = f"zero_optimization.{key}"
    if value is None:
        return None
    if value == "auto":
        ignored.append(where)
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < _MOST or value != int(value):
        raise _wrong(name, where, value, "a whole number, 0 or more")
    return int(value)


def _switch(section: Mapping[str, object], key: str, name: str, ignored: list[str], prefix: str) -> bool | None:
    value = section.get(key)
    if value == "auto":
        ignored.append(prefix + key)
        return None
    if value is not None and not isinstance(value, bool):
        raise _wrong(name, prefix + key, value, "true or false")
    return value


def _precision(config: Mapping[str, object], name: str, ignored: list[str]) -> str | None:
    found = []
    for key, dtype in (("fp16", "fp16"), ("bf16", "bf16"), ("bfloat16", "bf16")):
        if key in config and _switch(_object(config[key], name, key), "enabled", name, ignored, f"{key}."):
            found.append(dtype)
    if len(set(found)) > 1:
        raise QuestionError(f"{name} enables fp16 and bf16 both", hint="Enable one of them.")
    return found[0] if found else None


def _optimizer(config: Mapping[str, object], name: str, ignored: list[str]) -> str | None:
    if "optimizer" not in config:
        return None
    kind = _object(config["optimizer"], name, "optimizer").get("type")
    if kind == "auto":
        ignored.append("optimizer.type")
        return None
    if kind is not None and not isinstance(kind, str):
        raise _wrong(name, "optimizer.type", kind, "a name")
    return kind


def _torch_adam(config: Mapping[str, object], name: str, ignored: list[str]) -> bool:
    params = _object(config.get("optimizer", {}), name, "optimizer").get("params")
    if not isinstance(params, dict):
        return False
    return bool(_switch(params, "torch_adam", name, ignored, "optimizer.params."))


def _wrong(name: str, key: str, value: object, wanted: str) -> QuestionError:
    return QuestionError(f"{name}: {key} is {str(value)[:40]!r}, not {wanted}", hint="Correct it, or leave it out.")
