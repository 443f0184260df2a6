"""Explanations: why a request missed a block, and where its time went.

Law of this package: an explanation names the deciding event by its number, or says that it cannot know.
"""

from kvbm_console.analysis.explain.model import Admission, Clone, Explanation, Missed, MissedRun, Part, Spent, Wait
from kvbm_console.analysis.explain.request import explain, grouped, only_block

__all__ = [
    "Admission", "Clone", "Explanation", "Missed", "MissedRun", "Part", "Spent", "Wait", "explain", "grouped",
    "only_block",
]
