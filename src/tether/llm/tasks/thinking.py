"""Where a response's answer begins: after what the model wrote to itself."""

from __future__ import annotations

_OPENING, _CLOSING = "<think>", "</think>"


def after_thinking(response: str) -> str:
    r"""What follows a response's thinking, the only place where an answer counts.

    Thinking is what stands between ``<think>`` and ``</think>``. Chat templates may have put the first of
    the two in the prompt, so all before the last ``</think>`` is thinking. Nothing follows thinking that is
    not closed. A response without these tags is its own answer.

    >>> after_thinking(r"<think>Is it \boxed{4}?</think> It is \boxed{5}.")
    ' It is \\boxed{5}.'
    >>> after_thinking(r"<think>Is it \boxed{4}?")
    ''
    """
    closed = response.rfind(_CLOSING)
    if response.rfind(_OPENING) > closed:
        return ""
    return response if closed < 0 else response[closed + len(_CLOSING) :]
