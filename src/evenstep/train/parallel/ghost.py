"""What stands, on one pipeline stage, for a tensor that another stage has.

Code between the units of a model runs on every stage. On a Ghost it computes nothing, but shapes and dtypes can
be asked for; what is made of it is a Ghost again, so one that reaches a place where it is needed can be named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from evenstep.errors import UsageError
from evenstep.train.batch import map_tensors
from evenstep.train.batch import tensors as tensors_in


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ABOUT = _names(
    "shape dtype layout ndim is_cuda is_cpu is_meta is_sparse is_quantized itemsize nbytes names requires_grad is_leaf "
    "grad_fn size dim ndimension numel nelement stride element_size is_floating_point is_complex is_contiguous __len__ "
    "get_device storage_offset is_signed is_inference is_same_size"
)
"""Questions that no value is needed for."""

_FRESH = _names(
    "new_zeros new_ones new_full new_empty new_tensor zeros_like ones_like full_like empty_like rand_like randn_like "
    "randint_like"
)
"""Tensors that take nothing but shape, dtype or device from another."""

_CONVERTING = _names("to type_as expand_as view_as reshape_as")
"""These, of a tensor that is here, take the shape or dtype of another."""

_READING = _names(
    "__bool__ __float__ __int__ __index__ __complex__ __contains__ __array__ item tolist numpy cpu is_nonzero equal "
    "allclose nonzero unique masked_select bincount"
)
"""What cannot be known without the values."""

_ONE_TENSOR = _names(
    "add sub mul div pow neg __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ "
    "__rdiv__ __neg__ __pow__ __matmul__ matmul relu gelu silu tanh sigmoid softmax mean sum to float half bfloat16 "
    "double type contiguous clone detach view reshape flatten permute transpose unsqueeze squeeze expand __getitem__ "
    "linear layer_norm group_norm rms_norm normalize interpolate pad cat stack where masked_fill"
)
"""Functions that draw nothing and return one tensor: computed when somebody asks for the shape, which is seldom."""

_DRAWING = _names("bernoulli_ normal_ uniform_ random_ exponential_ geometric_ log_normal_ cauchy_")
"""Of what changes a ghost in place: what must draw as many random numbers as it does for the tensor."""

_INPLACE = _names("__iadd__ __isub__ __imul__ __idiv__ __itruediv__ __ifloordiv__ __ipow__ __imod__ __iand__ __ior__")


class Ghost(Tensor):
    """A tensor that lies on another stage, or is computed from one. `source` says which that is."""

    source: str
    place: torch.device
    made: Tensor | Callable[[], Tensor]  # empty memory in its shape; or what makes it

    @staticmethod
    def of(source: str, place: torch.device, made: Tensor | Callable[[], Tensor]) -> Ghost:
        new = torch.empty(0).as_subclass(Ghost)
        new.source, new.place, new.made = source, place, made
        return new

    def stand_in(self) -> Tensor:
        """A tensor of the same shape, dtype and device, with any values."""
        if not isinstance(self.made, Tensor):
            self.made = self.made()
        return self.made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = function_name(func)
        found = find((args, kwargs))
        assert found is not None
        if name == "device":
            return found.place
        if name == "__repr__":
            return f"<a tensor on another stage, from {found.source}>"
        here = bool(args) and isinstance(args[0], Tensor) and not isinstance(args[0], Ghost)
        if name in _READING or (name == "__getitem__" and _by_mask(args[1])):
            raise UsageError(
                f"a value of {found.source}, which lies on another stage, is read ({name})",
                do="let the loss depend on the model's output alone, and read values inside modules; or cut the model "
                "elsewhere (run.prepare(model, stages=[...]))",
            )
        if (here and _writes(name)) or kwargs.get("out") is not None:
            raise UsageError(
                f"{found.source}, which lies on another stage, is written into a tensor ({name})",
                do="compute a new tensor, inside a module",
            )

        def compute() -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*map_tensors(args, _stand_in), **map_tensors(kwargs, _stand_in))

        if _writes(name):
            if name in _DRAWING:
                compute()
            return args[0]

        if name in ABOUT or name in _FRESH or (here and name in _CONVERTING):
            return compute()
        if name in _ONE_TENSOR:
            return Ghost.of(found.source, found.place, compute)
        return map_tensors(compute(), lambda leaf: Ghost.of(found.source, found.place, leaf))


def take_apart(nest: Any, tensors: list[Tensor], where: str) -> list[Any]:
    """The structure of `nest` as JSON; its tensors are added to `tensors`, each once. UsageError for other things."""
    if isinstance(nest, Tensor):
        at = next((k for k, known in enumerate(tensors) if known is nest), len(tensors))
        if at == len(tensors):
            tensors.append(nest)
        return ["tensor", at]
    if nest is None or type(nest) in (bool, int, float, str):
        return ["value", nest]
    if type(nest) in (list, tuple):
        return [type(nest).__name__, [take_apart(value, tensors, where) for value in nest]]
    if type(nest) is dict and all(type(key) is str for key in nest):
        return ["dict", {key: take_apart(value, tensors, where) for key, value in nest.items()}]
    raise UsageError(
        f"{where} is, or holds, a {type(nest).__name__}, which cannot be told to another stage",
        do="use tensors, numbers, lists, tuples and dicts between the modules where the model is cut",
    )


def put_together(structure: list[Any], tensors: Sequence[Any]) -> Any:
    """The nest that `take_apart` made `structure` of, with these tensors."""
    kind, content = structure
    if kind == "tensor":
        return tensors[content]
    if kind == "value":
        return content
    if kind == "dict":
        return {key: put_together(value, tensors) for key, value in content.items()}
    values = [put_together(value, tensors) for value in content]
    return values if kind == "list" else tuple(values)


def find(nest: Any) -> Ghost | None:
    """The first ghost in a nest; None if there is none."""
    return next((tensor for tensor in tensors_in(nest) if isinstance(tensor, Ghost)), None)


def function_name(func: Callable[..., Any]) -> str:
    name: str = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):  # an attribute
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return name


def is_question(func: Callable[..., Any]) -> bool:
    """Whether the function, of a tensor, needs none of its values."""
    name = function_name(func)
    attribute = getattr(func, "__name__", "") == "__get__" and name not in (
        "data",
        "T",
        "mT",
        "H",
        "mH",
        "real",
        "imag",
    )
    return attribute or name in ABOUT or name in ("__hash__", "__repr__", "__format__", "register_hook", "data_ptr")


def _writes(name: str) -> bool:
    inplace = name.endswith("_") and not name.endswith("__")
    return inplace or name in ("__setitem__", "__set__") or name in _INPLACE


def _by_mask(index: Any) -> bool:
    return any(isinstance(leaf, Ghost) and leaf.dtype in (torch.bool, torch.uint8) for leaf in tensors_in(index))


def _stand_in(leaf: Tensor) -> Tensor:
    if isinstance(leaf, Ghost):
        return leaf.stand_in()
    return blank(leaf.shape, leaf.dtype, torch.device("cpu")) if leaf.is_meta else leaf


def blank(shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor whose values do not count. Memory that is not touched costs nothing."""
    if dtype.is_floating_point:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.zeros(shape, dtype=dtype, device=device)  # whole numbers may be used as indices
