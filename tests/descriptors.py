"""The two run descriptors that people know from elsewhere, as they stand, and what they name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from nbtrain.client import Client

SUPERVISED = """{
  "kind": "run",
  "workload": "support-triage",
  "baseModel": "unsloth/Llama-3.2-1B-Instruct",
  "config": {
    "dataset": "support-triage-train",
    "method": "sft",
    "hyperparams": {"lora": {"rank": 8}, "optimizer": {"learningRate": 0.0001}, \
"training": {"epochs": 2}},
    "maxSeqLength": 2048,
    "model": {"precision": "BF16"}
  },
  "execution": {"gpus": 1, "saveEvery": 20, "keepAdapters": 4},
  "description": "two epochs at rank 8",
  "configName": "r8-e2"
}
"""

REINFORCEMENT = """{
  "kind": "run",
  "workload": "gsm8k",
  "configName": "grpo-100-steps",
  "baseModel": "Qwen/Qwen3-0.6B",
  "config": {
    "dataset": "gsm8k-train",
    "method": "grpo",
    "rlHyperparams": {
      "epochs": 1,
      "maxSteps": 100,
      "groupSize": 8,
      "klBeta": 0.001,
      "temperature": 1.0,
      "maxCompletionLength": 512,
      "lora": {
        "rank": 32
      },
      "optimizer": {
        "learningRate": 1e-5
      }
    },
    "reward": {
      "terms": [
        {"kind": "rule", "weight": 1.0, "bundle": "gsm8k-scoring", "module": "reward"}
      ]
    },
    "maxSeqLength": 1536
  },
  "execution": {"gpus": 1, "saveEvery": 10, "keepAdapters": 4}
}
"""

TICKETS = [
    {
        "messages": [
            {"role": "user", "content": f"My invoice {number} is wrong."},
            {"role": "assistant", "content": '{"label": "billing"}'},
        ]
    }
    for number in range(40)
]
SUMS = [
    {
        "messages": [
            {"role": "user", "content": f"What is {a} + {b}?"},
            {"role": "assistant", "content": f"{a + b}"},
        ]
    }
    for a in range(4)
    for b in range(5)
]
SCORING = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.strip() == ground_truth.strip())
"""


def large_model(folder: Path) -> Path:
    """The embedded model with room for the documents' sequences."""
    from nbtrain.catalog.base_models import EMBEDDED, read_base_model
    from nbtrain.catalog.digests import FileDigests

    digests = FileDigests(folder.parent / "digests.json")
    shutil.copytree(read_base_model(EMBEDDED, digests).location, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    return folder


def select_models(client: Client, tmp_path: Path) -> None:
    """Let both documents' base models be a local folder."""
    folder = large_model(tmp_path / "large")
    for name in ("unsloth/Llama-3.2-1B-Instruct", "Qwen/Qwen3-0.6B"):
        client.base_models.select(folder, name)


def register(client: Client, tmp_path: Path) -> None:
    """Register everything that both documents name."""
    select_models(client, tmp_path)
    client.workloads.create("support-triage")
    client.workloads.create("gsm8k")
    client.datasets.register("support-triage-train", TICKETS)
    client.datasets.register("gsm8k-train", SUMS)
    bundle = tmp_path / "scoring"
    bundle.mkdir()
    (bundle / "reward.py").write_text(SCORING)
    client.bundles.register("gsm8k-scoring", bundle)


def small(**changes: Any) -> dict[str, Any]:
    """A supervised descriptor on the embedded model; ``changes`` are top-level keys."""
    return {
        "kind": "run",
        "workload": "support-triage",
        "baseModel": "nbtrain/tiny",
        "config": {"dataset": "support-triage-train", "maxSeqLength": 512},
        **changes,
    }
