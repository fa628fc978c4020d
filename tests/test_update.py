"""The update: ratios, what counts, what is skipped, and that ranks and layouts change nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from judged import judged, shake, tiny_policy

from nbtrain.rollout.collector import JudgedGroup
from nbtrain.training.history import AdapterHistory
from nbtrain.training.packing import Layout
from nbtrain.training.policy import Policy
from nbtrain.training.update import Updater, UpdateReport, UpdateSettings

RATE = 1e-3
LAYOUTS = {
    "one row": Layout(row_tokens=10_000, packed_tokens=10_000),
    "a row a group": Layout(row_tokens=0, packed_tokens=10_000, batch_tokens=1),
    "prefixes": Layout(packed_tokens=0),
    "a prefix batch a reply": Layout(packed_tokens=0, batch_tokens=1),
    "mixed": Layout(packed_tokens=24),
    "three sequences": Layout(packed_tokens=10_000, sequences=3),
    "one sequence": Layout(packed_tokens=10_000, sequences=1),
    "prefixes, two sequences": Layout(packed_tokens=0, sequences=2),
}


def chosen(level: str = "token", **changes: Any) -> UpdateSettings:
    values: dict[str, Any] = {
        "level": level,
        "clip_low": 0.2,
        "clip_high": 0.2,
        "kl_beta": 0.0,
        "temperature": 1.0,
        "max_grad_norm": 1e9,
    }
    return UpdateSettings(**(values | changes))


class Probe(Updater):
    """An updater that remembers its gradient."""

    gradient: torch.Tensor | None = None

    def _apply(self, gradient: torch.Tensor, *rest: Any) -> UpdateReport:
        self.gradient = gradient.clone()
        return super()._apply(gradient, *rest)


def learn(
    policy: Policy,
    groups: list[JudgedGroup],
    how: UpdateSettings,
    *,
    version: int = 0,
    **parts: Any,
) -> tuple[torch.Tensor | None, UpdateReport]:
    """Gradient and report of one update; the policy is put back as it was."""
    before = policy.adapter_state()
    updater = Probe(policy, how, weight_decay=0.0, **parts)
    report = updater.update(groups, RATE, version=version)
    policy.load_adapter_state(before)
    return updater.gradient, report


def alike(one: UpdateReport, other: UpdateReport, share: float) -> bool:
    """Every metric is there in both, and equal up to ``share``."""
    return one.metrics.keys() == other.metrics.keys() and all(
        value
        == (None if value is None else pytest.approx(other.metrics[key], rel=share, abs=1e-12))
        for key, value in one.metrics.items()
    )


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    # GPT-2 computes in its own precision throughout; others normalise in fp32 even in float64.
    return tiny_policy(tmp_path_factory.mktemp("model"), "gpt2")


BATCH = [judged(1, [0.0, 1.0, 0.5, 0.2]), judged(2, [1.0, 0.0, 0.4], observed=True)]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_first_ratio_is_exactly_one(
    level: str, temperature: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    policy = tiny_policy(tmp_path, "llama", dtype=dtype, noise=0.02)
    how = chosen(level, temperature=temperature, clip_low=1e-9, clip_high=1e-9)
    _, report = learn(policy, BATCH, how)
    assert report.metrics["ratio_max"] == report.metrics["ratio_mean"] == 1.0
    assert report.metrics["clipped_share"] == 0.0
    assert report.metrics["importance_capped_share"] is None
    assert report.metrics["lag_max"] == report.metrics["stale_token_share"] == 0
    assert report.metrics["sampler_gap"] > 0.1  # the made-up log-probs are far off


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_no_layout_changes_the_gradient(policy: Policy, level: str, beta: float) -> None:
    groups = [
        judged(n, [0.0, 1.0, 0.5, 0.2, 0.9], observed=n == 2, version=n % 2) for n in range(4)
    ]
    results = {
        name: learn(policy, groups, chosen(level, kl_beta=beta, layout=layout), version=1)
        for name, layout in LAYOUTS.items()
    }
    plain = Policy(policy.model, policy.device)
    plain.packs = False
    expected, first = learn(plain, groups, chosen(level, kl_beta=beta), version=1)
    assert expected is not None
    assert 0 < first.metrics["clipped_share"] < 1
    for name, (gradient, report) in results.items():
        assert gradient is not None
        assert torch.allclose(gradient, expected, rtol=1e-9, atol=1e-12), name
        assert alike(report, first, 1e-9), name


grades = st.lists(st.sampled_from([None, 0.0, 0.3, 1.0]), min_size=1, max_size=5)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(grades, min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_an_excluded_trajectory_equals_one_never_sampled(
    policy: Policy, rewards: list[list[float | None]], rng: Any
) -> None:
    """Nor does the order matter in which groups and trajectories come."""
    groups = [judged(n, row, version=0) for n, row in enumerate(rewards)]
    bare = []
    for whole in groups:
        rows = [
            row
            for row in zip(
                whole.group.trajectories, whole.admissions, whole.advantages, strict=True
            )
            if row[1].eligible
        ]
        rng.shuffle(rows)
        group = type(whole.group)(whole.group.group_id, 0, "", 0, [row[0] for row in rows])
        bare.append(
            JudgedGroup(
                group,
                [row[1] for row in rows],
                whole.verdict,
                [row[2] for row in rows],
                whole.outcome,
                "",
            )
        )
    rng.shuffle(bare)
    one, report = learn(policy, groups, chosen())
    other, again = learn(policy, bare, chosen())
    assert report.metrics == again.metrics
    assert report.skipped == again.skipped
    assert (one is None and other is None) or torch.equal(one, other)  # type: ignore[arg-type]


def test_a_tied_group_counts_but_teaches_only_through_kl(policy: Policy) -> None:
    signal, tied = judged(1, [0.0, 1.0]), judged(2, [1.0, 1.0])
    alone, _ = learn(policy, [signal], chosen())
    both, report = learn(policy, [signal, tied], chosen())
    assert alone is not None
    assert both is not None
    assert torch.allclose(both * 2, alone, rtol=1e-9, atol=1e-14)
    assert report.metrics["trained_trajectories"] == 2
    assert report.metrics["batch_trajectories"] == 4
    assert report.metrics["kl"] is None
    drawn, report = learn(policy, [tied], chosen(kl_beta=0.1))
    assert report.applied
    assert report.metrics["kl"] > 0
    assert drawn is not None
    assert float(drawn.norm()) > 1e-6


def test_a_batch_without_gradient_moves_nothing(policy: Policy) -> None:
    updater = Updater(policy, chosen(), weight_decay=0.5)
    before = policy.adapter_state()
    for groups, why in (([], "no eligible"), ([judged(1, [1.0, 1.0])], "every advantage is 0")):
        report = updater.update(groups, RATE, version=0)
        assert not report.applied
        assert why in str(report.skipped)
    assert updater.optimizer_state() == {}
    assert all(torch.equal(before[k], v) for k, v in policy.adapter_state().items())


def test_what_is_not_finite_is_not_applied(policy: Policy) -> None:
    before = policy.adapter_state()
    _, report = learn(policy, [judged(1, [0.0, 1.0])], chosen(temperature=1e-320))
    assert not report.applied
    assert not report.finite
    assert all(torch.equal(before[k], v) for k, v in policy.adapter_state().items())


def test_gradients_are_clipped_to_their_norm(policy: Policy) -> None:
    """AdamW's first step hides the size of a gradient; its moments do not."""
    free = Updater(policy, chosen(), weight_decay=0.0)
    before = policy.adapter_state()
    norm = free.update(BATCH, RATE, version=0).metrics["grad_norm"]
    policy.load_adapter_state(before)
    held = Updater(policy, chosen(max_grad_norm=norm / 4), weight_decay=0.0)
    assert held.update(BATCH, RATE, version=0).metrics["grad_norm"] == pytest.approx(norm)
    policy.load_adapter_state(before)
    for name, value in held.optimizer_state().items():
        if name.endswith("exp_avg"):
            assert torch.allclose(value * 4, free.optimizer_state()[name], rtol=1e-9, atol=1e-15)


