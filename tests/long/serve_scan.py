#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What scanners try on a server first, against `lodestone serve` with the shipped model; exits 1 with a finding.

usage: serve_scan.py [--wapiti PROGRAM] [PART]...      parts: traversal smuggling oversized slow wapiti; all without one

slow needs Debian's slowhttptest; wapiti needs PyPI's wapiti3: python3 -m venv /tmp/scan && /tmp/scan/bin/pip install wapiti3"""

import argparse
import http.client
import itertools
import json
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "scenarios"))

from server import Server  # noqa: E402

CHAT = "/v1/chat/completions"
SECRET = "the words of a file that nobody may read"


def say(good: bool, what: str) -> bool:
    print(("ok   " if good else "FAIL ") + what, flush=True)
    return good


def alive(server: Server) -> bool:
    return server.process.poll() is None and server.request("GET", "/health", timeout=5)[0] == 200


# ---- Ways out of the folder. ----
STEPS = ("../", "..\\", "..%2f", "..%5c", "%2e%2e/", "%2e%2e%2f", "%252e%252e%252f", "..%252f", "..%c0%af", "..%ef%bc%8f", "....//", "..;/",
         ".%00./", "..%00/", "%uff0e%uff0e/")
PLACES = ("/{}", "/v1/contexts/{}", "/v1/contexts/{}/text", "/v1/models/{}", "/health/{}", "/v1/contexts/book/{}", "/?file={}",
          "/v1/contexts?name={}")


def files_of(folder: pathlib.Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def got(server: Server, path: str, method="GET") -> bytes:
    return server.raw(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode("latin-1"))


def traversal(server: Server, folder: pathlib.Path) -> bool:
    targets = [step * depth + name for step in STEPS for depth in (1, 2, 8) for name in ("secret.txt", "etc/passwd")]
    targets += ["/etc/passwd", "file:///etc/passwd", str(folder / "secret.txt"), "secret.txt%00.lode", "~root/.profile", ".git/config", ".env"]
    before, leaks = files_of(folder), []
    for place, target in itertools.product(PLACES, targets):
        for method in ("GET", "DELETE") if place.startswith("/v1/contexts/{}") else ("GET",):
            if re.search(rb"root:|" + SECRET.encode(), got(server, place.format(target), method)):
                leaks.append((method, place, target))
    for target in targets:
        for reply in (server.request("POST", "/v1/contexts", {"name": target, "text": "Words."}),
                      server.request("POST", CHAT, {"context": target, "messages": [{"role": "user", "content": "Who?"}]}),
                      server.request("POST", CHAT, {"context": "book", "attention": f"plan:{target}", "max_tokens": 1,
                                                    "messages": [{"role": "user", "content": "Who?"}]})):
            if reply[0] < 400 or SECRET.encode() in reply[2] or b"root:" in reply[2]:
                leaks.append((target, reply))
    return say(not leaks and files_of(folder) == before and alive(server),
               f"traversal: {len(targets)} ways out in {len(PLACES)} places and 3 fields lead nowhere and change no file {leaks[:3]}")


# ---- Smuggling: bytes that a proxy in front may take for a body and the server for a request, or the other way round. ----
ENCODINGS = ("Transfer-Encoding: chunked", "Transfer-Encoding : chunked", "Transfer-Encoding:\tchunked", "Transfer-Encoding: \x0bchunked",
             "Transfer-Encoding:chunked", "transfer-encoding: CHUNKED", "Transfer-Encoding: xchunked", "Transfer-Encoding: chunked, identity",
             "Transfer-Encoding: identity, chunked", "Transfer-Encoding: 'chunked'", 'Transfer-Encoding: "chunked"', "Transfer-Encoding: chunk",
             "Transfer-Encoding: chunked;q=1", "Transfer-Encoding: chunked\x00", "Transfer-Encoding: \x00chunked", "Transfer-Encoding: ,chunked",
             "Transfer-Encoding: chunked,", "Transfer-Encoding:\r\n chunked", "X: x\r\n Transfer-Encoding: chunked", " Transfer-Encoding: chunked",
             "X: x\nTransfer-Encoding: chunked", "X: x\rTransfer-Encoding: chunked", "Transfer-Encoding: x\r\nTransfer-Encoding: chunked",
             "Transfer-Encoding: chunked\r\nTransfer-Encoding: x", "Transfer_Encoding: chunked", "Transfer\xadEncoding: chunked",
             "Transfer-Encoding\x00: chunked", "\x00Transfer-Encoding: chunked", "Transfer-Encoding: c\xadhunked", "Transfer-Encoding\r\n: chunked",
             "Content-Encoding: chunked", "TE: chunked", "Connection: Transfer-Encoding\r\nTransfer-Encoding: chunked")
LENGTHS = ("Content-Length: {}", "Content-Length : {}", "Content-Length:{}", "Content-Length: +{}", "Content-Length: -{}", "Content-Length: 0{}",
           "Content-Length: {},{}", "Content-Length: {} ", "Content-Length: {}\r\nContent-Length: 0", "Content-Length: 0\r\nContent-Length: {}",
           "Content-Length: {}\x0b", "Content-Length:\r\n {}", "Content_Length: {}", "Content-Length: {}.0", "Content-Length: {:#x}")
HIDDEN = "GET /hidden HTTP/1.1\r\nHost: localhost\r\nX-Ignore: "
CHUNKS = {"the end in front": "0\r\n\r\n" + HIDDEN, "a size with an extension": f"{len(HIDDEN):x};a=b\r\n{HIDDEN}\r\n0\r\n\r\n",
          "a size of LF alone": f"{len(HIDDEN):x}\n{HIDDEN}\n0\n\n", "a size with 0x": f"0x{len(HIDDEN):x}\r\n{HIDDEN}\r\n0\r\n\r\n",
          "a size with a sign": f"+{len(HIDDEN):x}\r\n{HIDDEN}\r\n0\r\n\r\n", "a size behind a blank": f" {len(HIDDEN):x}\r\n{HIDDEN}\r\n0\r\n\r\n",
          "an extension with a lone LF": f"1;\n\r\nx\r\n0\r\n\r\n{HIDDEN}", "a size of 65 bits": f"1{0:016x}\r\n{HIDDEN}\r\n0\r\n\r\n"}


def answers_to(server: Server, data: bytes) -> list[int]:
    """The statuses of all that comes back; the connection's other end is closed behind the bytes."""
    return [int(one) for one in re.findall(rb"HTTP/1\.1 (\d+) ", server.raw(data, timeout=40, shut=True))]


