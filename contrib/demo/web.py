"""A web server that remembers: what it is told in its memory, each write in SQLite.

GET /NAME answers the value, PUT /NAME sets it, and GET / answers the whole state.
"""
import hashlib
import http.server
import json
import os
import sqlite3

values = {}
ballast = os.urandom(64 << 20)  # nothing but this process's memory has it
db = sqlite3.connect("/data/web.db")
db.execute("CREATE TABLE writes (name TEXT, value TEXT)")


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        name = self.path[1:]
        if not name:
            self.answer(200, json.dumps({"values": values, "ballast": hashlib.sha256(ballast).hexdigest()[:16]}))
        elif name in values:
            self.answer(200, values[name])
        else:
            self.answer(404, "")

    def do_PUT(self):
        name = self.path[1:]
        values[name] = self.rfile.read(int(self.headers["Content-Length"])).decode()
        with db:
            db.execute("INSERT INTO writes VALUES (?, ?)", (name, values[name]))
        self.answer(200, values[name])

    def answer(self, status, text):
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


http.server.HTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
