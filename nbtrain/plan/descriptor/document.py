"""What a descriptor states, in either of its two forms, by the paths of its fields."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nbtrain.errors import Problem, Where
from nbtrain.plan.descriptor.field import short
from nbtrain.plan.descriptor.misnamed import counterpart, instead, is_option, nearest, snake
from nbtrain.plan.descriptor.table import FIELDS, METHODS, Field, fields_of
from nbtrain.plan.fields import describe, plain, spelt
from nbtrain.plan.source import BROKEN, SourcedMapping
from nbtrain.plan.statements import (
    DESCRIPTOR_GROUPS,
    Statement,
    Statements,
    check_name,
    mixed,
    same,
    stated_twice,
)

REWARD, SETTINGS = "config.reward", "config.engineSettings.settings"
_PATHS = {
    "workload": "workload", "base_model_slug": "baseModel", "algorithm": "config.method",
}  # fmt: skip
FLAT: dict[str, Field] = {
    f.setting: f for f in fields_of("sft") if f.setting is not None
} | {"workload": FIELDS["workload"], "base_model_slug": FIELDS["baseModel"]}  # fmt: skip
"""The flat form's keys that stand for a field."""
_IN_TEXT = {
    called: flat
    for flat, one in FLAT.items()
    for called in (one.path, one.name, one.key)
    if called != called.lower() or "." in called
}
_WORDS = re.compile(r"(?<![\w.])(" + "|".join(map(re.escape, _IN_TEXT)) + r")(?![\w.]*\w)")


def in_flat(text: str) -> str:
    """A sentence on fields with the flat form's names for them."""
    return _WORDS.sub(lambda found: _IN_TEXT[found[1]], text)


_MANY = 100
OF_DESCRIPTOR = "the checkpoint's run is by a descriptor, which goes on as one"
_BESIDE = ("parent_checkpoint_id", "display_name", "load_weights_only")


@dataclass(slots=True)
class Document(Statements):
    """Everything stated; ``options`` is keyed by the path of a field.

    ``flat`` is true for the flat form, whose refusals use its own names. ``groups`` are the
    groups that are there, with their places; ``bad`` has names as refusals use them.

    ``unsure`` is true where the method cannot be told: ``method`` is then the likeliest, and
    nothing is refused for it. ``assumed`` is true where only ``rlHyperparams`` tells it.
    """

    flat: bool = False
    method: str = "sft"
    unsure: bool = False
    assumed: bool = False
    groups: dict[str, Where | None] = field(default_factory=dict)
    parent: list[Statement] = field(default_factory=list)
    load_weights_only: Statement | None = None
    further: Statement | None = None
    """``num_steps`` where there is none; its place is the key's."""
    implied: bool = False
    """It is a descriptor because what it goes on from is one."""

    def called(self, one: Field) -> str:
        """What refusals of this document call a field."""
        if not self.flat:
            return one.name
        return next((name for name, known in FLAT.items() if known is one), one.name)

    def where(self, path: str) -> Where | None:
        """Where a field, or the group that it stands in, is stated."""
        statement = self.options.get(path)
        return statement.where if statement is not None else self.groups.get(path)


def read_descriptor(document: Mapping[str, Any], beside: Mapping[str, Any]) -> Document:
    """The statements of a descriptor and of what stands beside it (``None`` is unstated)."""
    found = Document()
    if isinstance(document, SourcedMapping):
        found.problems.extend(document.problems)
    _tell_method(found, document, beside)
    _walk(found, document, "")
    _check_kind(found, document)
    _take_beside(found, beside)
    return found


def read_further(document: object, beside: Mapping[str, Any], method: str) -> Document:
    """The statements of what goes on from a run of ``method`` by a descriptor.

    It is a descriptor that needs no ``kind``, and may also hold what else stands beside one.
    """
    found = Document(method=method, implied=True)
    if isinstance(document, SourcedMapping):
        found.problems.extend(document.problems)
    if isinstance(document, Mapping):
        _walk(found, document, "")
    elif document is not None:
        message = f"options: a mapping is needed, found {describe(document)}"
        found.refuse(Problem("options", message, plain(document)))
    _take_beside(found, beside)
    stated = found.options.get("config.method")
    if stated is not None and isinstance(stated.value, str) and stated.value in METHODS:
        found.method = stated.value
    return found


