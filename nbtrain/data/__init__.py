"""Chat rows: strict reader, registry, chat templates and loss masks, tasks, analysis.

Rendering, and what is built on it, needs a tokenizer: it is handed one, inside a
job's process or the side process (:mod:`nbtrain.data.side`), which alone loads one.
"""
