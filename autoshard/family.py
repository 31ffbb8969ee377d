"""Modules that have their first call together: one plan for all of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from torch import nn


class Several(nn.Module):
    """Those with which one function computes. Holds the members under their numbers, so that what takes a model can take them. It is never
    called."""

    def __init__(self, members: Iterable[nn.Module]) -> None:
        super().__init__()
        for number, member in enumerate(members):
            self.add_module(str(number), member)


class Family(Several):
    """Of one class, compiled one by one, as the blocks of a deep model are. Being alike after the first call they have one graph, which
    Dynamo compiles for the first and finds again for the others."""


def members_of(model: nn.Module) -> list[nn.Module]:
    """What the user knows of `model`: the members of several, or itself."""
    return list(model.children()) if isinstance(model, Several) else [model]


def used_in(model: nn.Module, used: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters that a first graph used; in a family every member uses those that the first one did, and those which that one
    has not."""
    if not isinstance(model, Family):
        return list(used)
    ids = [id(p) for p in used]
    for member in model.children():
        names = {id(p): name for name, p in member.named_parameters()}
        found = [names[i] for i in ids if i in names]
        if found:
            return [p for other in model.children() for p in _alike(other, found, names.values())]
    return list(used)


def _alike(member: nn.Module, used: Sequence[str], known: Collection[str]) -> list[nn.Parameter]:
    """Of a member: the parameters of the names that are used, in that order, and those of names that are not known."""
    own = dict(member.named_parameters())
    return [own[name] for name in used if name in own] + [p for name, p in own.items() if name not in known]