def test_how_far_the_weights_moved_is_told(policy: Policy) -> None:
    """At a loss of about 0 it is the sign that something was learned."""
    before = policy.adapter_state()
    report = Updater(policy, chosen(), weight_decay=0.0).update(BATCH, RATE, version=0)
    after = policy.adapter_state()
    policy.load_adapter_state(before)
    moved = sum(float((after[name] - before[name]).double().square().sum()) for name in before)
    assert report.metrics["update_norm"] == pytest.approx(moved**0.5, rel=1e-6)
    assert report.metrics["update_norm"] > 0


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_older_tokens_have_the_samplers_log_prob_below_in_fp32(policy: Policy, level: str) -> None:
    group = judged(1, [0.0, 1.0], lengths=(4, 6), version=2)
    mixed = group.group.trajectories[0]
    mixed.versions = [1, 1, 2, 2]
    how = chosen(level, clip_low=10.0, clip_high=1e9)
    _, report = learn(policy, [group], how, version=2)
    by_hand = scores(policy, group)[0][:2] - torch.tensor(mixed.logprobs[:2], dtype=torch.float64)
    ratio = by_hand.exp() if level == "token" else (by_hand.sum() / 4).exp().repeat(4)
    assert report.metrics["ratio_mean"] == pytest.approx(
        (float(ratio.sum()) + 10 - len(ratio)) / 10
    )
    assert report.metrics["stale_token_share"] == 0.2
    assert report.metrics["lag_mean"] == 0.2
    assert report.metrics["lag_max"] == 1
    assert report.metrics["stale_unkept_share"] == 0.0
    assert report.metrics["importance_capped_share"] is None


