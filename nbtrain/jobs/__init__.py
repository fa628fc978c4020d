"""Jobs: launching a run (``launch``), its host (``host``), whether it lives (``liveness``),
asking it to stop (``control``).

Nothing is imported here: a host and its guardian, which are to stay small, start from here too.
"""
