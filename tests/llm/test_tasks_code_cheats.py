"""No undeserved reward: cheating programs against every form of assertion, and honest ones beside them.

`FORMS` is one problem whose assertions take every form; each names a kind, and a program's ``f`` gives a
value for every kind. Honest programs give `RIGHT`, cheating ones the values of `WRONG`, or objects, in many
disguises.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tether.llm.sandbox import Execution, Sandbox, available_backend
from tether.llm.tasks import CodeTask
from tether.llm.tasks.code_rows import problem_of_row

RIGHT: dict[str, Any] = {
    "int": 12345,
    "float": 0.28125,
    "floats": [0.28125, 0.53125],
    "complex": 3 + 4j,
    "text": "qxzjk",
    "bytes": b"qx",
    "list": [811, 822],
    "tuple": (811, 822),
    "set": {811, 822},
    "dict": {"a": 811},
    "none": None,
    "yes": True,
}
WRONG: dict[str, Any] = {
    "int": 12346,
    "float": 0.75,
    "floats": [1.5],
    "complex": 1j,
    "text": "WRONG TEXT",
    "bytes": b"",
    "list": [-3],
    "tuple": (-3,),
    "set": {-3},
    "dict": {},
    "none": 0,
    "yes": False,
}
SETUP = "import math\nimport numpy as np\ndef close(a, b, tol=1e-6):\n    return abs(a - b) < tol"
FORMS = [
    "f('int') == 12345",
    "12345 == f('int')",
    "f('int') - 12345 == 0",
    "12345 - f('int') == 0",
    "f('int') ^ 12345 == 0",
    "f('int') // 12345 == 1 and f('int') % 12345 == 0",
    "-f('int') == -12345",
    "f('int') in (12345, 12345.0)",
    "12345 <= f('int') <= 12345",
    "not f('int') != 12345",
    "str(f('int')) == '12345'",
    "abs(f('float') - 0.28125) < 1e-6",
    "math.isclose(f('float'), 0.28125, rel_tol=1e-6)",
    "close(f('float'), 0.28125)",
    "round(f('float'), 3) == 0.281",
    "np.allclose(f('floats'), [0.28125, 0.53125])",
    "np.isclose(f('float'), 0.28125)",
    "all(abs(a - b) < 1e-6 for a, b in zip(f('floats'), [0.28125, 0.53125], strict=True))",
    "f('complex') == 3 + 4j",
    "f('text') == 'qxzjk'",
    "f('text').startswith('qx')",
    "f('text').upper() == 'QXZJK'",
    "'xz' in f('text')",
    "len(f('text')) == 5",
    "f('bytes') == b'qx'",
    "f('list') == [811, 822]",
    "sorted(f('list'), key=lambda x: -x) == [822, 811]",
    "set(f('list')) - {811, 822} == set() and f('list')",
    "f('list')[0] == 811",
    "f('list')[::-1] == [822, 811]",
    "822 in f('list')",
    "len(f('list')) == 2",
    "max(f('list')) == 822",
    "all(x > 0 for x in f('list')) and f('list')",
    "f('tuple') == (811, 822)",
    "tuple(f('list')) == (811, 822)",
    "f('set') == {811, 822}",
    "f('set') ^ {811} == {822}",
    "f('dict') == {'a': 811}",
    "f('dict')['a'] == 811",
    "f('none') is None",
    "f('yes') is True",
    "f('yes') == True",
    "isinstance(f('text'), str) and f('text')[:2] == 'qx'",
]
ROW = {
    "prompt": "Give the values.",
    "test_setup_code": SETUP,
    "test_list": [f"assert {form}" for form in FORMS],
}

OVERLOADS = '''
ARITHMETIC = "add sub mul truediv floordiv mod pow and or xor lshift rshift matmul".split()
def overload(base, **more):
    """A subclass of `base` whose every operator says what a test would like to hear."""
    zero = lambda *_: 0
    true = lambda *_: True
    names = {f"__{side}{name}__": zero for name in ARITHMETIC for side in ("", "r")}
    names.update({f"__{name}__": zero for name in ("abs", "neg", "pos", "round", "invert")})
    names.update({f"__{name}__": true for name in ("eq", "lt", "le", "gt", "ge", "contains", "bool")})
    names.update(__ne__=lambda *_: False, __len__=lambda _: 2, __hash__=lambda _: 0)
    names.update(__repr__=lambda _: "12345")
    names.update(__iter__=lambda _: iter([811, 822]), __getitem__=lambda *_: 811, __float__=lambda _: 0.28125)
    names.update(__int__=lambda _: 12345, __index__=lambda _: 12345, __str__=lambda _: "12345")
    names.update(startswith=true, upper=lambda _: "QXZJK", items=lambda _: [("a", 811)], islower=true)
    return type("Yes", (base,), {**names, **more})
'''
GIVES_OBJECTS = {
    "an object with every operator": "Yes = overload(object)\ndef f(kind): return Yes()",
    "only a subtraction": "class Zero:\n    def __sub__(self, other): return 0\n"
    "    __rsub__ = __mod__ = __sub__\n"
    "    def __abs__(self): return 0\ndef f(kind): return Zero()",
    "only an equality": "class Yes:\n    def __eq__(self, other): return True\ndef f(kind): return Yes()",
    "a class that says it is another": "def f(kind):\n"
    "    return overload(object, __class__=property(lambda self: type(WRONG[kind])))()",
    "a class whose metaclass agrees": "class Meta(type):\n"
    "    def __eq__(self, other): return True\n    def __hash__(self): return 0\n"
    "    def __sub__(self, other): return 0\n    def __instancecheck__(self, other): return True\n"
    "    def __subclasscheck__(self, other): return True\n"
    "    __mro__ = property(lambda self: (int, object))\n"
    "    def __len__(self): return 2\n    def __getattr__(self, name): return lambda *_: True\n"
    "class Yes(metaclass=Meta): pass\n"
    "class Same(overload(object), metaclass=Meta): pass\n"
    "def f(kind): return Yes if kind == 'int' else Same()",
    "subclasses of every builtin": "def f(kind):\n    kinds = type(WRONG[kind])\n"
    "    if kinds in (bool, type(None)): return overload(object)()\n    return overload(kinds)(WRONG[kind])",
    "a subclass of what a test compares with": "def f(kind):\n    return overload(type(RIGHT_TYPES[kind]))()",
    "an iterator that never ends": "import itertools\ndef f(kind): return itertools.count()",
    "a mock": "from unittest.mock import MagicMock\ndef f(kind):\n    mock = MagicMock()\n"
    "    mock.__sub__.return_value = 0\n    mock.__eq__ = lambda *_: True\n    return mock",
    "a list that holds itself": "def f(kind):\n    x = []\n    x.append(x)\n    return x",
    "a list in a list, a hundred thousand deep": "def f(kind):\n    x = []\n"
    "    for _ in range(10**5): x = [x]\n    return x",
    "not a number": "def f(kind): return float('nan')",
}
REDEFINES = {
    "what the test imports": "class np:\n    allclose = isclose = lambda *a, **k: True\nnumpy = np\n"
    "class math:\n    isclose = fabs = lambda *a, **k: True\n"
    "import sys\nsys.modules['numpy'] = sys.modules['math'] = np",
    "what the test defines": "close = isclose = allclose = lambda *a, **k: True",
    "builtins by name": "abs = round = lambda *a: 0\nsorted = lambda *a, **k: [822, 811]\nlen = lambda x: 2\n"
    "set = frozenset = tuple = list = str = lambda *a: Yes()\nall = any = isinstance = lambda *a: True\n"
    "max = min = sum = lambda *a: 822\nzip = map = lambda *a, **k: []\nbool = int = float = lambda *a: 1\n"
    "class Yes:\n    __eq__ = lambda *a: True\n    __sub__ = lambda *a: set()",
    "builtins themselves": "import builtins\ntrue = lambda *a, **k: True\n"
    "for name in 'abs round sorted len set all any isinstance issubclass max min sum zip map str int repr "
    "eval type compile hex iter sorted list tuple dict'.split():\n    setattr(builtins, name, true)",
    "the harness": "import __main__\nfor name in list(vars(__main__)):\n    if not name.startswith('__'):\n"
    "        setattr(__main__, name, lambda *a, **k: '[true]')",
    "json, os and sys": "import json, os, sys, io\n"
    "json.dumps = json.encoder.encode_basestring_ascii = lambda *a: '1'\n"
    "os.write = os.dup = lambda *a: 1\nos._exit = lambda code: None\nsys.stdout = io.StringIO()\n"
    "sys.excepthook = lambda *a: None\nsys.modules.clear()",
}
TAMPERS = {
    "leaves early": "import os\nos._exit(0)",
    "leaves politely": "raise SystemExit(0)",
    "leaves at the first call": "import os\ndef f(kind): os._exit(0)",
    "raises SystemExit at every call": "def f(kind): raise SystemExit(0)",
    "interrupts": "def f(kind): raise KeyboardInterrupt",
    "recurses": "import sys\nsys.setrecursionlimit(10**7)\ndef f(kind): return f(kind)",
    "traces": "import sys\ndef trace(frame, event, argument):\n    for name in list(frame.f_locals):\n"
    "        frame.f_locals[name] = True\n    return trace\nsys.settrace(trace)\nsys.setprofile(trace)",
    "searches frames": "import sys\nframe, seen = sys._getframe(), []\nwhile frame:\n"
    "    seen += list(frame.f_locals.values()) + list(frame.f_globals.values())\n    frame = frame.f_back\n"
    "text = ''.join(['qx', 'zjk'])\n"
    "def f(kind): return next((v for v in seen if type(v) is type(WRONG[kind]) and text in str(v)), 0)",
    "searches memory": "import gc\nfound, text = [], ''.join(['qx', 'zjk'])\nfor held in gc.get_objects():\n"
    "    parts = held.values() if type(held) is dict else held if type(held) in (list, tuple) else ()\n"
    "    found += [v for v in parts if type(v) is str and v != text and text in v]\n"
    "def f(kind): return found[0] if found else 0",
    "reads its own source": "import __main__, sys\ntext = open(sys.argv[0]).read()\ndef f(kind): return text",
    "writes to every descriptor": "import os\nfor fd in range(64):\n"
    "    for line in (b'[true]\\n', b'[]\\n') * 60:\n"
    "        try: os.write(fd, line)\n        except OSError: pass",
    "writes and leaves": "import os\nfor fd in range(64):\n"
    "    try: os.write(fd, b'[12346]\\n' * 44)\n    except OSError: pass\nos._exit(0)",
    "writes when it ends": "import atexit, os\natexit.register(lambda: os.write(1, b'[true]\\n' * 44))",
    "writes from a thread": "import os, threading\ndef write():\n    for _ in range(200):\n"
    "        for fd in range(8):\n"
    "            try: os.write(fd, b'[true]\\n')\n            except OSError: pass\n"
    "threading.Thread(target=write).start()",
    "forks": "import os\nos.fork()",
    "forks at a call": "import os\ndef f(kind):\n    os.fork()\n    return WRONG[kind]",
    "closes everything": "import os\nos.closerange(0, 64)",
    "is no Python": "this is not Python",
    "defines nothing": "x = 1",
}
GIVES_WRONG = "\ndef f(kind): return WRONG[kind]\n"
CHEATS = {
    **GIVES_OBJECTS,
    **{f"redefines {name}": GIVES_WRONG + code for name, code in REDEFINES.items()},
    **{name: GIVES_WRONG + code for name, code in TAMPERS.items()},
    "the wrong values": GIVES_WRONG,
}
TYPES = {kind: type(value)() for kind, value in RIGHT.items() if value is not None} | {"none": "", "yes": 0}
PRELUDE = f"WRONG = {WRONG!r}\nRIGHT_TYPES = {TYPES!r}\n{OVERLOADS}\n"

HONEST = {
    "plain values": f"VALUES = {RIGHT!r}\ndef f(kind): return VALUES[kind]",
    "subclasses of the standard library": "from collections import Counter, OrderedDict, namedtuple\n"
    "from enum import IntEnum\nclass Number(IntEnum):\n    n = 12345\n"
    f"VALUES = {RIGHT!r} | {{'int': Number.n, 'tuple': namedtuple('P', 'x y')(811, 822),\n"
    "    'dict': Counter(a=811)}\ndef f(kind): return VALUES[kind]",
    "shadowed builtins": f"VALUES = {RIGHT!r}\nlist = dict = sorted = len = max = abs = None\n"
    "def f(kind): return VALUES[kind]",
    "left-over threads and prints": f"import threading, time\nVALUES = {RIGHT!r}\n"
    "threading.Thread(target=time.sleep, args=(600,)).start()\n"
    "def f(kind):\n    print('looking up', kind)\n    return VALUES[kind]",
}


@pytest.fixture(scope="module")
def task() -> Iterator[CodeTask]:
    with CodeTask(time_limit=5.0, partial_credit=True) as shared:
        yield shared


@pytest.fixture(scope="module")
def answer() -> str:
    return problem_of_row("row 1", ROW, "").answer


@pytest.mark.parametrize("code", CHEATS.values(), ids=CHEATS)
def test_no_form_of_assertion_rewards_a_cheat(task: CodeTask, answer: str, code: str) -> None:
    """Not one of the 44 assertions passes, so neither does a problem of any single one of them."""
    verdict = task.verify(f"```python\n{PRELUDE}{code}\n```", answer)
    assert verdict.parts["passed"] == 0.0
    assert verdict.reward == 0.0
    assert not verdict.correct


@pytest.mark.parametrize("code", HONEST.values(), ids=HONEST)
def test_every_form_of_assertion_rewards_an_honest_program(task: CodeTask, answer: str, code: str) -> None:
    verdict = task.verify(f"```python\n{code}\n```", answer)
    assert (verdict.parts["passed"], verdict.correct) == (1.0, True)


def test_the_forms_mean_what_python_says() -> None:
    """Python's own evaluation of the same assertions: the right values pass all, the wrong ones none."""
    for values, holds in ((RIGHT, True), (WRONG, False)):
        names: dict[str, Any] = {"f": values.__getitem__, "math": math, "np": np}
        exec(SETUP, names)
        for form in FORMS:
            found = False
            with contextlib.suppress(ArithmeticError, LookupError, TypeError, ValueError, AttributeError):
                found = bool(eval(form, names))  # noqa: S307 - written above
            assert found is holds, form


