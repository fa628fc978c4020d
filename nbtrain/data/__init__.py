"""Chat rows: strict reader, registry, chat templates and loss masks, tasks, analysis.

Only :mod:`nbtrain.data.rendering` and what is built on it need a tokenizer, and only inside a
job's process or a side process.
"""
