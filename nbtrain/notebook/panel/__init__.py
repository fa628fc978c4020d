"""The live panel of a run: the widget, and the kernel's side of what page and kernel say.

What they say to each other is told in ``labextension/src/protocol.ts``.
"""