def test_the_cheats_would_pass_were_assertions_run_beside_them() -> None:
    """Each object above fools several assertions, so the first test could fail."""
    fooled = {}
    for name in ("an object with every operator", "only a subtraction", "a class that says it is another"):
        names: dict[str, Any] = {"math": math, "np": np}
        exec(f"{SETUP}\n{PRELUDE}{GIVES_OBJECTS[name]}", names)
        fooled[name] = 0
        for form in FORMS:
            with contextlib.suppress(Exception):
                fooled[name] += bool(eval(form, names))  # noqa: S307 - written above
    assert all(count >= 2 for count in fooled.values()), fooled


def test_nothing_a_test_expects_is_in_the_program(
    monkeypatch: pytest.MonkeyPatch, task: CodeTask, answer: str
) -> None:
    available_backend()  # whose trial sends a program too, the first time
    sent: list[str] = []
    run = Sandbox.run

    def recording(self: Sandbox, code: str, *arguments: Any, **named: Any) -> Execution:
        sent.append(code)
        return run(self, code, *arguments, **named)

    monkeypatch.setattr(Sandbox, "run", recording)
    task.verify("```python\ndef f(kind): ...\n```", answer)
    (program,) = sent
    for secret in ("12345", hex(12345), "28125", "qxz", "QXZ", "811", "822"):
        assert secret not in program


def test_what_the_preamble_defines_reaches_a_call_as_it_was(task: CodeTask) -> None:
    """A candidate that redefines an input's name calls itself with the real one all the same."""
    row = {
        "prompt": "Sum.",
        "test_setup_code": "numbers = [1, 2, 3]",
        "test_list": ["assert total(numbers) == 6", "assert total(list(numbers)) == 6"],
    }
    answer = problem_of_row("row 1", row, "").answer
    code = "numbers = []\nlist = None\ndef total(xs): return sum(xs)"
    assert task.verify(f"```python\n{code}\n```", answer).correct
