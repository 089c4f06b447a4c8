"""Which modules of a sharded model gather their parameters by themselves; the rest belongs to the whole model."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from evenstep.errors import UsageError

SMALLEST = 1 << 16  # elements of a block that is worth exchanges of its own

_LISTS = (nn.ModuleList, nn.ModuleDict)
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of dimensions


def cut(model: nn.Module, asked: Sequence[str] | None) -> list[tuple[str, nn.Module]]:
    """The modules by name, outer ones before those inside them.

    They are those `asked` for (a list stands for its entries), or the blocks: entries of some size in a Sequential, or
    in a ModuleList that its module's code loops over. A module that is not called for every micro-batch must not be
    among them, and where that cannot be seen, it is not.
    """
    chosen = _asked(model, asked) if asked is not None else list(_blocks(model, ""))
    outside = _shared(model, chosen)
    if asked is not None and outside:
        raise UsageError(
            f"{outside[0]} shares a parameter with modules outside of it, so it cannot be sharded by itself",
            do=f"leave {outside[0]} out of prepare(..., shard=[...])",
        )
    return [(name, module) for name, module in chosen if name not in outside]


def _asked(model: nn.Module, names: Sequence[str]) -> list[tuple[str, nn.Module]]:
    if isinstance(names, str):
        raise UsageError(f"shard={names!r}, expected a list of names of modules", do=f"shard=[{names!r}]")
    modules = dict(model.named_modules())
    found: dict[str, nn.Module] = {}
    for name in names:
        module = modules.get(name)
        if module is None or not name:
            there = ", ".join(list(modules)[1:9])
            raise UsageError(
                f"shard={name!r} names no module inside the {type(model).__name__}", do=f"there are {there}, ..."
            )
        if isinstance(module, _LISTS):
            found.update((f"{name}.{inner}", entry) for inner, entry in module.named_children())
        else:
            found[name] = module
    with_parameters = [(n, m) for n, m in found.items() if next(m.parameters(), None) is not None]
    return sorted(with_parameters, key=lambda item: list(modules).index(item[0]))


def _blocks(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Those inside `module`, which is called for every micro-batch."""
    if isinstance(module, nn.Sequential):
        if type(module).forward is nn.Sequential.forward:
            yield from _entries(module, prefix)
        return
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            if _loops_over(type(module), name):
                yield from _entries(child, f"{prefix}{name}.")
        elif not isinstance(child, nn.ModuleDict) and not _only_sometimes(type(module), name):
            yield from _blocks(child, f"{prefix}{name}.")


def _entries(container: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    children = dict(container.named_children())
    alike = len(children) > 1 and len({type(child) for child in children.values()}) == 1
    for name, child in children.items():
        if isinstance(child, _LISTS):
            continue
        inside = list(_blocks(child, f"{prefix}{name}."))
        if (alike or not inside) and sum(p.numel() for p in child.parameters()) >= SMALLEST:
            yield f"{prefix}{name}", child  # the blocks inside one of several alike are no blocks of their own
        else:
            yield from inside


def _loops_over(kind: type, name: str) -> bool:
    """Whether a method of the class loops over `self.NAME` and uses every entry. False where it has no source."""

    def loops(node: ast.AST) -> bool:
        if isinstance(node, ast.comprehension):
            return any(_is_own(inner, name) for inner in ast.walk(node.iter))
        if not isinstance(node, ast.For) or not any(_is_own(inner, name) for inner in ast.walk(node.iter)):
            return False
        entries = {inner.id for inner in ast.walk(node.target) if isinstance(inner, ast.Name)}
        return _always(node.body, lambda n: isinstance(n, ast.Name) and n.id in entries)

    return any(_always(body, loops) for body in _methods(kind))


def _only_sometimes(kind: type, name: str) -> bool:
    """Whether the methods of the class use `self.NAME` under conditions alone."""
    bodies = [body for body in _methods(kind) if any(_is_own(node, name) for line in body for node in ast.walk(line))]
    return bool(bodies) and not any(_always(body, lambda node: _is_own(node, name)) for body in bodies)


def _is_own(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == name


def _always(lines: Sequence[ast.stmt], wanted: Callable[[ast.AST], bool]) -> bool:
    """Whether code that runs in any case has such a node."""
    for line in lines:
        inside = getattr(line, "body", None)
        if wanted(line):
            return True
        if isinstance(line, ast.If):
            if any(map(wanted, ast.walk(line.test))) or (_always(line.body, wanted) and _always(line.orelse, wanted)):
                return True
            if any(isinstance(node, (ast.Continue, ast.Break)) for node in ast.walk(line)):
                return False  # what follows is left out now and then
        elif isinstance(inside, list):
            if _always(inside, wanted):
                return True
        elif any(map(wanted, ast.walk(line))):
            return True
    return False


def _methods(kind: type) -> Iterator[list[ast.stmt]]:
    """The code of each method but __init__, of the class and those it is made from."""
    for base in kind.__mro__:
        if base is nn.Module:
            return
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name != "__init__":
                yield node.body


def _shared(model: nn.Module, chosen: Sequence[tuple[str, nn.Module]]) -> list[str]:
    """The chosen modules with a parameter that a module outside of them has, too."""
    holders: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            holders.setdefault(id(p), []).append(module)
    found = []
    for name, module in chosen:
        inside = set(module.modules())
        if any(not inside.issuperset(holders[id(p)]) for p in module.parameters()):
            found.append(name)
    return found


def check_shardable(model: nn.Module) -> None:
    """UsageError, by name, for what cannot be sharded."""
    if isinstance(model, _LISTS):
        raise UsageError(
            f"a {type(model).__name__} has no forward of its own and cannot be sharded",
            do="put it into a module with a forward, and prepare that",
        )
    for name, p in model.named_parameters():
        what = do = ""
        if p.dim() == 0:
            what, do = "has no dimension to cut along", "give it the shape (1,)"
        elif p.is_complex():
            what, do = "is complex", "keep its real and imaginary parts (torch.view_as_real)"
        elif (
            p.dim() in _CHANNELS_LAST
            and not p.is_contiguous()
            and p.is_contiguous(memory_format=_CHANNELS_LAST[p.dim()])
        ):
            what, do = "has its channels last in memory", "leave channels_last out with --shard"
        elif not p.is_contiguous():
            what, do = "is not contiguous in memory", "make it from x.contiguous()"
        if what:
            raise UsageError(f"{name} cannot be sharded: it {what}", do=f"{do}, or run without --shard")
