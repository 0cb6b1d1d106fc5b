"""All rules, one module a library. Order matters only between rules that know the same function."""

from memtrace.attribution.rule import Rule
from memtrace.attribution.rules import cpp, deepspeed, fsdp, torch, transformers

MATCHED: tuple[Rule, ...] = (*deepspeed.RULES, *fsdp.RULES, *transformers.RULES, *torch.RULES, *cpp.RULES)
"""Rules that a frame of a stack can match."""

ALL: tuple[Rule, ...] = (*MATCHED, *torch.DERIVED)
"""Every rule; a block's `rule` is an index in it (after the user's own rules)."""
