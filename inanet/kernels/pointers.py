"""Memory addresses as pointers, because kernels cannot take as many arrays as there are ranks."""

from typing import Any

from numba import types
from numba.extending import intrinsic


def pointer_to(element: Any) -> Any:
    """A compiled function that makes an address, int64 or uint64, a pointer to elements of a type."""

    @intrinsic
    def pointer(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(address), generate

    return pointer
