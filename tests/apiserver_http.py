"""How tests/apiserver.py answers over HTTP."""

import json
import re
import time
import urllib.parse
from copy import deepcopy
from http.server import BaseHTTPRequestHandler
from typing import Any

import yaml

Node = dict[str, Any]
TICK_S = 0.05
PATH = re.compile(r"/(api|apis/[^/]+)/([^/]+)(?:/namespaces/([^/]+))?/([a-z]+)(?:/([^/]+))?(/\w+)?")


class Refusal(Exception):
    """An answer of the server that is no success."""

    def __init__(self, code: int, reason: str, message: str):
        super().__init__(message)
        self.code, self.reason = code, reason


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any  # tests.apiserver.Server

    def do_GET(self) -> None:
        self.answer()

    do_POST = do_PATCH = do_PUT = do_DELETE = do_GET

    def log_message(self, *_: object) -> None: ...

    def answer(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append((self.command, self.path))
        try:
            self.server.refuse(self.command, url.path)
            if url.path == "/openapi/v2":  # that no kind is known; version 3 is asked first
                self.begin_stream()
            elif found := self.discovery(url.path.strip("/")):
                self.send(200, found)
            else:
                self.of_object(url.path, query, yaml.safe_load(text) if text else {})
        except Refusal as error:
            self.send(error.code, {
                "apiVersion": "v1", "kind": "Status", "status": "Failure", "code": error.code,
                "reason": error.reason, "message": str(error),
            })  # fmt: skip
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def discovery(self, path: str) -> Node | None:
        """What there is, as clients ask for it first."""
        versions = sorted({kind.split()[0] for kind in self.server.kinds})
        groups = [version.split("/") for version in versions if "/" in version]
        if path == "version":
            return {"major": "1", "minor": "36", "gitVersion": "v1.36.0"}
        if path == "api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "apis":
            entries = [(g, {"groupVersion": f"{g}/{v}", "version": v}) for g, v in groups]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [
                {"name": g, "versions": [v], "preferredVersion": v} for g, v in entries
            ]}  # fmt: skip
        if path == "openapi/v3":
            urls = {f"api{'s' * ('/' in v)}/{v}": v for v in versions}
            return {"paths": {k: {"serverRelativeURL": f"/openapi/v3/{k}"} for k in urls}}
        version = re.sub(r"^(openapi/v3/)?apis?/", "", path)
        if version not in versions:
            return None
        here = {k.split()[1]: e for k, e in self.server.kinds.items() if k.split()[0] == version}
        if path.startswith("openapi"):  # kubectl looks whether the server can be strict
            group = version.rpartition("/")[0]
            strict = {"parameters": [{"name": "fieldValidation", "in": "query"}]}
            of = [{"group": group, "version": version.split("/")[-1], "kind": k} for k in here]
            patches = [{"patch": {"x-kubernetes-group-version-kind": k, **strict}} for k in of]
            info = {"title": "", "version": ""}
            paths = {f"/{number}": patch for number, patch in enumerate(patches)}
            return {"openapi": "3.0.0", "info": info, "paths": paths}
        verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
        resources = [
            {"name": e["plural"], "singularName": k.lower(), "kind": k, "verbs": verbs}
            | {"namespaced": e["namespaced"]} for k, e in here.items()
        ]  # fmt: skip
        return {"kind": "APIResourceList", "groupVersion": version, "resources": resources}

    def of_object(self, path: str, query: dict[str, str], body: Node) -> None:
        match = PATH.fullmatch(path)
        version = "" if not match else f"{match[1].removeprefix('apis/')}/{match[2]}"
        version = version.removeprefix("api/")
        plurals = {(k.split()[0], e["plural"]): k for k, e in self.server.kinds.items()}
        kind = plurals.get((version, match[4])) if match else None
        if not match or not kind:
            raise Refusal(404, "NotFound", "the server could not find the requested resource")
        namespace, name = match[3] or "default", match[5]
        if not self.server.kinds[kind]["namespaced"] and kind != "v1 Namespace":
            namespace = "default"
        key = (kind, namespace, name or body.get("metadata", {}).get("name", ""))
        there = self.server.objects.get(key)
        if kind == "v1 Namespace" and name in self.server.namespaces:
            there = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        dry = query.get("dryRun") == "All"
        if name and not there and not (self.command == "PATCH" and self.is_apply()):
            raise Refusal(404, "NotFound", f'{match[4]} "{name}" not found')
        if match[6] == "/log":
            self.stream_log(key, query)
        elif self.command == "GET":
            self.send(200, there) if there else self.list(kind, match[3], query)
        elif self.command == "DELETE":
            if not dry:
                self.server.policies.append((body or {}).get("propagationPolicy"))
                self.server.remove(key)
            self.send(200, there or {})
        else:
            new = deepcopy(body)
            if self.command == "PATCH":
                new = merged(there or {}, body)
            elif self.command == "POST" and there:
                raise Refusal(409, "AlreadyExists", f'{match[4]} "{key[2]}" already exists')
            self.server.judge(kind, namespace, there, new)
            new = new if dry else self.server.put(new, namespace)
            if not there and not dry:
                self.server.controller(new)
            self.send(200 if there else 201, new)

    def is_apply(self) -> bool:
        """Whether this is a server-side apply, which may create."""
        return self.headers.get("Content-Type", "").startswith("application/apply-patch")

    def list(self, kind: str, namespace: str | None, query: dict[str, str]) -> None:
        """The objects of a kind, or with ``watch`` each change of them."""

        def items() -> dict[str, Node]:
            with self.server.lock:
                return {
                    item["metadata"]["uid"]: deepcopy(item)
                    for (k, n, _), item in self.server.objects.items()
                    if k == kind and namespace in (None, n) and selected(item, query)
                }

        if query.get("watch") not in ("true", "1", "True"):
            head = {"apiVersion": kind.split()[0], "kind": f"{kind.split()[1]}List"}
            version = {"resourceVersion": str(self.server.version)}
            self.send(200, head | {"metadata": version, "items": list(items().values())})
            return
        self.begin_stream()
        seen, until = items(), time.monotonic() + float(query.get("timeoutSeconds", 60))
        if query.get("resourceVersion") in (None, "", "0"):
            seen = {}
        while time.monotonic() < until:
            now = items()
            changes = [("DELETED", seen[uid]) for uid in seen.keys() - now.keys()]
            changes += [("MODIFIED" if uid in seen else "ADDED", item) for uid, item in now.items()
                        if seen.get(uid) != item]  # fmt: skip
            for change, item in changes:
                self.wfile.write(json.dumps({"type": change, "object": item}).encode() + b"\n")
            seen = now
            time.sleep(TICK_S)

    def stream_log(self, key: tuple[str, str, str], query: dict[str, str]) -> None:
        """What a pod has printed; with ``follow``, until it ends."""
        self.begin_stream()
        lines = self.server.logs.get(key[2], [])
        at = max(0, len(lines) - int(query.get("tailLines", len(lines))))
        if "sinceSeconds" in query:
            at = self.server.resumed.get(key[2], 0)
        while True:
            pod = self.server.objects.get(key, {"status": {}})
            running = pod["status"].get("phase") == "Running" and query.get("follow") == "true"
            for number, line in enumerate(lines[at:], at):
                self.wfile.write(f"{line}\n".encode())
                if self.server.cuts and running:
                    self.server.cuts -= 1
                    self.server.resumed[key[2]] = number + 1
                    return
            at = max(at, len(lines))
            if not running:
                return
            time.sleep(TICK_S)
            lines = self.server.logs.get(key[2], [])

    def begin_stream(self) -> None:
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Connection", "close")
        self.end_headers()

    def send(self, code: int, content: Node) -> None:
        text = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def selected(item: Node, query: dict[str, str]) -> bool:
    """Whether the selectors of the query fit."""
    labels = item["metadata"].get("labels", {})
    for part in re.findall(r"[^,(]+(?:\([^)]*\))?", query.get("labelSelector", "")):
        if in_set := re.fullmatch(r"(\S+) in \((.*)\)", part.strip()):
            key, values = in_set[1], [value.strip() for value in in_set[2].split(",")]
        else:
            key, _, value = part.replace("==", "=").partition("=")
            values = [value]
        if labels.get(key) not in values:
            return False
    for part in filter(None, query.get("fieldSelector", "").split(",")):
        path, _, value = part.partition("=")
        node: Any = item
        for name in path.split("."):
            node = node.get(name, {})
        if node != value:
            return False
    return True


def merged(old: Any, patch: Any) -> Any:
    """RFC 7396; a list replaces a list, and directives of strategic patches are dropped."""
    if not isinstance(patch, dict):
        return patch
    new = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            new.pop(key, None)
        elif not key.startswith("$"):
            new[key] = merged(new.get(key), value)
    return new
