"""Running programs nobody has read: contained, limited, in parallel.

>>> with Sandbox(workers=1) as sandbox:
...     sandbox.run("print(int(input()) + 1)", stdin="41").stdout
'42\\n'
"""

from tether.llm.sandbox.backends import Backend
from tether.llm.sandbox.programs import Execution, Program, Status
from tether.llm.sandbox.sandbox import Sandbox, available_backend

__all__ = ["Backend", "Execution", "Program", "Sandbox", "Status", "available_backend"]
