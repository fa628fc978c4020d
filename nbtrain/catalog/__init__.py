"""What a plan can name: workloads and base models, read without torch."""

from __future__ import annotations

from nbtrain.catalog.base_models import EMBEDDED, BaseModel
from nbtrain.catalog.catalog import Catalog
from nbtrain.catalog.digests import tokenizer_digest
from nbtrain.catalog.samples import (
    CALCULATOR,
    SUMS,
    SUMS_BASE_MODEL,
    calculator_rows,
    sums_rows,
)
from nbtrain.catalog.splitting import Split, Task
from nbtrain.catalog.support_triage import SUPPORT_TRIAGE
from nbtrain.catalog.workloads import (
    DatasetName,
    Workload,
    WorkloadSpec,
    bare_workload,
    build_workload,
    load_workload,
)

__all__ = [
    "CALCULATOR",
    "EMBEDDED",
    "SUMS",
    "SUMS_BASE_MODEL",
    "SUPPORT_TRIAGE",
    "BaseModel",
    "Catalog",
    "DatasetName",
    "Split",
    "Task",
    "Workload",
    "WorkloadSpec",
    "bare_workload",
    "build_workload",
    "calculator_rows",
    "load_workload",
    "sums_rows",
    "tokenizer_digest",
]
