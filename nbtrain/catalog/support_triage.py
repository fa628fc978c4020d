"""The sample `support-triage`: short letters to a support desk, and the label each should get.

The rows are put together from sentences written for this purpose: a greeting, what happened, how
much it presses. A row's label is the JSON object ``{"team": …, "priority": …}``: the team follows
from what happened, the priority from how much it presses. No letter stands on both sides.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

__all__ = ["SUPPORT_TRIAGE", "TRAIN", "VALIDATION", "triage_rows"]

SUPPORT_TRIAGE = "support-triage"
TRAIN = "support-triage-train"
VALIDATION = "support-triage-validation"

SYSTEM = "Sort the letter. Answer with JSON: team and priority."

_GREETINGS = (
    "Hello,",
    "Hi there,",
    "Good morning,",
    "Dear support,",
    "Hey,",
    "To whom it may concern,",
)

_EVENTS = {
    "billing": (
        "I was charged twice this month.",
        "the invoice shows the wrong amount.",
        "my refund has not arrived.",
        "you billed me after I cancelled.",
        "the discount is missing on my invoice.",
        "please change the card you charge.",
        "I need a receipt for my payment.",
        "the tax on the bill looks wrong.",
    ),
    "access": (
        "I cannot log in.",
        "my password is not accepted.",
        "the reset link does not work.",
        "my account is locked.",
        "the login code never arrives.",
        "I lost the phone I log in with.",
        "please add a colleague to our account.",
        "someone else is logged in to my account.",
    ),
    "delivery": (
        "my parcel has not arrived.",
        "the box came damaged.",
        "you sent me the wrong size.",
        "the courier left the parcel at another house.",
        "please change the delivery address.",
        "tracking has not moved for a week.",
        "one item is missing from the parcel.",
        "how do I send the parcel back?",
    ),
    "technical": (
        "the app crashes when I open it.",
        "the page stays white.",
        "exporting a file gives an error.",
        "the app is very slow since the update.",
        "the search finds nothing.",
        "uploads stop at ninety percent.",
        "the sync between my devices is broken.",
        "the printer is no longer found by the app.",
    ),
}

_PRESSING = {
    "high": (
        "This is urgent, we cannot work.",
        "I need this fixed today.",
        "Please act at once.",
        "It has to be solved within the hour.",
    ),
    "normal": (
        "Please look into it this week.",
        "Could you check this for me?",
        "Please let me know what to do.",
        "I would like an answer soon.",
    ),
    "low": (
        "There is no hurry.",
        "Whenever you have time.",
        "It can wait.",
        "Just so that you know.",
    ),
}

_VALIDATION_ROWS = 96


def triage_rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The 2,208 training and the 96 validation rows, as chat rows.

    Both sides have every sentence, in other combinations, and the labels in equal shares.
    """
    rows = []
    for team, events in _EVENTS.items():
        for priority, phrases in _PRESSING.items():
            kind = [
                _row(f"{greeting} {event} {phrase}", team, priority)
                for greeting in _GREETINGS
                for event in events
                for phrase in phrases
            ]
            rows.append(sorted(kind, key=_place))
    held = _VALIDATION_ROWS // len(rows)
    train = [row for kind in rows for row in kind[held:]]
    validation = [row for kind in rows for row in kind[:held]]
    return sorted(train, key=_place), sorted(validation, key=_place)


def _row(letter: str, team: str, priority: str) -> dict[str, Any]:
    label = json.dumps({"team": team, "priority": priority})
    return {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": letter},
            {"role": "assistant", "content": label},
        ]
    }


def _place(row: dict[str, Any]) -> bytes:
    letter: str = row["messages"][1]["content"]
    return hashlib.sha256(letter.encode()).digest()
