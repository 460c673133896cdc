"""Every flag of a run: declared once, parsed, derived, checked together before anything starts.

    from miles.arguments import Args, make_args, parse_args

Importing this package imports neither torch nor transformers nor ray.
"""

from miles.arguments.args import Args
from miles.arguments.parse import make_args, parse_args
from miles.arguments.parser import ArgumentsError

__all__ = ["Args", "ArgumentsError", "make_args", "parse_args"]
