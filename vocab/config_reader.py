"""ConfigReader: typed access to the fields of a config.json; whatever is wrong is refused by name."""

from pathlib import Path
from typing import Any, NoReturn

from ..core.errors import ConfigurationError

DTYPES = ("float32", "float16", "bfloat16")


class ConfigReader:
    """Typed access to one JSON object; errors name the file, the field and its value. null means absent."""

    def __init__(self, path: Path, raw: dict[str, Any], prefix: str = ""):
        self.path = path
        self._raw = raw
        self._prefix = prefix

    def has(self, field: str) -> bool:
        """Whether the field is there, null or not."""
        return field in self._raw

    def get(self, field: str, default: Any) -> Any:
        value = self._raw.get(field)
        return default if value is None else value

    def below(self, field: str) -> "ConfigReader":
        """The object in a field; an empty one if it is absent."""
        value = self.get(field, {})
        if not isinstance(value, dict):
            self.refuse(field, "it must be an object")
        return ConfigReader(self.path, value, prefix=f"{self._prefix}{field}.")

    def refuse(self, field: str, why: str) -> NoReturn:
        value = repr(self._raw.get(field))
        shown = value if len(value) <= 80 else value[:77] + "..."
        raise ConfigurationError(
            f"{self.path}: {self._prefix}{field} is {shown}: {why}. "
            "Choose another model, or run this one with a server that supports it."
        )

    def require_only(self, field: str, allowed: tuple[Any, ...]) -> None:
        if self.get(field, allowed[0]) not in allowed:
            self.refuse(field, f"only {allowed[0]!r} is supported")

    def choice(self, field: str, allowed: tuple[str, ...], default: str = "") -> str:
        value = self.get(field, default)
        if value not in allowed:
            self.refuse(field, f"supported are {', '.join(allowed)}")
        return str(value)

    def positive(self, field: str, default: int = 0) -> int:
        value = self.get(field, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            self.refuse(field, "a positive whole number is needed")
        return int(value)

    def number(self, field: str, default: float = 0.0) -> float:
        value = self.get(field, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            self.refuse(field, "a positive number is needed")
        return float(value)

    def flag(self, field: str, default: bool = False) -> bool:
        value = self.get(field, default)
        if not isinstance(value, bool):
            self.refuse(field, "true or false is needed")
        return bool(value)

    def numbers(self, field: str, count: int) -> tuple[float, ...]:
        value = self.get(field, [])
        if not isinstance(value, list) or len(value) != count or not all(_is_positive(item) for item in value):
            self.refuse(field, f"a list of {count} positive numbers is needed")
        return tuple(map(float, value))

    def whole_numbers(self, field: str) -> tuple[int, ...]:
        """A list of numbers from 0 on, such as of layers."""
        value = self.get(field, [])
        if not isinstance(value, list) or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in value):
            self.refuse(field, "a list of whole numbers is needed")
        return tuple(value)

    def token_ids(self, field: str) -> tuple[int, ...]:
        value = self.get(field, [])
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            self.refuse(field, "a token id or a list of them is needed")
        return tuple(ids)

    def dtype(self) -> str:
        field = "dtype" if self.get("dtype", None) else "torch_dtype"
        return self.choice(field, DTYPES, default="float32")


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
