# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, driven over WebDriver (Debian: chromium, chromium-driver) with the standard library alone."""

import base64
import json
import pathlib
import socket
import subprocess
import time
import urllib.error
import urllib.request

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # W3C's name for a reference to an element


class Browser:
    def __init__(self, width: int, height: int, dark=False, phone=False):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.driver = subprocess.Popen(["chromedriver", f"--port={self.port}", "--allowed-ips=127.0.0.1"],
                                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
                 "--no-first-run", "--disable-background-networking", "--disable-sync", "--disable-extensions",
                 f"--window-size={width},{height}"]
        if dark:
            flags.append("--force-dark-mode")
        options = {"args": flags}
        if phone:
            options["mobileEmulation"] = {"deviceMetrics": {"width": width, "height": height, "pixelRatio": 2.0, "touch": True}}
        capabilities = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        end = time.monotonic() + 60
        while True:
            try:
                value = self.call("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}}, session=False)
                break
            except urllib.error.URLError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)
        self.session = value["sessionId"]
        if dark:
            self.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            self.call("DELETE", "")
        finally:
            self.driver.terminate()
            self.driver.wait()

    def call(self, method: str, path: str, body=None, session=True):
        url = f"http://127.0.0.1:{self.port}" + (f"/session/{self.session}" if session else "") + path
        data = json.dumps(body if body is not None else {}).encode() if method == "POST" else None
        request = urllib.request.Request(url, data=data, method=method, headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.loads(response.read())["value"]

    def cdp(self, command: str, **parameters):
        return self.call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def open(self, url: str):
        self.call("POST", "/url", {"url": url})

    def element(self, css: str) -> str:
        return self.call("POST", "/element", {"using": "css selector", "value": css})[ELEMENT]

    def click(self, css: str):
        self.call("POST", f"/element/{self.element(css)}/click", {})

    def type(self, css: str, text: str):
        self.call("POST", f"/element/{self.element(css)}/value", {"text": text})

    def run(self, script: str, *arguments):
        return self.call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def wait_for(self, script: str, timeout=60):
        """Until the script returns something true."""
        end = time.monotonic() + timeout
        while True:
            value = self.run(script)
            if value:
                return value
            if time.monotonic() > end:
                raise AssertionError(f"not within {timeout} s: {script}")
            time.sleep(0.1)

    def screenshot(self, path: pathlib.Path):
        path.write_bytes(base64.b64decode(self.call("GET", "/screenshot")))

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.call("POST", "/se/log", {"type": "browser"}) if entry["level"] == "SEVERE"]
