"""A web server that remembers: visits in its memory, notes in SQLite."""
import hashlib
import http.server
import json
import os
import sqlite3

ballast = os.urandom(64 << 20)  # nothing but this process's memory has it
visits = 0
db = sqlite3.connect("/data/notes.db")
db.execute("CREATE TABLE IF NOT EXISTS notes (text TEXT)")


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global visits
        visits += 1
        self.answer()

    def do_POST(self):
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        with db:
            db.execute("INSERT INTO notes VALUES (?)", (text,))
        self.answer()

    def answer(self):
        body = json.dumps({
            "visits": visits,
            "notes": [text for (text,) in db.execute("SELECT text FROM notes")],
            "memory": hashlib.sha256(ballast).hexdigest()[:16],
        }).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


http.server.HTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
