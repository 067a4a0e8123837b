"""A server on 127.0.0.1 that speaks ``/v1/chat/completions`` and can misbehave."""

import contextlib
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def good(request):
    """Answer as was asked; the name is made of the tokens that came next."""
    text = request["messages"][0]["content"]
    following = re.findall(r'"next": "(.*?)"\}', text)
    name = {"name": f"next {' '.join(following[:3])}", "description": "Described in a line."}
    return name | {"category": "Science / Tech", "role": "noun-like", "tags": ["trials"]}


class ChatServer:
    """Answers what ``behave`` makes of a request and its number, from 0.

    That is JSON values, which become the text of an answer; a text, which is one; or a pair of a
    status and what is sent as it is. A behaviour may sleep.
    """

    def __init__(self, behave=lambda request, number: good(request)):
        self.behave, self.requests, self.keys = behave, [], []
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # Head and body in one packet: a second one would wait for the answer to the first.
            wbufsize = 2**16

            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                with server._lock:
                    number = len(server.requests)
                    server.requests.append(json.loads(body))
                    server.keys.append(self.headers["authorization"])
                found = server.behave(server.requests[number], number)
                if isinstance(found, tuple):
                    return self.send(*found)
                text = found if isinstance(found, str) or found is None else json.dumps(found)
                message = {"role": "assistant", "content": text}
                return self.send(200, completion(message))

            def send(self, status, value):
                data = (value if isinstance(value, str) else json.dumps(value)).encode()
                kind = "text/html" if data.startswith(b"<") else "application/json"
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(data)))
                self.send_header("retry-after-ms", "1")
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args):
                pass

            def handle(self):
                with contextlib.suppress(ConnectionError):
                    super().handle()

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *exception):
        self.http.shutdown()
        self.http.server_close()


def completion(message):
    """Return what a message is sent in."""
    return {
        "id": "1",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110},
    }
