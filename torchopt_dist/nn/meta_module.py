"""A module with parameters of its own, and with meta-parameters that were passed to its constructor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Self

from torch import Tensor, nn

from torchopt_dist import pytree
from torchopt_dist.core.types import TensorContainer
from torchopt_dist.nn import _tensor_dicts

__all__ = ["MetaGradientModule"]


class MetaGradientModule(nn.Module):
    """A module that distinguishes its own parameters from those that were passed to its constructor.

    A tensor that requires grad, or a module, becomes a meta-parameter or meta-module if it is an argument of the
    constructor and is assigned to an attribute. ``parameters()``, ``modules()`` and ``state_dict()`` leave it out, and
    so does an inner optimizer made from them; :meth:`meta_parameters` has it, for the outer optimizer.

    Example:
        >>> import torch
        >>> class Inner(MetaGradientModule):
        ...     def __init__(self, meta):
        ...         super().__init__()
        ...         self.meta = meta
        ...         self.own = torch.nn.Linear(1, 1)
        >>> inner = Inner(torch.nn.Linear(2, 2))
        >>> [name for name, _ in inner.named_parameters()]
        ['own.weight', 'own.bias']
        >>> [name for name, _ in inner.named_meta_parameters()]
        ['meta.weight', 'meta.bias']
    """

    _given: dict[int, Any]
    _meta_parameters: TensorContainer
    _meta_modules: dict[str, nn.Module | None]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Remember the arguments of the constructor."""
        self = super().__new__(cls)
        arguments: Any = [args, kwargs]
        given: dict[int, Any] = {}
        for leaf in pytree.flatten(arguments)[0]:
            if isinstance(leaf, nn.Module):
                given[id(leaf)] = leaf
                given |= {id(parameter): parameter for parameter in leaf.parameters()}
            elif isinstance(leaf, Tensor) and leaf.requires_grad:
                given[id(leaf)] = leaf
        vars(self).update(_given=given, _meta_parameters={}, _meta_modules={})
        return self

    def register_meta_parameter(self, name: str, param: Tensor | None) -> None:
        """Register a tensor as a meta-parameter under a name, whether or not it was given to the constructor.

        Raises:
            TypeError: ``param`` is neither a tensor that requires grad nor ``None``.
            AttributeError: ``super().__init__()`` has not been called.
            KeyError: there is something else of that name, or the name is empty or has a dot in it.
        """
        if param is not None and not (isinstance(param, Tensor) and param.requires_grad):
            raise TypeError(f"meta-parameter {name!r} must be a tensor that requires grad, got {param!r:.80}")
        self._check_initialized("meta-parameter", name)
        self._check_name(name, self._meta_parameters)
        self._meta_parameters[name] = param

    def register_meta_module(self, name: str, module: nn.Module | None) -> None:
        """Register a module as a meta-module under a name, whether or not it was given to the constructor.

        Raises:
            TypeError: ``module`` is neither a module nor ``None``.
            AttributeError: ``super().__init__()`` has not been called.
            KeyError: there is something else of that name, or the name is empty or has a dot in it.
        """
        if module is not None and not isinstance(module, nn.Module):
            raise TypeError(f"meta-module {name!r} must be a module, got {type(module).__name__}")
        self._check_initialized("meta-module", name)
        self._check_name(name, self._meta_modules)
        self._meta_modules[name] = module

    def add_meta_module(self, name: str, module: nn.Module | None) -> None:
        """The same as :meth:`register_meta_module`, as ``add_module`` is ``register_module``."""
        self.register_meta_module(name, module)

    def meta_parameters(self, recurse: bool = True) -> Iterator[Tensor]:
        """Every meta-parameter once, those of meta-modules included."""
        for _, parameter in self.named_meta_parameters(recurse=recurse):
            yield parameter

    def named_meta_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Every meta-parameter once, with its name.

        Args:
            prefix: a text that is put before the names.
            recurse: whether to include those of meta-modules and of sub-modules.
        """
        seen: set[int] = set()
        parts = self.named_modules(prefix=prefix) if recurse else [(prefix, self)]
        for path, part in parts:
            if not isinstance(part, MetaGradientModule):
                continue
            start = f"{path}." if path else ""
            found = [(start + name, tensor) for name, tensor in part._meta_parameters.items()]
            if recurse:
                for name, module in part._meta_modules.items():
                    found += [] if module is None else list(module.named_parameters(prefix=start + name))
            for name, tensor in found:
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield name, tensor

    def meta_children(self) -> Iterator[nn.Module]:
        """The meta-modules themselves."""
        for _, module in self.named_meta_children():
            yield module

    def named_meta_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The meta-modules themselves, with their names."""
        for name, module in self._meta_modules.items():
            if module is not None:
                yield name, module

    def meta_modules(self) -> Iterator[nn.Module]:
        """The meta-modules and all modules in them, each once."""
        for _, module in self.named_meta_modules():
            yield module

    def named_meta_modules(self, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
        """The meta-modules and all modules in them, each once, with their names."""
        memo: set[nn.Module] = set()
        for name, child in self.named_meta_children():
            yield from child.named_modules(memo, f"{prefix}.{name}" if prefix else name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_given" not in vars(self) or name in ("_given", "_meta_parameters", "_meta_modules"):
            object.__setattr__(self, name, value)
            return
        is_meta = self._is_meta(name, value)
        for names in (self._meta_parameters, self._meta_modules):
            names.pop(name, None)
        if not is_meta:
            super().__setattr__(name, value)
            return
        self._check_initialized("meta-module" if isinstance(value, nn.Module) else "meta-parameter", name)
        if name not in vars(self):
            with suppress(AttributeError):  # there is no such parameter, buffer or module
                super().__delattr__(name)
        if isinstance(value, nn.Module):
            self.register_meta_module(name, value)
        else:
            self.register_meta_parameter(name, value)

    def __getattr__(self, name: str) -> Any:
        for names in ("_meta_parameters", "_meta_modules"):
            held = vars(self).get(names, {})
            if name in held:
                return held[name]
        return super().__getattr__(name)

    def __delattr__(self, name: str) -> None:
        for names in (self._meta_parameters, self._meta_modules):
            if name in names:
                del names[name]
                return
        super().__delattr__(name)

    def __dir__(self) -> list[str]:
        inherited: Any = super().__dir__
        return sorted({*inherited(), *self._meta_parameters, *self._meta_modules})

    def _is_meta(self, name: str, value: Any) -> bool:
        if isinstance(value, nn.Module):
            own = [id(parameter) in self._given for parameter in value.parameters()]
            if any(own) and not all(own) and id(value) not in self._given:
                raise ValueError(
                    f"the module assigned to {name!r} must have parameters that were all given to the constructor, "
                    f"or none; {sum(own)} of {len(own)} were"
                )
            return id(value) in self._given or any(own)
        return isinstance(value, Tensor) and id(value) in self._given

    def _check_initialized(self, what: str, name: str) -> None:
        if "_parameters" not in vars(self):
            raise AttributeError(
                f"cannot assign {what} before Module.__init__() call: call `super().__init__()` before you assign "
                f"{name!r}"
            )

    def _check_name(self, name: str, mine: dict[str, Any]) -> None:
        if not name or "." in name:
            raise KeyError(f"a name must not be empty, nor have a dot in it, got {name!r}")
        if name not in mine and (name in vars(self) or hasattr(self, name)):
            raise KeyError(f"there is an attribute {name!r} already")

    def _meta_containers(self) -> list[TensorContainer]:
        """The live dicts of meta-parameters, those of meta-modules among them."""
        found: list[TensorContainer] = []
        for part in self.modules():
            if isinstance(part, MetaGradientModule):
                found.append(part._meta_parameters)
                for module in part.meta_children():
                    found += _tensor_dicts.parameter_containers(module.modules())
        return found

    def _own_containers(self) -> list[TensorContainer]:
        return _tensor_dicts.parameter_containers(self.modules())
