"""Options in groups: a verb's parameter that is a dataclass stands for one option per field.

Typer wants every option as a parameter of its own, written out again in every verb that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.models import OptionInfo


@dataclass(frozen=True)
class Group:
    """Marks a parameter as a group, in ``Annotated[SomeDataclass, Group(…)]``.

    Attributes:
        panel: the heading of its options in ``--help``.
        helps: what is said of fields that are not options already; a field without either is no option.
    """

    panel: str
    helps: Mapping[str, str] = field(default_factory=dict)


def grouped(verb: Callable[..., None]) -> Callable[..., None]:
    """Returns the verb as typer wants it: groups taken apart into options, and put together when it is called.

    The options' defaults are those of the value that the parameter has as its default, else those of the fields.
    """
    hints = get_type_hints(verb, include_extras=True)
    flat: list[Parameter] = []
    groups: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    for parameter in signature(verb).parameters.values():
        hint, default = hints[parameter.name], parameter.default
        group = _extra(hint, Group)
        if group is None:
            flat.append(_option(parameter.name, hint, default))
        else:
            members = list(_members(get_args(hint)[0], group, default))
            flat += members
            groups[parameter.name] = _maker(get_args(hint)[0], default), [member.name for member in members]

    @wraps(verb)
    def flattened(**values: Any) -> None:
        for name, (make, names) in groups.items():
            values[name] = make(**{member: values.pop(member) for member in names})
        verb(**values)

    flattened.__signature__ = Signature(flat)  # type: ignore[attr-defined]
    flattened.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return flattened


def _maker(kind: type, default: Any) -> Callable[..., Any]:
    return kind if default is Parameter.empty else lambda **values: replace(default, **values)


def _members(kind: type, group: Group, default: Any) -> list[Parameter]:
    hints, found = get_type_hints(kind, include_extras=True), []
    for member in fields(kind):
        hint = _in_panel(hints[member.name], group, member.name)
        if hint is not None:
            own = Parameter.empty if member.default is MISSING else member.default
            found.append(
                _option(member.name, hint, own if default is Parameter.empty else getattr(default, member.name))
            )
    return found


def _in_panel(hint: Any, group: Group, name: str) -> Any:
    """The field's annotation with an option that stands in the group's panel; None where the field is no option."""
    option = copy(_extra(hint, OptionInfo))
    if option is None and name not in group.helps:
        return None
    option = option or typer.Option(help=group.helps[name])
    option.rich_help_panel = group.panel
    plain = get_args(hint)[0] if hasattr(hint, "__metadata__") else hint
    annotated: Any = Annotated
    return annotated[plain, option]


def _extra(hint: Any, kind: type) -> Any:
    """What of that kind an annotation carries, or None."""
    return next((extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, kind)), None)


def _option(name: str, hint: Any, default: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)
