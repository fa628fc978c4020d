"""A small catalog in memory: what the plan needs to know of workloads, models and checkpoints."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from nbtrain.errors import NotFound, PlanRefused, Problem
from nbtrain.plan.registry import MachineInfo, ModelSizes, Template
from nbtrain.plan.resolve import resolve
from nbtrain.plan.resolved import ResolvedPlan


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Split:
    train: int
    held_out: int
    description: str
    train_digest: str


@dataclass(frozen=True)
class Workload:
    workload_id: str = digest("sums")
    name: str | None = "sums"
    base_model: str | None = "nbtrain/tiny"
    weights: tuple[float, ...] = (1.0,)
    tasks: int = 90
    stated_held_out: int = 10
    fraction_held_out: int = 0
    has_tasks: bool = True
    grader: str | None = None
    environment_form: Literal["tools", "step", "unknown"] | None = None

    @property
    def reward_identity(self) -> list[dict[str, float]]:
        return [{"weight": weight} for weight in self.weights]

    def split_info(self, *, validation: bool) -> Split:
        off = self.fraction_held_out if validation else 0
        train = self.tasks - off
        sentence = f"{train} train, {off} split off, {self.stated_held_out} stated"
        held_out = self.stated_held_out + off
        return Split(train, held_out, sentence, digest(f"{self.workload_id} {train}"))


@dataclass(frozen=True)
class BaseModel:
    slug: str = "nbtrain/tiny"
    kind: Literal["embedded", "folder", "repository", "gguf"] = "embedded"
    location: str = "/models/tiny"
    fingerprint: str = digest("tiny")
    max_context: int = 256
    precision: Literal["fp32", "bf16"] = "fp32"
    parameters: int | None = 400_000
    sampler: Literal["ragged", "generate"] = "ragged"
    thinking: tuple[str, ...] = ()
    template: Template | None = None
    sizes: ModelSizes = field(default_factory=ModelSizes)


@dataclass(frozen=True)
class Dataset:
    name: str | None = "d"
    rows: int = 100
    columns: tuple[str, ...] = ("label",)
    facts: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def dataset_id(self) -> str:
        return digest(f"{self.name} {self.rows}")


@dataclass(frozen=True)
class Adapter:
    name: str | None = "answers"
    base_model_slug: str = "nbtrain/tiny"
    base_fingerprint: str = digest("tiny")
    config_hash: str = digest("recipe")
    weights_digest: str = digest("weights")
    path: str = "/models/answers"
    lora: Mapping[str, Any] = field(
        default_factory=lambda: {
            "lora_rank": 4,
            "lora_alpha": 16.0,
            "lora_target_modules": "default",
        }
    )

    @property
    def model_id(self) -> str:
        return digest(f"{self.name} {self.path}")


@dataclass(frozen=True)
class Bundle:
    name: str | None = "scoring"
    modules: tuple[str, ...] = ("reward", "tools.more")
    functions: tuple[str, ...] = ("compute_score", "f", "judge")

    @property
    def bundle_id(self) -> str:
        return digest(f"{self.name}")

    def lacking(self, module: str, function: str) -> tuple[str, str | None] | None:
        if function in self.functions:
            return None
        return f"has no function {function!r} in its module {module!r}", None


@dataclass(frozen=True)
class Checkpoint:
    checkpoint_id: str
    run_id: str
    step_index: int
    base_model_slug: str
    base_fingerprint: str
    workload_id: str
    path: str
    resolved: Mapping[str, Any]
    has_weights: bool = True
    has_training_state: bool = True
    resumable: Sequence[tuple[int, str]] = ()


@dataclass
class World:
    """A registry: names, ids, prefixes of at least four digits, and objects."""

    workloads: list[Workload] = field(default_factory=lambda: [Workload()])
    models: list[BaseModel] = field(
        default_factory=lambda: [
            BaseModel(),
            BaseModel("big", "folder", "/models/big", digest("big"), 4096, "bf16"),
        ]
    )
    checkpoints: list[Checkpoint] = field(default_factory=list)
    datasets: list[Dataset] = field(default_factory=lambda: [Dataset(), Dataset("held-out", 20)])
    adapters: list[Adapter] = field(default_factory=lambda: [Adapter()])
    bundles: list[Bundle] = field(default_factory=lambda: [Bundle()])
    here: MachineInfo = field(default_factory=MachineInfo)

    def workload(self, ref: object) -> Workload:
        for w in self.workloads:
            if ref is w or ref == w.name or _prefix(ref, w.workload_id):
                return w
        msg = f"no workload {ref!r}; there is sums"
        raise NotFound(msg)

    def base_model(self, ref: object) -> BaseModel:
        if ref == "quantised":
            problem = "base_model_slug: quantised has quantised weights"
            raise PlanRefused([Problem("base_model_slug", problem)])
        for m in self.models:
            if ref is m or ref == m.slug:
                return m
        msg = f"no base model {ref!r}; there are nbtrain/tiny and big"
        raise NotFound(msg)

    def checkpoint(self, ref: object) -> Checkpoint:
        for c in self.checkpoints:
            if ref is c or _prefix(ref, c.checkpoint_id):
                return c
        msg = f"no checkpoint {ref!r}"
        raise NotFound(msg)

    def dataset(self, ref: object) -> Dataset:
        return _one("dataset", ref, self.datasets, "dataset_id")

    def model(self, ref: object) -> Adapter:
        return _one("model", ref, self.adapters, "model_id")

    def bundle(self, ref: object) -> Bundle:
        return _one("bundle", ref, self.bundles, "bundle_id")

    def base_models(self) -> list[BaseModel]:
        return list(self.models)

    def machine(self) -> MachineInfo:
        return self.here

    def plan(self, options: Any = None, **given: Any) -> ResolvedPlan:
        """Resolve, on the workload ``sums`` unless another or a parent is given."""
        if "parent" not in given and "workload" not in given:
            given["workload"] = "sums"
        return resolve(options, registry=self, **given)

    def problems(self, options: Any = None, **given: Any) -> list[Problem]:
        """The problems of a plan that must be refused."""
        try:
            self.plan(options, **given)
        except PlanRefused as refused:
            return list(refused.problems)
        msg = f"not refused: {options} {given}"
        raise AssertionError(msg)

    def save(self, plan: ResolvedPlan, step: int, **changes: Any) -> Checkpoint:
        """A checkpoint of a run of ``plan``, its plan gone through JSON as in a store."""
        saved = Checkpoint(
            checkpoint_id=digest(f"{plan.config_hash} {step} {len(self.checkpoints)}"),
            run_id=digest(plan.config_hash),
            step_index=step,
            base_model_slug=plan.base_model.slug,
            base_fingerprint=plan.base_model.fingerprint,
            workload_id=plan.workload.workload_id,
            path=f"/runs/x/checkpoints/step-{step:06}",
            resolved=json.loads(json.dumps(plan.to_json(), allow_nan=False)),
        )
        saved = replace(saved, **changes)
        self.checkpoints.append(saved)
        return saved


def described_world() -> World:
    """A world with the names that the descriptors of the tests use."""
    world = World()
    world.workloads += [
        Workload(digest(name), name, None, has_tasks=False)
        for name in ("t", "support-triage", "gsm8k")
    ]
    world.models += [
        BaseModel(slug, "folder", f"/models/{slug}", digest(slug), 32_768, "bf16")
        for slug in ("tiny", "unsloth/Llama-3.2-1B-Instruct", "Qwen/Qwen3-0.6B")
    ]
    world.datasets += [Dataset("support-triage-train", 500), Dataset("gsm8k-train", 7473)]
    world.bundles.append(Bundle("gsm8k-scoring"))
    return world


def descriptor(method: str = "sft", **parts: Any) -> dict[str, Any]:
    """A small descriptor: ``config`` is merged into, other keys are set."""
    config = {"dataset": "d", "method": method} | parts.pop("config", {})
    return {"kind": "run", "workload": "t", "baseModel": "tiny", "config": config} | parts


def put(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of a document with one field set, by its dotted path."""
    copy: dict[str, Any] = json.loads(json.dumps(document))
    inner, (*groups, key) = copy, path.split(".")
    for group in groups:
        inner = inner.setdefault(group, {})
    inner[key] = value
    return copy


def at(tree: Any, path: str) -> Any:
    """What stands at a dotted path of nested mappings."""
    for key in path.split("."):
        tree = tree[key]
    return tree


def _prefix(ref: object, full: str) -> bool:
    return isinstance(ref, str) and len(ref) >= 4 and full.startswith(ref)


def _one(kind: str, ref: object, things: list[Any], identity: str) -> Any:
    for thing in things:
        if ref is thing or ref == thing.name or _prefix(ref, getattr(thing, identity)):
            return thing
    msg = f"no {kind} {ref!r}; there is {', '.join(str(thing.name) for thing in things)}"
    raise NotFound(msg)
