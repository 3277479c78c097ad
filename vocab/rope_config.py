"""The rotary settings of a config.json: bases, and how frequencies are stretched for longer contexts.

Both spellings are read: transformers 4 (`rope_theta`, `rope_scaling`, in Gemma 3 `rope_local_base_freq`) and
transformers 5 (`rope_parameters`, in Gemma 3 one for each kind of layer).
"""

import math

import msgspec

from .config_reader import ConfigReader

_DEFAULT_THETA = {"mixtral": 1e6, "gemma3_text": 1e6}
_LOCAL_THETA = 1e4  # Gemma 3, layers with a window


class RopeScaling(msgspec.Struct, frozen=True):
    """How the rotary frequencies are stretched beyond the context of the training.

    `linear`: all frequencies divided by `factor`. `llama3`: the low frequencies only, as Llama 3.1 defines it,
    with a smooth passage between the wavelengths `original_max_position_embeddings / {high,low}_freq_factor`.
    `yarn` (Peng et al., 2023): the same between pairs that turn `beta_slow` and `beta_fast` times in the original
    context. `longrope` (Ding et al., 2024): each divided by its own of `factors`. The last two multiply cosines and
    sines by `attention_factor`.
    """

    rope_type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    factors: tuple[float, ...] = ()


class RopeConfig(msgspec.Struct, frozen=True):
    """`local_theta`: the base of layers with a window where they have their own, else 0; they are never stretched.

    `partial_factor`: the part of a head that is rotated. `max_positions`: the context in tokens.
    """

    theta: float
    scaling: RopeScaling | None
    local_theta: float
    partial_factor: float
    max_positions: int


def read_rope(reader: ConfigReader, family: str, head_dim: int) -> RopeConfig:
    """Raises ConfigurationError for settings that Baton does not compute."""
    max_positions = reader.positive("max_position_embeddings")
    field = "rope_parameters" if reader.get("rope_parameters", None) else "rope_scaling"
    settings = reader.below(field)
    theta, local_theta = reader.number("rope_theta", default=_DEFAULT_THETA.get(family, 1e4)), 0.0
    if family == "gemma3_text":
        local_theta = reader.number("rope_local_base_freq", default=_LOCAL_THETA)
        if settings.has("sliding_attention") or settings.has("full_attention"):
            local = settings.below("sliding_attention")
            local.require_only("rope_type", ("default",))
            local_theta = local.number("rope_theta", default=local_theta)
            settings = settings.below("full_attention")
    theta = settings.number("rope_theta", default=theta)
    partial = _partial_factor(reader, settings, family, head_dim)
    scaling = _scaling(reader, settings, family, max_positions, int(head_dim * partial))
    if scaling is not None and scaling.rope_type == "longrope":
        # Longer texts have other factors, for the keys in the cache too: what is cached could not be used again.
        max_positions = min(max_positions, scaling.original_max_position_embeddings)
    return RopeConfig(theta, scaling, local_theta, partial, max_positions)


def _partial_factor(reader: ConfigReader, settings: ConfigReader, family: str, head_dim: int) -> float:
    field = "partial_rotary_factor"
    holder = settings if settings.get(field, None) is not None else reader
    factor = holder.number(field, default=1.0)
    if factor != 1 and family != "phi3":
        holder.refuse(field, "only 1 is supported in this family")
    if factor > 1 or int(head_dim * factor) % 2 or not int(head_dim * factor):
        holder.refuse(field, f"an even part of head_dim {head_dim} is needed")
    return factor


def _scaling(
    reader: ConfigReader, settings: ConfigReader, family: str, max_positions: int, rotary_dim: int
) -> RopeScaling | None:
    # Transformers 4 wrote `type` before it wrote `rope_type`, and Phi-3 `su` before `longrope`.
    key = "rope_type" if settings.has("rope_type") else "type"
    long = ("longrope", "su") if family == "phi3" else ()
    match settings.choice(key, ("default", "linear", "llama3", "yarn", *long), default="default"):
        case "default":
            return None
        case "linear":
            return RopeScaling("linear", settings.number("factor"))
        case "llama3":
            return RopeScaling(
                "llama3",
                settings.number("factor"),
                low_freq_factor=settings.number("low_freq_factor"),
                high_freq_factor=settings.number("high_freq_factor"),
                original_max_position_embeddings=settings.positive("original_max_position_embeddings"),
            )
        case "yarn":
            return _yarn(settings)
        case _:
            return _longrope(reader, settings, max_positions, rotary_dim)


def _yarn(settings: ConfigReader) -> RopeScaling:
    for field in ("mscale", "mscale_all_dim"):  # DeepSeek's variants of the attention factor
        if settings.get(field, 0):
            settings.refuse(field, "only 0 is supported")
    factor = settings.number("factor")
    return RopeScaling(
        "yarn",
        factor,
        original_max_position_embeddings=settings.positive("original_max_position_embeddings"),
        attention_factor=settings.number("attention_factor", default=0.1 * math.log(factor) + 1 if factor > 1 else 1),
        beta_fast=settings.number("beta_fast", default=32),
        beta_slow=settings.number("beta_slow", default=1),
        truncate=settings.flag("truncate", default=True),
    )


def _longrope(reader: ConfigReader, settings: ConfigReader, max_positions: int, rotary_dim: int) -> RopeScaling:
    field = "original_max_position_embeddings"
    original = (settings if settings.has(field) else reader).positive(field)
    stretch = settings.number("factor", default=max_positions / original)
    by_length = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return RopeScaling(
        "longrope",
        stretch,
        original_max_position_embeddings=original,
        attention_factor=settings.number("attention_factor", default=by_length),
        factors=settings.numbers("short_factor", rotary_dim // 2),
    )
