"""Settings: frozen values that pydantic validates, such as a section of a recipe, with metadata for each field.

A field's annotation is its check, the string under it is its help, and `Annotated` adds which kinds of data use it, a
tuple of their names, and whether a resumed run may change it.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetPydanticSchema, TypeAdapter, ValidationError
from pydantic_core import core_schema

from hf_gpipe.errors import UserError, nearest
from hf_gpipe.settings.words import choices, describe
from hf_gpipe.text import show

Text = Annotated[str, Field(pattern=r"\S")]
Place = Annotated[Text, AfterValidator(os.path.expanduser)]
"""A path, in which ~ is the user's home, or an id on the Hub."""
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
"""A share below 1."""

STRICT = ConfigDict(strict=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


def one_of(*names: str, other: Callable[[Any], bool] = lambda value: False) -> GetPydanticSchema:
    """A check that a value is one of names that another module owns, or one that `other` accepts.

    For names in the annotation use Literal.
    """
    literal = core_schema.literal_schema(list(names))
    return GetPydanticSchema(
        lambda source, handler: core_schema.no_info_wrap_validator_function(
            lambda value, check: value if other(value) else check(value), literal
        )
    )


MAY_CHANGE = object()
"""Marks a key, or a whole section, that a resumed run may change: it decides neither the model nor what it learns."""

OF_RECIPE = object()
"""Marks a key that is no argument of a trainer."""


@dataclass(frozen=True)
class Key:
    """The metadata of one field of settings, or of settings within them, which `path` names by attributes.

    `kinds` are the kinds of data that use it, None: all do; `marks` are what its annotation says besides; `allowed` is
    the type of its values, with their limits.
    """

    name: str
    text: str
    default: Any
    is_required: bool
    kinds: tuple[str, ...] | None
    marks: tuple[Any, ...]
    allowed: Any
    path: str

    @cached_property
    def schema(self) -> dict[str, Any]:
        """Its JSON schema."""
        return _adapter(self.allowed).json_schema()

    @cached_property
    def value_in(self) -> Callable[[Any], Any]:
        """A function that gets its value from the section."""
        return attrgetter(self.path)

    @property
    def may_change(self) -> bool:
        """Whether a resumed run may change it."""
        return MAY_CHANGE in self.marks

    @property
    def keeps_null(self) -> bool:
        """Whether null is a value of its own, or an error; else it stands for the default."""
        return self.is_required or any(option.get("type") == "null" for option in self.schema.get("anyOf", ()))


def check_value(argument: str, value: Any, allowed: Any) -> None:
    """Raise UserError where the value of an argument is not of a type, which may have limits, such as `Fraction`."""
    try:
        _adapter(allowed).validate_python(value.item() if hasattr(value, "item") else value)
    except ValidationError:
        words = describe(_adapter(allowed).json_schema()).replace("null", "None")
        if isinstance(value, float) and not math.isfinite(value):
            words = words.replace("a number", "a finite number")
        raise UserError(f"{argument}={value!r}: expected {words}") from None


@functools.cache
def _adapter(allowed: Any) -> TypeAdapter[Any]:
    return TypeAdapter(allowed, config=STRICT)


class MisfitError(UserError):
    """A value that a section does not allow; the message has the path within the section, without the section's name.

    Attributes:
        path: the key, and the index within a list.
        what: what was found and what is allowed.
    """

    def __init__(self, path: tuple[str | int, ...], what: str) -> None:
        self.path, self.what = path, what
        super().__init__(f"{dotted(path)}{what}")

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.path, self.what)  # copies are made of both


def dotted(path: tuple[object, ...]) -> str:
    """A path as a user writes it: "pipeline.num_stages", "data.languages[1]"."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


class Settings(BaseModel):
    """Frozen values, checked strictly: nothing is converted, and what does not fit is a `MisfitError`."""

    model_config = ConfigDict(**STRICT, frozen=True, populate_by_name=True)

    #: The kinds of data that use its keys; None: all do, except for keys that are marked with others.
    kinds: ClassVar[tuple[str, ...] | None] = None

    def __init__(self, /, *args: Any, **values: Any) -> None:
        given = dict(zip(keys_of(type(self)), args, strict=False)) | values
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise misfit(error, type(self), given) from None

    def replace(self, **values: Any) -> Self:
        """A copy with other values of keys."""
        return type(self)(**{**vars(self), **values})


@functools.cache
def keys_of(cls: type[Settings]) -> dict[str, Key]:
    """The keys of settings by name; those of settings within them are keys too."""
    keys: dict[str, Key] = {}
    for field_name, info in cls.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Settings):
            own = keys_of(info.annotation).values()
            keys |= {key.name: replace(key, path=f"{field_name}.{key.path}") for key in own}
            continue
        name, text, marks = info.alias or field_name, " ".join((info.description or "").split()), tuple(info.metadata)
        kinds = next((mark for mark in marks if isinstance(mark, tuple)), cls.kinds)
        default = None if info.is_required() else info.get_default(call_default_factory=True)
        annotated: Any = (info.annotation, *marks, kinds)
        allowed: Any = Annotated[annotated]
        keys[name] = Key(name, text, default, info.is_required(), kinds, marks, allowed, field_name)
    return keys


def refuse_given(of_section: Settings, names: Iterable[str], why: str, error: type[UserError] = UserError) -> None:
    """Raise `error` for a key of a section that differs from its default.

    Args:
        of_section: the section.
        names: of the keys.
        why: what they are not allowed beside, and how to change that.
    """
    keys = keys_of(type(of_section))
    for name in names:
        if (value := keys[name].value_in(of_section)) != keys[name].default:
            raise error(f"{name} is {show(value)} and {why}, or leave {name} out.")


def values_in(options: Any, cls: type[Settings]) -> dict[str, Any]:
    """The values that an object has under the names of a section's keys."""
    return {name: getattr(options, name) for name in keys_of(cls) if hasattr(options, name)}


def misfit(error: ValidationError, cls: type[Settings], values: Mapping[str, Any]) -> UserError:
    """The first error that pydantic found, as a `MisfitError`; an error of a check as it was raised."""
    first = error.errors(include_url=False)[0]
    if isinstance(raised := first.get("ctx", {}).get("error"), UserError):
        return raised
    name, *within = first["loc"]
    keys = keys_of(cls)
    if name not in keys:
        return MisfitError((str(name),), f" is not one of {', '.join(keys)}{nearest(str(name), keys)}")
    schema = keys[str(name)].schema
    if first["type"] == "missing":
        return MisfitError((str(name),), f" is missing and has no default; give it {describe(schema)}.")
    value = values[str(name)]
    if all(isinstance(index, int) for index in within):  # else they name the alternatives that were tried
        for index in within:
            of_list = next(option for option in schema.get("anyOf", [schema]) if "items" in option)
            value, schema = value[index], of_list["items"]
    else:
        within = []
    hint = nearest(value, map(str, choices(schema))) if isinstance(value, str) else ""
    if value is None and not within and not keys[str(name)].is_required:
        hint = f"; leave the key out for its default, {keys[str(name)].default!r}"
    return MisfitError((str(name), *within), f": found {show(value)}, expected {describe(schema)}{hint}")
