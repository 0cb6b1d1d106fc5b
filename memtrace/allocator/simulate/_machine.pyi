from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator.simulate.driver import Driver
from memtrace.allocator.simulate.machine import Outcome
from memtrace.allocator.simulate.requests import Workload
from memtrace.allocator.simulate.rules import Rules

def run(
    work: Workload,
    rules: Rules,
    driver: Driver,
    flush_before: NDArray[np.bool_] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Outcome: ...
