"""What every byte is for."""

from memtrace.attribution.attribute import REASON_TEXT, Attribution, Reason, attribute
from memtrace.attribution.categories import CATEGORIES, CODE, CONFIDENCE, LABELS

__all__ = ["CATEGORIES", "CODE", "CONFIDENCE", "LABELS", "REASON_TEXT", "Attribution", "Reason", "attribute"]
