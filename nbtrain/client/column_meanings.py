"""What the columns of exported tables mean, for their manifest."""

from __future__ import annotations

__all__ = ["meaning_of"]

_MEANINGS = {
    # where and when
    "step": "global training step",
    "created_at": "when the row was recorded, UTC",
    "attempt": "number of the run's execution that recorded it",
    "at": "when the phase was entered, UTC",
    "phase": "fine state of the run",
    "message": "what was said of it",
    "settled": "false while a later step may still change the row",
    # a step
    "avg_reward": "mean recorded reward of all graded trajectories of groups completed in the step",
    "used_reward": "mean recorded reward of the trajectories that were trained on",
    "loss": "loss of the step; of a supervised run in nats per trained token",
    "learning_rate": "learning rate of the step",
    "grad_norm": "norm of the gradient before clipping",
    "update_norm": "norm of the change of the weights",
    "update_applied": "whether the optimizer changed the weights",
    "skip_reason": "why the update was skipped",
    "epoch": "passes over the data so far",
    "tokens": "tokens that were read, padding and untrained ones included",
    "trained_tokens": "tokens that the loss was taken over",
    "sequences": "sequences in the update",
    "row_ids": "rows of the dataset in the update",
    "policy_version": "number of updates behind the weights that sampled",
    "batch_groups": "groups in the update",
    "batch_trajectories": "trajectories in the update",
    # groups of a step
    "completed_groups": "groups completed in the step",
    "used_groups": "completed groups that were trained on",
    "no_signal_groups": "completed groups whose rewards are all equal",
    "no_signal_not_trained": "completed groups with equal rewards that were not trained on",
    "filtered_groups": "groups left out by the all-fail or all-pass filter",
    "too_small_groups": "groups with too few eligible trajectories",
    "discarded_groups": "groups thrown away as stale or unconsumed",
    "pending_groups": "groups that wait for a later step",
    "started_groups": "groups started in the run to date",
    "in_flight_groups": "groups not completed to date",
    "cancelled_groups": "groups cancelled in the run to date",
    "all_success_groups": "groups with equal rewards at or above 1",
    "all_failed_groups": "groups with equal rewards at or below 0",
    # trajectories of a step
    "attempted_trajectories": "trajectories that ended in the step",
    "completed_trajectories": "trajectories that reached their end",
    "cancelled_trajectories": "trajectories cut off before their end",
    "stale_trajectories": "trajectories dropped for staleness",
    "graded_trajectories": "trajectories with a grade",
    "eligible_trajectories": "trajectories admitted by the training filters",
    "trained_trajectories": "trajectories that were trained on",
    "correct": "graded at or above 1",
    "partial": "graded between 0 and 1",
    "incorrect": "graded at or below 0",
    "error": "of a step, trajectories that failed; of a trajectory, the first line of what failed",
    "incomplete": "trajectories that did not end by themselves and have no grade",
    "termination_reasons": "how many trajectories ended for each reason",
    "reward_std": "standard deviation of the rewards",
    "reward_std_within_groups": "standard deviation of the rewards within groups, on average",
    "advantage_max_abs": "largest advantage, without its sign",
    "advantage_mean_abs": "mean advantage, without its sign",
    "output_tokens": "tokens that the model wrote",
    "tokens_taught_nothing": "tokens written in groups that taught nothing",
    "tokens_min": "fewest tokens of a trajectory", "tokens_mean": "mean tokens of a trajectory",
    "tokens_max": "most tokens of a trajectory",
    "finished_tokens_min": "fewest tokens of a trajectory that ended by itself",
    "finished_tokens_mean": "mean tokens of a trajectory that ended by itself",
    "finished_tokens_max": "most tokens of a trajectory that ended by itself",
    "turns_min": "fewest turns of a trajectory", "turns_mean": "mean turns of a trajectory",
    "turns_max": "most turns of a trajectory",
    # the update
    "clipped_share": "share of ratios that were clipped",
    "ratio_mean": "mean ratio of new to old probability", "ratio_max": "largest ratio",
    "kl": "mean divergence from the reference, in nats; empty where it is not computed",
    "entropy": "mean entropy of the next token, in nats",
    "sampler_gap": "mean difference between the sampler's and the trainer's log-probabilities",
    "stale_token_share": "share of tokens sampled by an older policy",
    "stale_unkept_share": "share of tokens of a policy that is no longer kept",
    "lag_mean": "mean updates that the policy of a token lies behind",
    "lag_max": "most updates that the policy of a token lies behind",
    "importance_capped_share": "share of importance weights at their cap",
    "bottleneck": "what sampling waited for, where it stood still",
    "sampler_idle_share": "share of the sampler's places that stood empty",
    # a validation round
    "held_out_reward": "mean reward of the round",
    "low": "lower end of the 95% interval of the round's score",
    "high": "upper end of the 95% interval of the round's score",
    "perplexity": "exponential of the validation loss",
    "round_completed": "whether the whole round was measured; compare only such",
    "completed_samples": "samples that were measured", "expected_samples": "samples of the round",
    # groups and trajectories
    "group_id": "number of the group in the run",
    "task_id": "hash of the task", "task_index": "place of the task in its workload",
    "budget": "limit of output tokens, where tasks are sampled under several",
    "outcome": "place of the group in the step's ledger",
    "reason": "how it ended, or why it was saved or left out",
    "size": "trajectories in the group", "eligible": "whether, or how many, may be trained on",
    "reward_mean": "mean reward of the group",
    "consumed_step": "step whose update used it",
    "trajectory_id": "public id of the trajectory",
    "split": "train or held_out", "sample": "number within the group",
    "status": "completed, failed or aborted",
    "reward": "what it was graded; empty without a grade",
    "verdict": "why it was, or was not, trained on",
    "advantage": "advantage that it was trained with", "turns": "turns it took",
    "prompt_tokens": "tokens of the prompt", "seconds": "seconds it took",
    "prompt": "what the model was asked: text, or chat messages as JSON",
    "completion": "what the model wrote: text, or chat messages as JSON",
    "terms": "unweighted score of each reward term", "terms_std": "spread of each reward term",
    "traceback": "whole text of what failed",
    # checkpoints, checks, plan
    "checkpoint_id": "id of the checkpoint", "step_index": "global step of the checkpoint",
    "kind": "what the checkpoint holds", "size_bytes": "bytes on the disk",
    "base_model_slug": "base model", "run_id": "run that saved it", "pinned": "kept for good",
    "validation_loss": "validation loss at its step, in nats per trained token",
    "ties_with": "step of the highest checkpoint, where it may be equal to it",
    "tie": "step of the highest checkpoint, where the two may be equal",
    "held_out_low": "lower end of the 95% interval of the held-out reward",
    "held_out_high": "upper end of the 95% interval of the held-out reward",
    "name": "name of the check", "measured": "what was measured", "unit": "its unit",
    "warn": "limit from which it warns", "refuse": "limit from which it refuses",
    "said": "what was found, in words", "at_least": "whether more is better",
    "option": "name of the option", "path": "dotted path of the field", "value": "resolved value",
    "origin": "stated, default, computed or inherited",
    "hashed": "whether it is part of the config hash", "note": "what explains the value",
}  # fmt: skip


def meaning_of(column: str) -> str:
    """What a column means; empty for one that is not known here."""
    if found := _MEANINGS.get(column):
        return found
    head, _, tail = column.partition(".")
    if tail and head in _MEANINGS:
        return f"{_MEANINGS[head]}: {tail}"
    if column.startswith("seconds_"):
        return f"seconds of the step spent on {column.removeprefix('seconds_')}"
    return ""