def scores(policy: Policy, group: JudgedGroup) -> list[torch.Tensor]:
    """Log-probs of every trajectory's tokens, one plain row each."""
    out = []
    for trajectory in group.group.trajectories:
        ids = torch.tensor([[*trajectory.prompt_ids, *trajectory.token_ids]])
        with torch.no_grad():
            logits = policy.model(input_ids=ids).logits[0, len(trajectory.prompt_ids) - 1 : -1]
        targets = torch.tensor(trajectory.token_ids)
        out.append(logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0])
    return out


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_below_fp32_older_tokens_are_scored_by_their_own_adapter(
    policy: Policy, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, told that it is not exact, so that every figure can be checked."""
    monkeypatch.setattr(Policy, "exact", property(lambda self: False))
    start = policy.adapter_state()
    history = AdapterHistory(policy.trainable, 3)
    group = judged(1, [0.0, 1.0], lengths=(4, 6), version=2)
    one, other = group.group.trajectories
    one.versions, other.versions = [0, 1, 1, 2], [1] * 6
    by_version = {}
    for version in (0, 1, 2):
        history.keep(version)
        by_version[version] = scores(policy, group)
        shake(policy, 0.02, seed=10 + version) if version < 2 else None
    mine = policy.adapter_state()
    one.logprobs = (by_version[2][0] - 5.0).tolist()  # the sampler is far off: weights at the cap
    one.logprobs[1] = float(by_version[1][0][1])
    other.logprobs = by_version[1][1].tolist()
    _, report = learn(policy, [group], chosen(level), version=2, history=history)
    assert all(torch.equal(mine[k], v) for k, v in policy.adapter_state().items())
    old = torch.stack([by_version[v][0][n] for n, v in enumerate(one.versions)])
    gaps = torch.cat([by_version[2][0] - old, by_version[2][1] - by_version[1][1]])
    if level == "sequence":
        gaps = torch.cat([gaps[:4].mean().repeat(4), gaps[4:].mean().repeat(6)])
    assert report.metrics["ratio_mean"] == pytest.approx(float(gaps.exp().mean()), rel=1e-9)
    assert report.metrics["ratio_max"] == pytest.approx(float(gaps.exp().max()), rel=1e-9)
    # Of nine older tokens two are beyond the cap each by itself, three by their sequence.
    beyond = 2 if level == "token" else 3
    assert report.metrics["importance_capped_share"] == pytest.approx(beyond / 9)
    expected = float((old - torch.tensor(one.logprobs, dtype=torch.float64)).abs().sum()) / 10
    assert report.metrics["sampler_gap"] == pytest.approx(expected)
    policy.load_adapter_state(start)


def test_a_version_that_is_not_kept_falls_back_to_the_sampler(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Policy, "exact", property(lambda self: False))
    group = judged(1, [0.0, 1.0], lengths=(4, 4), version=3)
    group.group.trajectories[0].versions = [1, 1, 3, 3]
    _, report = learn(
        policy, [group], chosen(), version=3, history=AdapterHistory(policy.trainable, 2)
    )
    assert report.metrics["stale_unkept_share"] == 0.25
    assert report.metrics["importance_capped_share"] is None
    assert report.metrics["ratio_mean"] != 1.0


def test_the_updater_keeps_the_adapter_it_starts_from(policy: Policy) -> None:
    before = policy.adapter_state()
    history = AdapterHistory(policy.trainable, 2)
    updater = Updater(policy, chosen(), weight_decay=0.0, history=history)
    for version in range(4):
        updater.update(BATCH, RATE, version=version)
    assert history.versions == [2, 3]
    policy.load_adapter_state(before)


def test_tokens_of_a_later_policy_are_refused(policy: Policy) -> None:
    with pytest.raises(ValueError, match="policy version 1, but the weights are of version 0"):
        learn(policy, [judged(1, [0.0, 1.0], version=1)], chosen())


class Together:
    """Ranks in threads."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, board: list[Any]) -> None:
        self.rank, self.size = rank, size
        self._barrier, self._board = barrier, board

    def gather(self, value: Any) -> list[Any]:
        self._board[self.rank] = value
        self._barrier.wait()
        values = list(self._board)
        self._barrier.wait()
        return values

    def sum(self, tensors: Any) -> None:
        for tensor in tensors:
            total = sum(other.clone() for other in self.gather(tensor))
            self._barrier.wait()
            tensor.copy_(total)


def apart(jobs: list[Callable[[Any], Any]]) -> list[Any]:
    """Every job's result, each in a rank of its own."""
    barrier, board = threading.Barrier(len(jobs), timeout=60), [None] * len(jobs)
    results: list[Any] = [None] * len(jobs)

    def work(rank: int) -> None:
        results[rank] = jobs[rank](Together(rank, len(jobs), barrier, board))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


ALL = [
    judged(1, [0.0, 1.0, 0.5]),
    judged(2, [1.0, 0.0], observed=True),
    judged(3, [1.0, 1.0]),
    judged(4, [0.1, 0.9, 0.3, 0.7]),
]
SPLITS = {
    "unequal": [[0, 1, 3], [2]],
    "a rank with ties only": [[2], [0, 1, 3]],
    "a rank without groups": [[], [0, 1, 2, 3]],
    "three": [[3], [0], [1, 2]],
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_ranks_share_one_gradient(split: str, beta: float, policy: Policy, tmp_path: Path) -> None:
    how = chosen("sequence", kl_beta=beta)
    expected, whole = learn(policy, ALL, how)
    assert expected is not None

    def job(numbers: list[int]) -> Callable[[Any], Any]:
        own = tiny_policy(tmp_path, "gpt2")
        own.load_adapter_state(policy.adapter_state())
        return lambda ranks: (*learn(own, [ALL[n] for n in numbers], how, ranks=ranks),)

    for gradient, report in apart([job(numbers) for numbers in SPLITS[split]]):
        assert torch.allclose(gradient, expected, rtol=1e-10, atol=1e-14)
        assert report.applied
        assert alike(report, whole, 1e-10)


@pytest.mark.parametrize(
    ("groups", "why"), [([], "no eligible group"), ([judged(3, [1.0, 1.0])], "every advantage")]
)
def test_ranks_skip_together(groups: Any, why: str, tmp_path: Path) -> None:
    policies = [tiny_policy(tmp_path, "gpt2") for _ in range(2)]
    reports = apart(
        [
            lambda ranks, own=own, part=part: learn(own, part, chosen(), ranks=ranks)[1]
            for own, part in zip(policies, ([], groups), strict=True)
        ]
    )
    assert all(why in report.skipped for report in reports)


def test_the_optimizer_goes_on_from_its_state(policy: Policy) -> None:
    start = policy.adapter_state()
    straight = Updater(policy, chosen(), weight_decay=0.1)
    straight.update(BATCH, RATE, version=0)
    middle, moments = policy.adapter_state(), straight.optimizer_state()
    straight.update(BATCH, RATE, version=1)
    end = policy.adapter_state()
    policy.load_adapter_state(middle)
    resumed = Updater(policy, chosen(), weight_decay=0.1)
    resumed.load_optimizer_state(moments)
    resumed.update(BATCH, RATE, version=1)
    assert all(torch.equal(end[k], v) for k, v in policy.adapter_state().items())
    with pytest.raises(ValueError, match="does not belong"):
        resumed.load_optimizer_state({"other|step": torch.zeros(())})
    policy.load_adapter_state(start)


@pytest.mark.parametrize("family", ["gemma3_image", "qwen3_5_image", "llava"])
def test_image_text_models_train_their_language_backbone_on_text(
    family: str, tmp_path: Path
) -> None:
    policy = tiny_policy(tmp_path, family, dtype=torch.float32)
    assert not any("vision" in name or "projector" in name for name in policy.trainable)
    before = policy.adapter_state()
    batch = [judged(n, [0.0, 1.0, 0.5, 0.2]) for n in range(2)]
    updater = Updater(policy, chosen(kl_beta=0.1), weight_decay=0.0)
    report = updater.update(batch, RATE, version=0)
    assert report.applied
    assert report.metrics["ratio_max"] == 1.0
    after = policy.adapter_state()
    assert all(not torch.equal(after[name], before[name]) for name in before)
