"""An MCP server with the official SDK, over standard input and output, or over HTTP: `python mcp_server.py [PORT]`."""

import os
import sys
from typing import Any

from mcp.server import MCPServer

server = MCPServer("numbers")
numbers: list[int] = []


@server.tool()
def add(number: int) -> int:
    """Add a number to the total, and return the total."""
    numbers.append(number)
    return sum(numbers)


@server.tool()
def divide(left: int, right: int) -> float:
    """Divide two numbers."""
    return left / right


@server.tool()
def stop() -> Any:
    """End the server in the middle of a call."""
    os._exit(1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
