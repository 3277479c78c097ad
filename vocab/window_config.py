"""Which layers see only a window of their context: each family of models says it in another way.

A window of w: a token sees itself and the w - 1 tokens before it.
"""

from .config_reader import ConfigReader

_SLIDING, _FULL = "sliding_attention", "full_attention"


def read_windows(reader: ConfigReader, family: str, num_layers: int) -> tuple[int, ...]:
    """The window of each layer, 0 for none. Raises ConfigurationError where a config contradicts itself."""
    window = _window(reader, family)
    sliding = _named_layers(reader, num_layers)
    if sliding is None:
        sliding = _layers_by_rule(reader, family, num_layers, window)
    elif family in ("mistral", "mixtral", "phi3", "qwen3_moe", "llama") and any(on != bool(window) for on in sliding):
        reader.refuse("layer_types", f"in this family all layers are alike, and their window is {window or None}")
    if any(sliding) and not window:
        reader.refuse("layer_types", "sliding_attention needs a sliding_window, and there is none or it is off")
    return tuple(window if is_sliding else 0 for is_sliding in sliding)


def _window(reader: ConfigReader, family: str) -> int:
    """0: no layer has one."""
    if family == "llama":
        if reader.get("sliding_window", None) is not None:
            reader.refuse("sliding_window", "this family has no windows")
        return 0
    if family.startswith("qwen"):
        if not reader.flag("use_sliding_window"):
            return 0
        if family == "qwen3_moe":
            reader.refuse("use_sliding_window", "only false is supported for this family")
        return reader.positive("sliding_window", default=4096)
    if reader.flag("use_sliding_window", default=True) is False:
        reader.refuse("use_sliding_window", "this family has no such switch")
    absent = 0 if family in ("mixtral", "phi3") or reader.has("sliding_window") else 4096
    return absent if reader.get("sliding_window", None) is None else reader.positive("sliding_window")


def _named_layers(reader: ConfigReader, num_layers: int) -> list[bool] | None:
    """By `layer_types`: which layers have a window; None without that field."""
    kinds = reader.get("layer_types", None)
    if kinds is None:
        return None
    if not isinstance(kinds, list) or any(kind not in (_SLIDING, _FULL) for kind in kinds):
        reader.refuse("layer_types", f"a list of {_FULL} and {_SLIDING} is needed")
    if len(kinds) != num_layers:
        reader.refuse("layer_types", f"there are {num_layers} layers")
    return [kind == _SLIDING for kind in kinds]


def _layers_by_rule(reader: ConfigReader, family: str, num_layers: int, window: int) -> list[bool]:
    match family:
        case "gemma2":  # every other one, from the first
            return [i % 2 == 0 for i in range(num_layers)]
        case "gemma3_text":  # all but the last of each group
            group = reader.positive("sliding_window_pattern", default=6)
            return [(i + 1) % group != 0 for i in range(num_layers)]
        case "qwen2" | "qwen3":
            if not window:
                return [False] * num_layers
            first = reader.get("max_window_layers", 28)
            if isinstance(first, bool) or not isinstance(first, int) or first < 0:
                reader.refuse("max_window_layers", "a whole number is needed")
            return [i >= first for i in range(num_layers)]
    return [bool(window)] * num_layers
