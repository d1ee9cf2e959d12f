"""`kvmesh chat`: one question, or a conversation in the terminal."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from services.cli.chat_client import ChatClient, served_model
from services.cli.commands.arguments import StateOption, UrlOption, api_url
from services.cli.errors import CliError


def chat(
    prompt: Annotated[str, typer.Argument(help="One question; without it a conversation begins.")] = "",
    model: Annotated[
        str, typer.Option(help="Public name of the model; default: smollm2-135m, else the first that is served.")
    ] = "",
    system: Annotated[str, typer.Option(help="System message.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 512,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=2, help="0 is greedy; default: the model's own.")
    ] = None,
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="API key.")] = "",
    url: UrlOption = "",
    state: StateOption = None,
) -> None:
    """Talk to a model of the mesh."""
    root = api_url(url, state)
    client = ChatClient(root, model or served_model(root, api_key), api_key, max_tokens, temperature)
    messages = [{"role": "system", "content": system}] if system else []
    console = Console(highlight=False)
    if prompt:
        _say(client, [*messages, {"role": "user", "content": prompt}], console)
        return
    console.print(f"{client.model} at {client.url}; an empty line or Ctrl-D ends.", style="dim")
    _converse(client, messages, console)


def _converse(client: ChatClient, messages: list[dict[str, str]], console: Console) -> None:
    while question := _question(console):
        messages.append({"role": "user", "content": question})
        try:
            messages.append({"role": "assistant", "content": _say(client, messages, console)})
        except KeyboardInterrupt:
            messages.pop()
            console.print("\n(stopped)", style="dim")
        except CliError as error:
            messages.pop()
            console.print(str(error), style="red", markup=False)


def _question(console: Console) -> str:
    try:
        return console.input("[bold cyan]> [/]").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return ""


def _say(client: ChatClient, messages: list[dict[str, str]], console: Console) -> str:
    answer = ""
    for text in client.stream(messages):
        answer += text
        console.out(text, end="", highlight=False)
    console.print()
    return answer
