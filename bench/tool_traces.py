"""`python -m bench.tool_traces`: recorded functions and conversations, driven through the tools API.

A mesh of its own (two CPU workers of the default model) and the official client; every request is asked twice, at once
and streamed. Rows of the table: each function alone, as published and with the types that JSON schemas have; each turn
of recorded conversations whose history has calls and results; conversations of which the user's part is recorded and
the model's is its own. Of each row: what was refused and why, how many answers ended by themselves or were cut by their
length, those with something wrong, and those of which the stream made another one. Greedy.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import openai
from rich.console import Console
from rich.table import Table

from bench.fault_mesh import dumped
from bench.kv_table import Machine
from bench.local_mesh import started
from bench.tool_conversations import (
    Asked,
    Message,
    Recorded,
    Tool,
    asked,
    function_sets,
    recorded,
    traces_folder,
    with_json_types,
)
from bench.tool_replies import CHOICES, Verdict, answered, ask_both
from services.common.models import DEFAULT_MODEL

RESULTS = Path(__file__).parent / "results" / "tool_traces.json"
_CLIENTS, _TIMEOUT_S = 4, 300.0
# What the airline's customers talk about, nearly: its own functions are not recorded.
_AIRLINE = "travel_booking"
_OPTIONS = ("--workers", "2", "--kvstores", "0")
_ENVIRONMENT = {"KVMESH_LOG_LEVEL": "WARNING"}


class Driver:
    """Asks one mesh. tokens: of each answer at most."""

    def __init__(self, client: openai.OpenAI, tokens: int) -> None:
        self._client = client
        self._tokens = tokens

    def ask(self, choice: str, tools: Sequence[Tool], messages: Sequence[Message]) -> Verdict:
        """One request, twice."""
        return ask_both(
            self._client,
            choice,
            model=DEFAULT_MODEL,
            messages=messages,
            tools=tools,
            max_tokens=self._tokens,
            temperature=0,
        )

    def function(self, tool: Tool) -> list[Verdict]:
        """A function alone, which the model has to call."""
        name = tool["function"]["name"]
        return [self.ask("named", [tool], [{"role": "user", "content": f"Please call {name} for me."}])]

    def turns(self, conversation: Recorded, tools: Sequence[Tool]) -> list[Verdict]:
        """Each turn by each choice."""
        return [self.ask(choice, tools, messages) for messages in conversation.requests() for choice in CHOICES]

    def talk(self, user: Asked, tools: Sequence[Tool]) -> list[Verdict]:
        """One turn after another, by another choice each; what was answered is history. Ends where it is refused."""
        messages: list[Message] = []
        verdicts: list[Verdict] = []
        for turn, text in enumerate(user.turns):
            messages.append({"role": "user", "content": text})
            verdict = self.ask(CHOICES[turn % len(CHOICES)], tools, messages)
            verdicts.append(verdict)
            if verdict.reply.refusal:
                break
            messages += answered(verdict, f"{user.name}-{turn}")
        return verdicts


@dataclass(frozen=True, slots=True)
class Row:
    """Counts of requests. refused, wrong: by why. whole: answers that ended by themselves and are right."""

    name: str
    requests: int
    refused: Mapping[str, int]
    whole: int
    cut: int
    wrong: Mapping[str, int]
    differing: int
    by_choice: Mapping[str, int]


def row(name: str, verdicts: Sequence[Verdict]) -> Row:
    """What they come to."""
    taken = [one for one in verdicts if not one.reply.refusal]
    return Row(
        name,
        len(verdicts),
        dict(Counter(_why(one.reply.refusal) for one in verdicts if one.reply.refusal)),
        sum(not one.faults and not one.is_cut for one in taken),
        sum(one.is_cut for one in taken),
        dict(Counter(fault for one in taken for fault in one.faults)),
        sum(one.differing for one in verdicts),
        dict(Counter(one.choice for one in taken if one.reply.calls)),
    )


def _why(message: str) -> str:
    """Without what differs from one function or prompt to the next."""
    text = message.rpartition("'message': ")[2]
    return "".join("N" if character.isdigit() else character for character in text)[:100]


def rows(driver: Driver, folder: Path, given: argparse.Namespace) -> Iterator[Row]:
    """The table. Raises OSError."""
    sets = function_sets(folder)
    published = [tool for one in sets.values() for tool in one]
    typed = {name: [with_json_types(tool) for tool in one] for name, one in sets.items()}
    with ThreadPoolExecutor(_CLIENTS) as threads:
        some = published[: given.functions]
        yield row("functions, as published", _joined(threads.map(driver.function, some)))
        yield row("functions", _joined(threads.map(driver.function, [with_json_types(tool) for tool in some])))
        airline = typed[_AIRLINE]
        told = recorded(folder)[: given.sessions]
        yield row("tau-bench turns", _joined(threads.map(lambda one: driver.turns(one, airline), told)))
        users = asked(folder)[: given.users]
        talks = threads.map(lambda one: driver.talk(one, [tool for name in one.sets for tool in typed[name]]), users)
        yield row("BFCL conversations", _joined(talks))


def _joined(lists: Iterable[list[Verdict]]) -> list[Verdict]:
    return [verdict for some in lists for verdict in some]


def main(argv: Sequence[str]) -> int:
    """Run, print, write; 1 when an answer was wrong or differed, 2 without traces."""
    given = _parser().parse_args(argv)
    folder = given.traces or traces_folder()
    if folder is None:
        sys.stderr.write("bench: --traces: which folder?\n")
        return 2
    machine = Machine.here()
    with started(_OPTIONS, _ENVIRONMENT) as (_, port, _given):
        url = f"http://127.0.0.1:{port}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=_TIMEOUT_S) as client:
            found = list(rows(Driver(client, given.tokens), folder, given))
    if given.json is not None:
        options = {name: value for name, value in vars(given).items() if name not in ("json", "traces")}
        written = {"machine": asdict(machine), "options": options, "rows": [asdict(one) for one in found]}
        given.json.write_text(json.dumps(written, indent=1) + "\n")
    _show(found)
    return 1 if any(one.wrong or one.differing for one in found) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.tool_traces", description=__doc__, allow_abbrev=False)
    parser.add_argument("--traces", type=Path, help="folder; else $KVMESH_TRACES, or shared/traces beside the checkout")
    parser.add_argument("--functions", type=int, help="only so many (all)")
    parser.add_argument("--sessions", type=int, help="only so many of tau-bench, the shortest (all)")
    parser.add_argument("--users", type=int, help="only so many of BFCL's users (all)")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer at most (64)")
    parser.add_argument("--json", type=Path, help=f"where the result goes, such as {RESULTS.name}")
    return parser


def _show(found: Sequence[Row]) -> None:
    columns = ("", "requests", "refused", "whole and right", "cut", "wrong", "stream differs", "with calls")
    table = Table(*columns, title="Each request at once and streamed")
    for one in found:
        counts = (one.requests, dumped(one.refused), one.whole, one.cut, dumped(one.wrong), one.differing)
        table.add_row(one.name, *map(str, counts), dumped(one.by_choice))
    Console(width=150).print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