def read_flat(options: Mapping[str, Any], beside: Mapping[str, Any]) -> Document:
    """The statements of the flat form: snake_case names of the supervised fields."""
    found = Document(flat=True)
    if isinstance(options, SourcedMapping):
        found.problems.extend(options.problems)
    for key, value in options.items():
        where = _where(options, key)
        if value is BROKEN:
            found.bad.add(key)
        elif key in FLAT:
            found.options[FLAT[key].path] = Statement(_spelt(key, value), where)
        elif key == "parent_checkpoint_id":
            found.parent += [Statement(value, where)] if value is not None else []
        elif key == "display_name":
            found.display_name = Statement(value, where)
        elif key == "load_weights_only":
            found.load_weights_only = Statement(value, where)
        elif key == "num_steps":
            found.further = Statement(value, _key(options, key))
        else:
            found.refuse(_unknown_flat(options, key))
    _take_beside(found, beside)
    return found


def _tell_method(found: Document, document: Mapping[str, Any], beside: Mapping[str, Any]) -> None:
    """The method as far as it can be told, to know which names are meant."""
    config = document.get("config")
    config = config if isinstance(config, Mapping) else {}
    body, line = config.get("method"), beside.get("algorithm")
    stated = line if body is None else body
    rl = "rlHyperparams" in config and not ("hyperparams" in config or "smoke" in document)
    found.method = "grpo" if rl else "sft"
    if stated is None:
        found.assumed = rl
    elif isinstance(stated, str) and stated in METHODS:
        found.method = stated
    else:
        found.unsure = True
        near = difflib.get_close_matches(spelt(stated).lower(), METHODS, n=1)
        found.method = near[0] if near else found.method


def _spelt(key: str, value: Any) -> Any:
    """Precision is lower case in the flat form, as everywhere among options."""
    lower = key == "precision" and isinstance(value, str) and value == value.lower()
    return value.upper() if lower else value


def _where(mapping: Mapping[str, Any], key: str) -> Where | None:
    return mapping.where_value(key) if isinstance(mapping, SourcedMapping) else None


def _key(mapping: Mapping[str, Any], key: str) -> Where | None:
    return mapping.where_key(key) if isinstance(mapping, SourcedMapping) else None


def _walk(
    found: Document, mapping: Mapping[str, Any], group: str, around: Where | None = None
) -> None:
    """Take what stands in a group; ``around`` is the place of a mapping without places."""
    prefix = f"{group}." if group else ""
    for key, value in mapping.items():
        path, key_at = f"{prefix}{spelt(key)}", _key(mapping, key) or around
        value_at = _where(mapping, key) or around
        inner = [p for p in (*FIELDS, SETTINGS) if p.startswith(f"{path}.")]
        if found.implied and not group and _take_own(found, key, value, key_at):
            continue
        if path not in FIELDS and path not in (REWARD, SETTINGS) and not inner:
            found.refuse(_unknown(found, spelt(key), group, key_at))
        elif value is BROKEN:
            found.bad |= {short(path), *(short(p) for p in inner)}
        elif inner:
            found.groups[path] = key_at
            if isinstance(value, Mapping):
                _walk(found, value, path, value_at)
            else:
                found.bad |= {short(p) for p in inner}
                found.refuse(_no_mapping(path, value, value_at))
        else:
            found.options[path] = Statement(value, value_at)


def _take_own(found: Document, key: str, value: Any, where: Where | None) -> bool:
    """Take what may also stand beside the document; whether it was such a thing."""
    if key not in (*_PATHS, *_BESIDE, "num_steps") or key in FIELDS:
        return False
    statement = Statement(value, where)
    if value is BROKEN:
        found.bad.add(key)
    elif key == "num_steps":
        found.further = statement
    elif key in _PATHS:
        found.options[_PATHS[key]] = statement
    elif key == "parent_checkpoint_id":
        found.parent += [statement] if value is not None else []
    else:
        setattr(found, key, statement)
    return True


