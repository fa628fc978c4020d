"""What resolving needs to know of workloads, base models and checkpoints, as protocols.

The plan is the ground floor: the catalog and the store implement these, never the other way.
A lookup that finds nothing raises :class:`nbtrain.errors.NotFound`, its message naming what there
is; one that finds something unusable raises :class:`nbtrain.errors.Refused`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Template = Literal["none", "plain", "tools"]
"""What a chat template can do: there is none, it shows messages, it shows tools too."""


@dataclass(frozen=True, slots=True)
class MachineInfo:
    """What the machine has: GPUs that torch could use, whether vLLM is installed."""

    gpus: int = 0
    vllm: bool = False
    memory_gib: float | None = None
    """Host memory, where it can be told."""
    int4: bool = False
    """Whether bitsandbytes, which holds weights in four bits, is installed."""

    @property
    def device_profile(self) -> str:
        """What the catalog calls the device that jobs train on here."""
        return "gpu" if self.gpus else "cpu"


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Dimensions of a decoder, as its configuration states them; ``None`` where it does not.

    ``intermediate_size`` is the width of one MLP (of one expert where there are ``experts``).
    """

    hidden_size: int | None = None
    intermediate_size: int | None = None
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    vocabulary: int | None = None
    experts: int | None = None


class WorkloadInfo(Protocol):
    """A workload as the plan sees it."""

    @property
    def workload_id(self) -> str:
        """Content hash, 64 hex digits."""
        ...

    @property
    def name(self) -> str | None:
        """The alias it was asked for by, if any."""
        ...

    @property
    def base_model(self) -> str | None:
        """Slug used when the plan names no base model."""
        ...

    @property
    def reward_identity(self) -> Sequence[Mapping[str, Any]]:
        """One mapping for each reward term, its ``weight`` among them."""
        ...

    @property
    def environment_form(self) -> Literal["tools", "step", "unknown"] | None:
        """How its environment is talked to; ``None`` without one."""
        ...

    @property
    def has_tasks(self) -> bool:
        """Whether it has tasks of its own; options train on those, a descriptor on its dataset."""
        ...

    @property
    def grader(self) -> str | None:
        """The grader that its evaluations use and a descriptor's reward defaults to, if any."""
        ...

    def split_info(self, *, validation: bool) -> SplitInfo:
        """How its tasks divide, told without reading them.

        Without validation nothing is split off; stated held-out tasks stay out either way.
        """
        ...


class SplitInfo(Protocol):
    """Sizes of the two sides, a sentence on how they came about, and the train side's digest."""

    @property
    def train(self) -> int:
        """Number of tasks that train."""
        ...

    @property
    def held_out(self) -> int:
        """Number of tasks that are held out."""
        ...

    @property
    def description(self) -> str:
        """One sentence on how the split came about."""
        ...

    @property
    def train_digest(self) -> str:
        """SHA-256 over the ids of the tasks that train."""
        ...


class BaseModelInfo(Protocol):
    """A base model as the plan sees it, read from file headers alone."""

    @property
    def slug(self) -> str:
        """The name that plans use."""
        ...

    @property
    def kind(self) -> Literal["embedded", "folder", "repository", "gguf"]:
        """Where the weights come from."""
        ...

    @property
    def location(self) -> str:
        """Path or repository of the weights."""
        ...

    @property
    def fingerprint(self) -> str:
        """SHA-256 that a checkpoint of this model must match."""
        ...

    @property
    def max_context(self) -> int:
        """Largest number of tokens of prompt and reply together."""
        ...

    @property
    def precision(self) -> Literal["fp32", "bf16"]:
        """Default precision of the frozen weights."""
        ...

    @property
    def parameters(self) -> int | None:
        """Number of weights, where the header tells it."""
        ...

    @property
    def sampler(self) -> Literal["ragged", "generate"]:
        """What can decode it without further packages."""
        ...

    @property
    def thinking(self) -> tuple[str, ...]:
        """Levels of ``reasoning_effort`` that it has, the least thinking first; often none."""
        ...

    @property
    def template(self) -> Template | None:
        """What its chat template can do; ``None`` where that cannot be told."""
        ...

    @property
    def sizes(self) -> ModelSizes:
        """Its dimensions."""
        ...


