"""Supervised runs: rows to tokens, tokens to updates, on ``trl.SFTTrainer``."""
