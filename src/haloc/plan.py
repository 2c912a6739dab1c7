"""A plan says for each layer of a network, by name, in which form it is to be written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from haloc.errors import FileFormatError, PlanError, shown
from haloc.files import naming, read_json, write_json
from haloc.forms import FORMS, Dense, Form, form_from_dict, form_to_dict

KIND = "haloc-plan"
FORMAT = 1


class Plan(Mapping[str, Form]):
    """An immutable mapping from layer name to form; layers it does not name stay dense.

    Example:
        >>> plan = Plan({"layer1.0.conv1": Tucker2(8, 8), "fc": Svd(5)})
        >>> plan.save("plan.json")
        >>> Plan.load("plan.json") == plan
        True
    """

    def __init__(self, forms: Mapping[str, Form]) -> None:
        for name, form in forms.items():
            if not isinstance(name, str) or not isinstance(form, tuple(FORMS.values())):
                raise PlanError(f"a plan maps layer names to forms ({', '.join(FORMS)}), got {name!r}: {form!r}")
        self._forms = dict(forms)

    def __getitem__(self, name: str) -> Form:
        return self._forms[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._forms)

    def __len__(self) -> int:
        return len(self._forms)

    def __hash__(self) -> int:
        return hash(frozenset(self._forms.items()))

    def __repr__(self) -> str:
        return f"Plan({self._forms!r})"

    def changes(self) -> dict[str, Form]:
        """The layers that are not left dense."""
        return {name: form for name, form in self.items() if form != Dense()}

    def diff(self, other: Mapping[str, Form]) -> dict[str, tuple[Form, Form]]:
        """For every layer written differently: (form here, form in ``other``); absent means dense."""
        names = dict.fromkeys([*self, *other])
        pairs = {name: (self.get(name, Dense()), other.get(name, Dense())) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def to_dict(self) -> dict[str, Any]:
        """Writes the plan as plain JSON values."""
        layers = {name: form_to_dict(form) for name, form in self.items()}
        return {"kind": KIND, "format": FORMAT, "layers": layers}

    @classmethod
    def from_dict(cls, value: Any) -> Plan:
        """Reads what `to_dict` wrote; anything else is refused with the reason."""
        _check_header(value)
        forms = {}
        for name, form in value["layers"].items():
            try:
                forms[name] = form_from_dict(form)
            except FileFormatError as error:
                raise FileFormatError(f"layer {shown(name)}: {error}") from error
        return cls(forms)

    def save(self, path: str | Path) -> None:
        """Writes the plan as a JSON file, whole or not at all."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a plan file."""
        with naming(path):
            return cls.from_dict(read_json(path))


def _check_header(value: Any) -> None:
    """Refuses what is not a plan of a format this version reads."""
    if not isinstance(value, dict) or value.get("kind") != KIND or not isinstance(value.get("layers"), dict):
        raise FileFormatError(f'not a plan: expected a JSON object with "kind": "{KIND}", "format" and "layers"')
    if value.get("format") != FORMAT:
        raise FileFormatError(
            f"plan format {shown(value.get('format'))} is not known to this version, which reads format {FORMAT}; "
            "upgrade haloc or write the plan anew"
        )
