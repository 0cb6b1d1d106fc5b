"""The sizes of a model's parameters from its transformers configuration, without weights: on torch's meta device.

Nothing of a configuration is run: one that needs code of its own is refused. transformers and torch are imported here,
inside functions, and nowhere else.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memtrace.errors import MissingExtraError, QuestionError

_LONGEST = 40


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Elements of each parameter, in the model's order, each counted once; and what made the model."""

    numels: tuple[int, ...]
    source: str

    @property
    def params(self) -> int:
        """All of them."""
        return sum(self.numels)


def model_sizes(text: str, name: str) -> ModelSizes:
    """Builds the model of a `config.json` on the meta device and counts. `name` is the file's, for errors.

    Raises MissingExtraError without transformers and torch, QuestionError where the configuration cannot be used.
    """
    config = _parsed(text, name)
    transformers, torch = _libraries()
    model = _model(transformers, torch, config, name)
    numels = tuple(int(parameter.numel()) for parameter in model.parameters())
    if not numels:
        raise QuestionError(f"{name}: {type(model).__name__} has no parameters")
    version = getattr(transformers, "__version__", "")
    return ModelSizes(numels, f"{type(model).__name__} of {name}, counted on meta tensors (transformers {version})")


def _parsed(text: str, name: str) -> Mapping[str, Any]:
    hint = "It is the config.json beside a model's weights."
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise QuestionError(f"{name} is not readable as JSON", hint=hint) from error
    if not isinstance(config, dict):
        raise QuestionError(f"{name} is not a JSON object", hint=hint)
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise QuestionError(f"{name} has no 'model_type': not a configuration of transformers", hint=hint)
    if config.get("auto_map"):
        raise QuestionError(
            f"{name} needs code of its own (auto_map), which memtrace does not run",
            hint="Give the number of parameters: --params 13e9.",
        )
    return config


def _libraries() -> tuple[Any, Any]:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        torch = importlib.import_module("torch")
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        missing = "torch" if "torch" in str(error) else "transformers"
        raise MissingExtraError(
            f"--model-config needs transformers and torch, and {missing} is not installed",
            hint="pip install transformers torch, or give the number of parameters: --params 13e9.",
        ) from error
    return transformers, torch


def _model(transformers: Any, torch: Any, config: Mapping[str, Any], name: str) -> Any:
    """An empty model of the configuration's architecture; none named, of its model type."""
    kind = config["model_type"]
    try:
        settings = transformers.AutoConfig.for_model(**config)
    except Exception as error:
        raise _refused(name, f"transformers does not take it as {kind[:_LONGEST]!r}", error) from error
    named = config.get("architectures")
    architecture = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else None
    made_by = getattr(transformers, architecture, None) if architecture else None
    if architecture and not (isinstance(made_by, type) and hasattr(made_by, "_from_config")):
        raise _refused(name, f"this transformers has no model {architecture[:_LONGEST]!r}", None)
    try:
        with torch.device("meta"):
            return made_by._from_config(settings) if made_by else transformers.AutoModel.from_config(settings)
    except Exception as error:
        raise _refused(name, "the model cannot be built from it", error) from error


def _refused(name: str, what: str, error: Exception | None) -> QuestionError:
    why = f": {str(error).splitlines()[0][:200]}" if error is not None and str(error) else ""
    return QuestionError(f"{name}: {what}{why}", hint="Give the number of parameters instead: --params 13e9.")
