"""As much of wandb's server as its client asks of for a run, on loopback: it keeps what a dashboard would show.

GraphQL for the run, its resume, files, artifacts and alerts; the stream of history and system metrics. A query that it
does not know is an error with its name.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "0" * 40
HISTORY, EVENTS, SUMMARY = "wandb-history.jsonl", "wandb-events.jsonl", "wandb-summary.json"
_OPERATION = re.compile(r"(?:query|mutation)\s+(\w+)")


@dataclass
class Bucket:
    """A run as the server has it; `history` and `events` by line, so that a line that is sent twice is kept once."""

    name: str
    display_name: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    history: dict[int, dict[str, Any]] = field(default_factory=dict)
    events: dict[int, dict[str, Any]] = field(default_factory=dict)
    alerts: list[dict[str, Any]] = field(default_factory=list)
    artifacts: list[dict[str, Any]] = field(default_factory=list)
    exit_codes: list[int] = field(default_factory=list)
    text: str = ""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """History in the order of its lines."""
        return [self.history[line] for line in sorted(self.history)]

    def series(self, name: str) -> list[tuple[int, Any]]:
        """(step, value) of a series, in the order of its lines."""
        return [(row["_step"], row[name]) for row in self.rows if name in row]


class WandbServer:
    """What arrived, by the run's id; `failing`: the HTTP status of every answer; `delay`: seconds before each."""

    def __init__(self) -> None:
        self.runs: dict[str, Bucket] = {}
        self.unknown: list[str] = []
        self.failing = 0
        self.delay = 0.0
        self.num_refused = 0
        self.lock = threading.Lock()

    def of(self, name: str) -> Bucket:
        return self.runs.setdefault(name, Bucket(name))

    def graphql(self, query: str, variables: dict[str, Any]) -> Any:
        """The answer's `data`."""
        match = _OPERATION.search(query)
        name = match[1] if match else query[:60]
        answer: Callable[[dict[str, Any]], Any] | None = getattr(self, f"_{name}", None)
        if answer is None:
            self.unknown.append(name)
            return None
        return answer(variables)

    def stream(self, name: str, body: dict[str, Any]) -> None:
        run = self.of(name)
        run.text += json.dumps(body)
        for file, kept in ((HISTORY, run.history), (EVENTS, run.events)):
            chunk = body.get("files", {}).get(file)
            for number, line in enumerate(chunk["content"]) if chunk else ():
                kept[chunk["offset"] + number] = json.loads(line)
        summary = body.get("files", {}).get(SUMMARY)
        if summary:
            run.summary = json.loads(summary["content"][-1])
        if body.get("complete"):
            run.exit_codes.append(body.get("exitcode", 0))

    def _Viewer(self, _: Any) -> Any:
        return {"viewer": {"id": "1", "entity": "team", "username": "me", "flags": "{}", "teams": {"edges": []}}}

    def _ServerFeaturesQuery(self, _: Any) -> Any:
        return {"serverInfo": {"features": []}}

    def _RunStoppedStatus(self, _: Any) -> Any:
        return {"project": {"run": {"stopped": False}}}

    def _OrganizationCoreWeaveOrganizationID(self, _: Any) -> Any:
        return {"entity": {"organization": None}}

    def _RunResumeStatus(self, variables: dict[str, Any]) -> Any:
        run = self.runs.get(variables["name"])
        return {
            "model": {"id": "1", "name": "p", "entity": {"id": "1", "name": "team"}, "bucket": run and _status(run)}
        }

    def _UpsertBucket(self, variables: dict[str, Any]) -> Any:
        inserted = variables["name"] not in self.runs
        run = self.of(variables["name"])
        run.text += json.dumps(variables)
        run.display_name = variables.get("displayName") or run.display_name
        if variables.get("config"):
            run.config = json.loads(variables["config"])
        if variables.get("summaryMetrics"):
            run.summary = json.loads(variables["summaryMetrics"])
        bucket = {**_status(run), "id": run.name, "sweepName": None, "description": None, "project": _project()}
        return {"upsertBucket": {"bucket": bucket, "inserted": inserted}}

    def _CreateRunFiles(self, variables: dict[str, Any]) -> Any:
        files = [{"name": file, "uploadUrl": f"{self.address}/storage/{file}"} for file in variables["files"]]
        return {"createRunFiles": {"runID": variables["run"], "uploadHeaders": [], "files": files}}

    def _MarkRunFilesUploaded(self, _: Any) -> Any:
        return {"markRunFilesUploaded": {"success": True}}

    def _NotifyScriptableRunAlert(self, variables: dict[str, Any]) -> Any:
        self.of(variables["runName"]).alerts.append(variables)
        return {"notifyScriptableRunAlert": {"success": True}}

    def _ArtifactType(self, _: Any) -> Any:
        return {"project": {"artifact": {"artifactType": {"name": "model"}}}}

    def _FetchArtifactDigestAlgorithm(self, _: Any) -> Any:
        return {"project": None}

    def _XXHashDigestsEnabled(self, _: Any) -> Any:
        return {"entity": None}

    def _CreateArtifact(self, variables: dict[str, Any]) -> Any:
        given = variables["input"]
        self.of(given["runName"]).artifacts.append(given)
        sequence = {"id": "1", "latestArtifact": None}
        return {"createArtifact": {"artifact": {"id": "a1", "state": "COMMITTED", "artifactSequence": sequence}}}

    address = ""


def _project() -> Any:
    return {"id": "1", "name": "p", "entity": {"id": "1", "name": "team"}}


def _status(run: Bucket) -> Any:
    """What a resume learns of a run."""
    return {
        "name": run.name,
        "displayName": run.display_name,
        "summaryMetrics": json.dumps(run.summary),
        "config": json.dumps(run.config),
        "historyLineCount": len(run.history),
        "eventsLineCount": len(run.events),
        "logLineCount": 0,
        "historyTail": json.dumps([json.dumps(row) for row in run.rows[-1:]]),
        "eventsTail": json.dumps([json.dumps(run.events[line]) for line in sorted(run.events)[-1:]]),
        "tags": [],
        "wandbConfig": json.dumps({"t": 1}),
    }


@contextmanager
def wandb_server(port: int = 0, kept: WandbServer | None = None) -> Iterator[WandbServer]:
    """A server on a free port of loopback, or one that comes back on `port` with what `kept` has."""
    server = kept or WandbServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Content-Encoding") == "gzip":
                content = gzip.decompress(content)
            time.sleep(server.delay)
            with server.lock:
                if server.failing:
                    server.num_refused += 1
                    self.reply(server.failing, {})
                elif self.path == "/graphql":
                    body = json.loads(content)
                    data = server.graphql(body["query"], body.get("variables") or {})
                    errors = [] if data is not None else [{"message": f"unknown query: {body['query'][:80]}"}]
                    self.reply(200, {"data": data, **({"errors": errors} if errors else {})})
                else:
                    if self.path.endswith("/file_stream"):
                        server.stream(self.path.split("/")[-2], json.loads(content))
                    self.reply(200, {})

        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.reply(200, {})

        def reply(self, status: int, body: Any) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    class Listener(ThreadingHTTPServer):
        daemon_threads = True
        allow_reuse_address = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """The client hangs up when it has what it wants; anything else is this server's fault."""
            error = sys.exc_info()[1]
            if not isinstance(error, ConnectionError):
                server.unknown.append(repr(error))

    with Listener(("127.0.0.1", port), Handler) as listener:
        server.address = f"http://127.0.0.1:{listener.server_address[1]}"
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            listener.shutdown()
            thread.join()
