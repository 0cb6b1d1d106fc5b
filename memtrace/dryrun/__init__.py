"""Recording a job without a GPU: the stand-in device library, values and worlds."""