def framed(*fields: str) -> str:
    return "\r\n".join([f"POST {CHAT} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *fields, "", ""])


def framed_by_its_length(data: str) -> bool:
    """Fields that are others by every reading (a known name misspelt, or the folded end of another) leave a plain length, or none, so that
    what stands behind is a request of its own for a proxy, too; here it is refused."""
    head = data[:data.index("\r\n\r\n")].lower()
    others = ("transfer_encoding", "transfer\xadencoding", "content_length", "json\r\n transfer-encoding", "content-encoding: chunked", "\r\nte: chunked",
              "x: x\r\n transfer-encoding")
    return any(other in head for other in others)


def smuggling(server: Server, _folder: pathlib.Path) -> bool:
    both = [framed(f"Content-Length: {len('0' + HIDDEN) + 4}", encoding) + "0\r\n\r\n" + HIDDEN for encoding in ENCODINGS]
    both += [framed(encoding, "Content-Length: 4") + CHUNKS["a size with an extension"] for encoding in ENCODINGS]
    alone = [framed(length.format(len(HIDDEN), len(HIDDEN))) + HIDDEN for length in LENGTHS]
    found = []
    for data in both + alone:
        statuses = answers_to(server, data.encode("latin-1"))
        if any(status < 400 for status in statuses) or 404 in statuses or len(statuses) > 1 + framed_by_its_length(data):
            found.append((data[:200], statuses))
    for name, chunks in CHUNKS.items():
        statuses = answers_to(server, (framed("Transfer-Encoding: chunked") + chunks).encode("latin-1"))
        if 404 in statuses or len(statuses) > 1 + (name == "the end in front"):
            found.append((name, statuses))
    refused = answers_to(server, (framed("Content-Length: 5", "Transfer-Encoding: chunked") + "0\r\n\r\n" + HIDDEN + "\r\n\r\n").encode())
    return say(not found and refused == [400] and alive(server),
               f"smuggling: {len(both) + len(alone) + len(CHUNKS) + 1} requests of two readings, and no hidden one is answered {found[:3]}")


# ---- Too much of something. ----
def oversized(server: Server, _folder: pathlib.Path) -> bool:
    many = "".join(f"X-{i}: y\r\n" for i in range(100_000))
    trials = {"a header of 1 MB": f"GET / HTTP/1.1\r\nHost: localhost\r\nX: {'x' * 1_000_000}\r\n\r\n", "100,000 headers": f"GET / HTTP/1.1\r\nHost: localhost\r\n{many}\r\n",
              "a path of 1 MB": f"GET /{'x' * 1_000_000} HTTP/1.1\r\nHost: localhost\r\n\r\n", "a method of 1 MB": "G" * 1_000_000,
              "a query of 1 MB": f"GET /?{'a=b&' * 250_000} HTTP/1.1\r\nHost: localhost\r\n\r\n", "a cookie of 1 MB": f"GET / HTTP/1.1\r\nHost: localhost\r\nCookie: {'c' * 1_000_000}\r\n\r\n",
              "1 MB without a line end": "x" * 1_000_000, "a host of 15 KB": f"GET / HTTP/1.1\r\nHost: {'h' * 15_000}\r\n\r\n",
              "a range of 5,000 parts": "GET / HTTP/1.1\r\nHost: localhost\r\nRange: bytes=" + ",".join(f"{i}-" for i in range(2500)) + "\r\n\r\n"}
    found = {}
    for name, data in trials.items():
        try:
            statuses = answers_to(server, data.encode())
        except (BrokenPipeError, ConnectionResetError):
            statuses = []  # closed amid the flood
        if any(status < 400 for status in statuses) and name != "a range of 5,000 parts" or len(statuses) > 1:
            found[name] = statuses
    pipelined = answers_to(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)
    good = not found and pipelined == [200] * 1000 and alive(server)
    return say(good, f"oversized: {len(trials)} requests are refused, 1,000 pipelined ones answered in order {found}")


# ---- Slow clients: slowhttptest says whether the service was there for others. ----
SLOW = {"slow loris": ["-H", "-i", "5"], "a slow body": ["-B", "-i", "5", "-s", "8192", "-t", "POST"], "a slow reader": ["-X", "-w", "1", "-y", "8", "-n", "5", "-z", "8"],
        "ranges": ["-R", "-a", "5", "-b", "3000"]}


def slow(server: Server, _folder: pathlib.Path) -> bool:
    if not shutil.which("slowhttptest"):
        return say(False, "slow: expected Debian's slowhttptest, found none: apt-get install slowhttptest")
    good = True
    for name, flags in SLOW.items():
        url = f"http://127.0.0.1:{server.port}{CHAT if '-B' in flags else '/'}"
        done = subprocess.run(["slowhttptest", "-c", "1000", "-r", "200", "-l", "30", "-p", "3", "-u", url, *flags], capture_output=True,
                              encoding="utf-8", errors="replace", timeout=120, check=False)
        plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
        there = re.findall(r"service available:\s*(\w+)", plain)
        ended = re.findall(r"Exit status:\s*(.*)", plain)
        good &= say(bool(there) and "NO" not in there and alive(server),
                    f"{name}: 1,000 connections of slowhttptest, the service was there at {there.count('YES')} of {len(there)} looks; {ended}")
    return good


# ---- Wapiti's modules. ----
MODULES = "backup,brute_login_form,cookieflags,crlf,csp,csrf,exec,file,htaccess,htp,http_headers,information_disclosure,ldap,log4shell,methods,"\
          "permanentxss,redirect,shellshock,spring4shell,sql,ssti,timesql,upload,xss,xxe,buster,nikto"
NEEDS_OUTSIDE = {"htp", "log4shell", "spring4shell", "xxe", "nikto", "brute_login_form"}  # lists or end points on the network


def wapiti(server: Server, folder: pathlib.Path, program: str) -> bool:
    if not shutil.which(program):
        return say(False, f"wapiti: expected a program {program}, found none: install PyPI's wapiti3 and name it by --wapiti")
    url, report = f"http://127.0.0.1:{server.port}/", folder / "wapiti.json"
    starts = [url + path for path in ("v1/contexts", "v1/contexts/book", "v1/contexts/book/text", "v1/models?name=a", "health?x=1", "metrics",
                                      "v1/contexts?name=book&file=a.txt")]
    modules = ",".join(m for m in MODULES.split(",") if m not in NEEDS_OUTSIDE)
    done = subprocess.run([program, "-u", url, *itertools.chain.from_iterable(("-s", s) for s in starts), "-m", modules, "-f", "json", "-o",
                           str(report), "--flush-session", "--store-session", str(folder / "session"), "--max-scan-time", "240", "-v", "0"],
                          capture_output=True, encoding="utf-8", errors="replace", timeout=400, check=False)
    if not report.exists():
        return say(False, f"wapiti: expected a report, found none: {done.stdout[-500:]} {done.stderr[-500:]}")
    read = json.loads(report.read_text(encoding="utf-8"))
    found = [f"{kind}: {one['info']} ({one['method']} {one['path']})" for group in ("vulnerabilities", "anomalies")
             for kind, many in read[group].items() for one in many]
    return say(not found and alive(server), f"wapiti {read['infos'].get('version')}: {len(found)} findings over {len(starts) + 1} addresses {found[:8]}")


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--wapiti", default="wapiti")
    parser.add_argument("parts", nargs="*", default=[])
    arguments = parser.parse_args()
    parts = {"traversal": traversal, "smuggling": smuggling, "oversized": oversized, "slow": slow,
             "wapiti": lambda server, folder: wapiti(server, folder, arguments.wapiti)}
    if unknown := [part for part in arguments.parts if part not in parts]:
        parser.error(f"expected parts among {', '.join(parts)}, found {', '.join(unknown)}")
    good = True
    with tempfile.TemporaryDirectory(prefix="lodestone-scan-") as name:
        folder = pathlib.Path(name)
        (folder / "secret.txt").write_text(SECRET, encoding="utf-8")
        with Server(folder / "contexts", "-m", ROOT / "models" / "pocket", "-a", "squeezed", "--quiet") as server:
            server.upload("book", (ROOT / "demo" / "document.txt").read_text(encoding="utf-8")[:5000])
            server.wait_for("book", timeout=300)
            for part in arguments.parts or parts:
                began = time.monotonic()
                try:
                    good &= parts[part](server, folder)
                except (OSError, http.client.HTTPException, socket.timeout) as error:
                    good &= say(False, f"{part}: the server did not answer: {error!r}")
                print(f"     {part}: {time.monotonic() - began:.0f} s", flush=True)
            good &= say(server.stop() == 0, "the server ends as it should")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
