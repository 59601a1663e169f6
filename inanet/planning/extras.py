"""The optional packages of the planner, imported when they are first needed."""

import importlib
from types import ModuleType

from inanet.service.exits import extra


def plan_extra(module: str, what: str) -> ModuleType:
    """Import ``module`` for ``what``. Raises ``ImportError`` with the command that installs it, its ``name`` set."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f"{what} needs {package}, which cannot be imported ({error}): {extra('plan')}",
            name=package,
        ) from error
