"""Tab completion of ``%%train`` and ``%train``, as a matcher of IPython."""

from __future__ import annotations

import logging
from typing import Any

__all__ = ["install", "remove"]

logger = logging.getLogger(__name__)
_NAME = "nbtrain"
_PRIORITY = 1000  # before IPython's own, which are then not asked where this one knows


class _Nothing(list[Any]):
    """No completion, and none from anybody else: IPython silences the others only for a matcher
    that seems to have found something, and Python names mean nothing in a plan.
    """

    def __len__(self) -> int:
        return 1


def install(shell: Any) -> None:
    """Let the shell's completer ask nbtrain first."""
    remove(shell)
    shell.Completer.custom_matchers.append(_matcher(shell))


def remove(shell: Any) -> None:
    """Take the matcher away again."""
    matchers = shell.Completer.custom_matchers
    matchers[:] = [m for m in matchers if getattr(m, "matcher_identifier", None) != _NAME]


def _matcher(shell: Any) -> Any:
    from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher

    @context_matcher(identifier=_NAME, priority=_PRIORITY)  # type: ignore[untyped-decorator]
    def complete(context: CompletionContext) -> Any:
        found: Any = None
        # an error here would be printed under whatever cell was run last
        try:
            found = _offers(shell, context)
        except Exception:
            logger.debug("completion failed", exc_info=True)
        if found is None:
            return {"completions": [], "suppress": False}
        typed, offers = found
        items = [SimpleCompletion(text=o.text, type=o.type or None) for o in offers]
        return {
            "completions": items or _Nothing(),
            "matched_fragment": typed,
            "suppress": True,
            "ordered": True,
        }

    return complete


def _offers(shell: Any, context: Any) -> Any:
    text: str = context.full_text
    if "%train" not in text:
        return None
    from nbtrain.client import default_client
    from nbtrain.notebook.completion_offers import offers
    from nbtrain.notebook.names import Names

    return offers(
        text,
        context.cursor_line,
        context.cursor_position,
        known=lambda: default_client().known,
        names=Names(shell),
    )
