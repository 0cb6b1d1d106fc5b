"""What every byte is for. `attribute` makes it; these are the words and the answer, quick to import."""

from memtrace.attribution.categories import CATEGORIES, CODE, CONFIDENCE, LABELS
from memtrace.attribution.result import REASON_TEXT, Attribution, Reason

__all__ = ["CATEGORIES", "CODE", "CONFIDENCE", "LABELS", "REASON_TEXT", "Attribution", "Reason"]