class CheckpointInfo(Protocol):
    """A committed checkpoint as the plan sees it."""

    @property
    def checkpoint_id(self) -> str:
        """64 hex digits."""
        ...

    @property
    def run_id(self) -> str:
        """The run that saved it."""
        ...

    @property
    def step_index(self) -> int:
        """Global step it was saved at."""
        ...

    @property
    def base_model_slug(self) -> str:
        """Slug of the model its adapter belongs to."""
        ...

    @property
    def base_fingerprint(self) -> str:
        """Fingerprint of that model when the run began."""
        ...

    @property
    def workload_id(self) -> str:
        """The workload its run trained on."""
        ...

    @property
    def path(self) -> str:
        """Folder of the checkpoint."""
        ...

    @property
    def has_weights(self) -> bool:
        """Whether it holds an adapter."""
        ...

    @property
    def has_training_state(self) -> bool:
        """Whether it holds optimizer, schedule, RNG and data position."""
        ...

    @property
    def resumable(self) -> Sequence[tuple[int, str]]:
        """Step and id of its run's checkpoints that hold training state, where it has none."""
        ...

    @property
    def resolved(self) -> Mapping[str, Any]:
        """The parent run's resolved plan, as ``ResolvedPlan.to_json`` wrote it."""
        ...


class DatasetInfo(Protocol):
    """A registered dataset as the plan sees it, told without reading its rows."""

    @property
    def dataset_id(self) -> str:
        """SHA-256 of its examples, 64 hex digits."""
        ...

    @property
    def name(self) -> str | None:
        """The alias it was asked for by, if any."""
        ...

    @property
    def rows(self) -> int:
        """Number of examples."""
        ...

    @property
    def columns(self) -> tuple[str, ...]:
        """Keys that rows have besides ``messages``, sorted."""
        ...

    @property
    def facts(self) -> Mapping[str, tuple[int, int]]:
        """How many rows are of a kind, and the physical line of the first, for the kinds that
        occur: ``images`` (an image part), ``unanswered`` (the last message is not the
        assistant's), ``tools`` (a tool list, tool calls or tool results), and
        ``answers_without_json`` (the last message is the assistant's, and neither an object nor
        a list stands in its text), which datasets of earlier versions lack.
        """
        ...


class AdapterInfo(Protocol):
    """A registered model, that is an adapter, as the plan sees it."""

    @property
    def model_id(self) -> str:
        """64 hex digits."""
        ...

    @property
    def name(self) -> str | None:
        """The alias it was asked for by, if any."""
        ...

    @property
    def base_model_slug(self) -> str:
        """Slug of the model it belongs to."""
        ...

    @property
    def base_fingerprint(self) -> str:
        """Fingerprint of that model."""
        ...

    @property
    def config_hash(self) -> str:
        """Recipe that made it."""
        ...

    @property
    def weights_digest(self) -> str:
        """SHA-256 of its weights file."""
        ...

    @property
    def path(self) -> str:
        """Its folder, as PEFT loads it."""
        ...

    @property
    def lora(self) -> Mapping[str, Any]:
        """``lora_rank``, ``lora_alpha`` and ``lora_target_modules`` of its run's plan."""
        ...


class BundleInfo(Protocol):
    """A registered bundle of Python modules and data files as the plan sees it."""

    @property
    def bundle_id(self) -> str:
        """SHA-256 of its bytes, 64 hex digits."""
        ...

    @property
    def name(self) -> str | None:
        """The alias it was asked for by, if any."""
        ...

    @property
    def modules(self) -> tuple[str, ...]:
        """Dotted names of the modules that can be imported from it, sorted."""
        ...

    def lacking(self, module: str, function: str) -> tuple[str, str | None] | None:
        """What is wrong with a function that should score, told without running anything.

        A clause that begins with "has", and what is allowed; ``None`` for one that can score.
        Raises :class:`nbtrain.errors.NotFound` where the bundle is gone or damaged.
        """
        ...


class Registry(Protocol):
    """Everything a plan can name. References are names, ids, unambiguous id prefixes or objects."""

    def workload(self, ref: object) -> WorkloadInfo:
        """The workload of this name, id, id prefix or object."""
        ...

    def base_model(self, ref: object) -> BaseModelInfo:
        """The base model of this slug, repository, folder or object."""
        ...

    def checkpoint(self, ref: object) -> CheckpointInfo:
        """The committed checkpoint of this id, id prefix or object."""
        ...

    def base_models(self) -> list[BaseModelInfo]:
        """The models offered by ``list_options``: the embedded one and the selected ones."""
        ...

    def machine(self) -> MachineInfo:
        """What this machine has."""
        ...

    def dataset(self, ref: object) -> DatasetInfo:
        """The dataset of this name, id, id prefix or object."""
        ...

    def model(self, ref: object) -> AdapterInfo:
        """The registered model of this name, id, id prefix or object."""
        ...

    def bundle(self, ref: object) -> BundleInfo:
        """The bundle of this name, id, id prefix or object."""
        ...
