"""The settings that a worker tells of: those of the roles it is given requests for. Pure; sim/ tells the same."""

from collections.abc import Mapping

from ..core.messages import Role


def settings_of(roles: Mapping[Role, Mapping[str, int]]) -> dict[str, int]:
    """Name |-> value. A name that several roles have gets its role's in front, but for the first of them."""
    settings: dict[str, int] = {}
    for role, its in roles.items():
        for name, value in its.items():
            settings[f"{role} {name}" if name in settings else name] = value
    return settings