def _no_mapping(path: str, value: object, where: Where | None) -> Problem:
    name = short(path)
    hint = f"Write {path.rpartition('.')[2]}: {{}} for its defaults, or leave it out"
    message = f"{name} needs a mapping, found {describe(value)}"
    return Problem(name, message, plain(value), "a mapping", where, hint)


def _unknown(found: Document, key: str, group: str, where: Where | None) -> Problem:
    path, told = f"{group}.{key}" if group else key, instead(key)
    message = f"there is no field {path}"
    # of a text that is no descriptor at all, the first keys tell enough
    many = len(found.problems) > _MANY
    near = None if told or many else nearest(key, group, found.method)
    if not group and is_option(key):
        message = (
            f"{key} is an option, and a document with kind is a descriptor: it is one or the "
            "other, never a mix"
        )
        if found.implied:
            message = f"{key} is an option, and {OF_DESCRIPTOR}"
        known = counterpart(key, found.method)
        near = known.path if known else None
    if near is not None:
        found.bad.add(short(near))  # so that nobody also calls it missing
    hint = told or (f"Did you mean {near}?" if near else _members(group, found.method))
    return Problem(path, message, key, where=where, hint=hint)


def _members(group: str, method: str) -> str:
    """What a group may hold."""
    prefix = f"{group}." if group else ""
    paths = [path for path, one in FIELDS.items() if method in one.methods]
    if not any(path.startswith(prefix) for path in paths):
        paths = list(FIELDS)
    keys = [path[len(prefix) :].split(".")[0] for path in paths if path.startswith(prefix)]
    if group == "config" and method != "sft":
        keys.append("reward")
    *most, last = dict.fromkeys(keys)
    listed = f"{', '.join(most)} and {last}" if most else last
    return f"{short(group) or 'A descriptor'} takes {listed}"


def _unknown_flat(options: Mapping[str, Any], key: str) -> Problem:
    where = _key(options, key)
    if key in DESCRIPTOR_GROUPS:
        return mixed(key, where)
    shown = spelt(key)
    message = f"there is no option {shown} with algorithm sft"
    near = nearest_flat(shown)
    hint = "%train options --method sft lists every option"
    hint = instead(shown, flat=True) or (f"Did you mean {near}?" if near else hint)
    return Problem(shown, message, shown, where=where, hint=hint)


def nearest_flat(key: str) -> str | None:
    """The option of a supervised run that an unknown one most likely means."""
    close = difflib.get_close_matches(snake(key), [*FLAT, *_BESIDE], n=1, cutoff=0.7)
    known = counterpart(snake(key), "sft") if not close else None
    return close[0] if close else (known.setting if known else None)


def _check_kind(found: Document, document: Mapping[str, Any]) -> None:
    if "kind" in document or "kind" in found.bad:
        return
    message = "kind is missing: it tells a run's descriptor from other documents"
    found.refuse(Problem("kind", message, allowed="run", hint="Write kind: run"))


def _take_beside(found: Document, beside: Mapping[str, Any]) -> None:
    found.small = bool(beside.get("small"))
    if beside.get("smoke"):
        found.groups.setdefault("smoke", None)
    for key, path in _PATHS.items():
        value = beside.get(key)
        body = found.options.get(path)
        if value is None:
            continue
        statement = Statement(value)
        if path in ("workload", "baseModel"):
            known = found.references.setdefault(path, [])
            known += [statement]
        elif body is None or body.value is None:
            found.options[path] = statement
        elif not same(body, statement):
            found.refuse(stated_twice(found.called(FIELDS[path]), body, statement))
    if beside.get("parent_checkpoint_id") is not None:
        found.parent.append(Statement(beside["parent_checkpoint_id"]))
    for key in ("display_name", "load_weights_only"):
        value, body = beside.get(key), getattr(found, key)
        if value is None:
            continue
        if body is not None and body.value is not None and not same(body, Statement(value)):
            found.refuse(stated_twice(key, body, Statement(value)))
        else:
            setattr(found, key, Statement(value))
    check_name(found)
