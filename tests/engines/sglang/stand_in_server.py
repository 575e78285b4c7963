"""What an SGLang server looks like from outside, as a script in place of `sglang.launch_server`: health, loads, a child process
that does not watch its parent, a file in shared memory that nobody removes, a semaphore that a resource tracker does.

The first further argument says how it ends: `serves`, `dies` (at once, with a word), `hangs` (never healthy), `crashes` (after a
second of service).
"""

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LOADS = {"loads": [{"num_running_reqs": 3, "num_waiting_reqs": 1, "token_usage": 0.25, "gen_throughput": 40.0}]}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/health" and mode == "hangs":
            self.send_error(503)
            return
        body = json.dumps(LOADS if self.path == "/v1/loads" else {"weight_version": "default", "version": "0.5.23"}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


mode = sys.argv[sys.argv.index("--stand-in") + 1]
if mode == "dies":
    print("ValueError: no such model", flush=True)
    sys.exit(3)
semaphore = multiprocessing.get_context("spawn").Lock()
file = f"/dev/shm/sglang_loads_stand_in_{os.getpid()}"
keep = "import mmap, sys, time; file = open(sys.argv[1], 'w+b'); file.truncate(4096); kept = mmap.mmap(file.fileno(), 4096)"
child = subprocess.Popen([sys.executable, "-c", f"{keep}; print('kept', flush=True); time.sleep(600)", file])
print(f"child {child.pid} file {file} semaphore /dev/shm/sem.{semaphore._semlock.name.removeprefix('/')} ", flush=True)
if mode == "crashes":
    threading.Timer(1.0, lambda: (print("Segmentation fault", flush=True), time.sleep(0.1), os._exit(139))).start()
ThreadingHTTPServer(
    (sys.argv[sys.argv.index("--host") + 1], int(sys.argv[sys.argv.index("--port") + 1])), Handler
).serve_forever()
