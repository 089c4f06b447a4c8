"""Options of `evenstep run` that leave the launch to something else: a Slurm or a Kubernetes cluster."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from evenstep.errors import UsageError

Verb = TypeVar("Verb", bound=Callable[..., Any])


def given(ctx: click.Context, name: str) -> bool:
    """Whether an option stands on the command line."""
    return ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE


class Elsewhere:
    """`flag` (`--slurm`) asks for it. Its `options` are no arguments of the verb and go with the flag only, but for
    those of `alone`; `refused` ones of the verb do not go with it, `why` says the reason."""

    def __init__(self, flag: str, *, refused: Collection[str], why: str, alone: Collection[str] = ()) -> None:
        self.flag = flag
        self._refused, self._why, self._alone = refused, why, alone
        self._options: list[Callable[..., Any]] = []

    def option(self, *names: str, **rest: Any) -> None:
        """Declare an option, as by click.option."""
        self._options.append(click.option(*names, expose_value=False, callback=self._keep, **rest))

    def _keep(self, ctx: click.Context, param: click.Parameter, value: object) -> None:
        ctx.meta.setdefault(self._place, {})[param.name] = value

    @property
    def _place(self) -> str:
        return f"evenstep{self.flag}"

    def options(self, verb: Verb) -> Verb:
        """Give a verb the options."""
        for option in reversed(self._options):
            verb = option(verb)
        return verb

    @property
    def said(self) -> Mapping[str, Any]:
        """The values of the options, in a call of the verb."""
        values: Mapping[str, Any] = click.get_current_context().meta[self._place]
        return values

    def is_asked(self) -> bool:
        """Whether the flag was given. UsageError for its options without it."""
        if self.said[_name(self.flag)]:
            return True
        ctx = click.get_current_context()
        for name in self.said:
            if name not in self._alone and given(ctx, name):
                raise UsageError(f"{_spelled(name)} is for {self.flag}, which was not given", do="give both")
        return False

    def refuse_others(self) -> None:
        """UsageError for options of the verb that do not go with it."""
        ctx = click.get_current_context()
        for name in self._refused:
            if given(ctx, name):
                raise UsageError(f"{_spelled(name)} goes without {self.flag}{self._why}", do="leave it out")


def _name(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"
